"""Hosts in network namespaces: rates by token buckets, delay by a user-space router, loss and
faults by nftables.

    with Lab(4, mbit=100, rtt_ms=50) as lab:
        lab.check()             # OffTargetError: this machine cannot keep the delay
        Popen(lab.hosts[0].command(["python", ...]))       # a process on a host
        lab.hosts[1].prepare("blackhole")(); lab.hosts[1].heal()

Every host has one interface, eth0, with its own address (10.X.N.2); a hub routes between them.
Nothing is made outside of the namespaces, and these are named after the process that made them:
laboratories of several processes do not meet, and what a killed process left behind is swept by the
next one.

    host N: eth0 ══ token bucket ══ hN :hub: routes ─ (tun: delay) ─ hM ══ token bucket ══ eth0 :M

With ``internet=True`` the hosts' addresses are no private ones (11.X.N.2), so that programs take
them for the internet's, and there are IPv6 ones, too. A host may be made a home router with hosts
behind it (`netns.nat`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import os
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

T = TypeVar("T")
Fault = Literal["blackhole", "lose", "slow", "corrupt", "reset"]
PREFIX = "atoll"
FOLDER = Path("/run/netns")
TOOLS = {"ip": "iproute2", "tc": "iproute2", "ss": "iproute2", "nft": "nftables", "cc": "gcc"}
CLONE_NEWNET = 0x40000000
BURST = "32k"  # of a token bucket: 2.6 ms of 100 Mbit/s
QUEUE_MS = 100
MAX_HOSTS = 64
UNPRIVILEGED = (
    "unshare",
    "-Urnm",
    "sh",
    "-c",
    'mount -t tmpfs none /run && mkdir /run/netns && exec "$@"',
    "sh",
)
"""Before a command: it runs as root of namespaces of its own, where the kernel lets users have
them.
"""
PINGS = 15
FORWARDING = {
    "ipv4/ip_forward": "1",
    "ipv4/conf/all/rp_filter": "0",
    "ipv4/conf/default/rp_filter": "0",
    "ipv4/conf/all/send_redirects": "0",
    "ipv6/conf/all/forwarding": "1",
}
"""Settings of a namespace that routes."""
PATIENCE_S = 60.0  # a bound for hangs

_serial = itertools.count()


class LabError(Exception):
    """A laboratory cannot be built, or a command in it failed."""


class OffTargetError(LabError):
    """The laboratory does not do what it was asked for: whatever is measured in it is void."""


# ── namespaces
# ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _started(pid: int) -> str:
    """When a process was started, in ticks since boot; "" when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]
    except OSError:
        return ""


def run(command: Sequence[str], text: str = "") -> str:
    """Run a command with this stdin; its stdout. Raises LabError with its stderr."""
    found = subprocess.run(list(command), input=text, capture_output=True, text=True, check=False)
    if found.returncode:
        raise LabError(f"{' '.join(command)}: {found.stderr.strip()}\n{text}".strip())
    return found.stdout


def enter(namespace: str) -> None:
    """This thread is in a namespace from now on. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(FOLDER / namespace, "rb") as handle:
        if libc.setns(handle.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")


def inside(namespace: str, work: Callable[[], T]) -> T:
    """Do something in a namespace: in a thread that enters it and ends afterwards. Sockets made
    there stay there.
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def work_there() -> None:
        try:
            enter(namespace)
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work_there, name=f"in {namespace}")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


def _remove(namespace: str) -> None:
    """End the processes of a namespace of ours, and it."""
    with contextlib.suppress(LabError):
        for pid in run(["ip", "netns", "pids", namespace]).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    with contextlib.suppress(LabError):
        run(["ip", "netns", "del", namespace])


def stale() -> list[str]:
    """Namespaces of laboratories whose process is gone."""
    found: list[str] = []
    for path in sorted(FOLDER.glob(f"{PREFIX}-*")):
        fields = path.name.split("-")
        if len(fields) >= 4 and fields[1].isdigit() and _started(int(fields[1])) != fields[2]:
            found.append(path.name)
    return found


def sweep() -> list[str]:
    """Remove what killed processes left behind; the names."""
    names = stale()
    for name in names:
        _remove(name)
    return names


@functools.cache
def missing() -> str:
    """Why no laboratory can be built here, and what to do about it; "" when it can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux (scripts/netlab user COMMAND makes a user one, where the kernel allows it)"
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"not found: {', '.join(lacking)} (apt-get install {' '.join(sorted({TOOLS[tool] for tool in lacking}))})"
    try:
        with Lab(2, mbit=100, rtt_ms=1) as lab:
            lab.hosts[0].prepare("blackhole")()
    except (LabError, OSError, subprocess.SubprocessError) as error:
        return f"this kernel or container does not allow it: {str(error).splitlines()[0]}"
    return ""


# ── the laboratory
# ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Switch:
    """Commands that have been started and wait for their input: thrown, they take effect at once."""

    def __init__(self, commands: Sequence[tuple[Sequence[str], str]]) -> None:
        self._waiting = [
            (
                subprocess.Popen(
                    list(command),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                ),
                text,
            )
            for command, text in commands
        ]

    def __call__(self) -> None:
        """Throw it. Raises LabError when the system refuses."""
        waiting, self._waiting = self._waiting, []
        for process, text in waiting:
            _, errors = process.communicate(text)
            if process.returncode:
                raise LabError(
                    f"{' '.join(process.args if isinstance(process.args, list) else [])}: {errors.strip()}\n{text}"
                )

    def cancel(self) -> None:
        """It will not be thrown."""
        waiting, self._waiting = self._waiting, []
        for process, _ in waiting:
            process.kill()
            process.communicate()


def _bucket(mbit: float) -> str:
    return f"tbf rate {round(mbit * 1e6)}bit burst {BURST} latency {QUEUE_MS}ms"


def _table(name: str, hook: str, rules: Sequence[str]) -> str:
    return f"table inet {name} {{\nchain c {{ type filter hook {hook} priority 0;\n{chr(10).join(rules)}\n}}\n}}\n"


def _drop(share: float) -> str:
    return "drop" if share >= 1 else f"numgen random mod 1000000 < {round(share * 1e6)} drop"


def _corruption(port: int) -> list[str]:
    """Byte 800 of a segment of more than 1200 is one of the payload; its neighbour is set too, so
    that something does change.
    """
    change = "meta length > 1200 limit rate 1/day burst 1 packets counter @th,6400,16 set 0xa55a"
    ends = (f"tcp dport {port}", f"tcp sport {port}") if port else ("meta l4proto tcp",)
    return [f'oifname "eth0" {end} {change}' for end in ends]


class Host:
    """One host. Faults last until `heal`, and add up."""

    def __init__(self, lab: Lab, index: int) -> None:
        self.lab, self.index = lab, index
        self.namespace = f"{lab.name}-h{index}"
        self.address = f"{lab.block}.{lab.net}.{index + 1}.2"
        self.gateway = f"{lab.block}.{lab.net}.{index + 1}.1"
        self.prefix6 = f"2a0b:{lab.net:x}:{index + 1:x}"
        """Its /48, where the laboratory has IPv6: ::2 is the host, ::1 the hub."""
        self.hub_device = self._fault = f"h{index}"
        self.mbit: float | None = None
        self.down: float | None = None

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs ``argv`` here. It replaces itself by ``argv``, so that its pid
        is that of the program.
        """
        return ["ip", "netns", "exec", self.namespace, *argv]

    def inside(self, work: Callable[[], T]) -> T:
        """Do something in this host's network."""
        return inside(self.namespace, work)

    def rate(self, mbit: float | None, down: float | None = None) -> None:
        """Limit the host to ``mbit`` up and ``down`` down, as much as up when left out; None: no
        limit.
        """
        for namespace, device, limit in (
            (self.namespace, "eth0", mbit),
            (self.lab.hub, self.hub_device, mbit if down is None else down),
        ):
            with contextlib.suppress(LabError):  # there may be none
                run(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"])
            if limit is not None:
                run(
                    [
                        "tc",
                        "-n",
                        namespace,
                        "qdisc",
                        "add",
                        "dev",
                        device,
                        "root",
                        *_bucket(limit).split(),
                    ]
                )
        self.mbit, self.down = mbit, down

    def prepare(
        self, fault: Fault, *, mbit: float = 1.0, port: int = 0, share: float = 0.0
    ) -> Switch:
        """A fault that is ready to strike when the switch is thrown. It lasts until `heal`.

        "blackhole": nothing gets to the host or away from it any more, and nobody is told. "lose":
        this share (0 to 1) of arriving packets is lost. "slow": the host has ``mbit``. "corrupt":
        one byte of the next large TCP segment that leaves (to or from ``port``, if it is not 0) is
        changed, and checksums fit. "reset": all TCP connections end by RST at both ends, once.
        """
        if fault == "slow":
            batch = (
                ["tc", "-n", self.namespace, "-batch", "-"],
                ["tc", "-n", self.lab.hub, "-batch", "-"],
            )
            devices = "eth0", self.hub_device
            return Switch(
                [
                    (command, f"qdisc replace dev {device} root {_bucket(mbit)}\n")
                    for command, device in zip(batch, devices, strict=True)
                ]
            )
        if fault == "reset":
            return Switch(
                [
                    (
                        self.command(["sh", "-c", "read go; exec ss -K -t -n -H state connected"]),
                        "go\n",
                    )
                ]
            )
        if fault == "corrupt":
            return Switch(
                [(self.command(["nft", "-f", "-"]), _table(fault, "output", _corruption(port)))]
            )
        both = f'iifname "{self.hub_device}" {{0}}', f'oifname "{self.hub_device}" {{0}}'
        rules = (
            [rule.format("drop") for rule in both]
            if fault == "blackhole"
            else [both[1].format(_drop(share))]
        )
        return Switch(
            [
                (
                    ["ip", "netns", "exec", self.lab.hub, "nft", "-f", "-"],
                    _table(self._fault, "forward", rules),
                )
            ]
        )

    def corrupted(self) -> int:
        """How many segments "corrupt" has changed."""
        text = run(self.command(["nft", "list", "table", "inet", "corrupt"]))
        return sum(int(piece.split()[0]) for piece in text.split("counter packets ")[1:])

    def heal(self) -> None:
        """Undo the faults; the rate is again what `rate` was given last."""
        run(self.command(["nft", "-f", "-"]), "table inet corrupt {}\ndelete table inet corrupt\n")
        run(
            ["ip", "netns", "exec", self.lab.hub, "nft", "-f", "-"],
            f"table inet {self._fault} {{}}\ndelete table inet {self._fault}\n",
        )
        self.rate(self.mbit, self.down)

    def setting(self, path: str, value: str) -> None:
        """Write a network setting of this host, such as ``ipv4/tcp_rmem``."""
        write_settings(self.namespace, {path: value})


class Lab:
    """Some hosts and the hub between them; a context manager.

    ``mbit``: rate of every host, up and down, or one a host; None: no limit. ``rtt_ms``: round-trip
    time between any two hosts. ``loss``: share of packets lost on the way. ``internet``: public
    addresses, IPv6 too. Raises LabError.
    """

    def __init__(
        self,
        hosts: int,
        *,
        mbit: float | Sequence[float | None] | None = None,
        rtt_ms: float = 0.0,
        loss: float = 0.0,
        internet: bool = False,
    ) -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise LabError(f"{hosts} hosts; 1 to {MAX_HOSTS} are possible")
        sweep()
        self.name = f"{PREFIX}-{os.getpid()}-{_started(os.getpid())}-{next(_serial)}"
        self.net = (
            16 + next(_serial) % 200
        )  # every laboratory has its own hub: these only need not be alike in one
        self.hub = f"{self.name}-hub"
        self.rtt_ms, self.loss, self.internet = rtt_ms, loss, internet
        self.block = 11 if internet else 10
        self.more: list[str] = []  # namespaces behind routers
        self.processes: list[subprocess.Popen[str]] = []  # they end when their stdin does
        self.hosts = [Host(self, index) for index in range(hosts)]
        self.fifo = False
        try:
            self._wire()
            rates = list(mbit) if isinstance(mbit, Sequence) else [mbit] * hosts
            for host, rate in zip(self.hosts, rates, strict=True):
                if rate is not None:
                    host.rate(rate)
            if rtt_ms:
                self._start_router()
            if loss:
                self._lose(loss)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process in it and remove it. Idempotent."""
        processes, self.processes = self.processes, []
        for process in processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
        for namespace in (*self.more, *(host.namespace for host in self.hosts), self.hub):
            _remove(namespace)

    # ---- building
    def _wire(self) -> None:
        names = [self.hub, *(host.namespace for host in self.hosts)]
        links = [
            f"link add name {host.hub_device} netns {self.hub} type veth peer name eth0 netns {host.namespace}"
            for host in self.hosts
        ]
        run(
            ["ip", "-batch", "-"],
            "\n".join([*(f"netns add {name}" for name in names), *links]) + "\n",
        )
        hub = ["link set lo up"]
        for host in self.hosts:
            hub += [
                f"addr add {host.gateway}/24 dev {host.hub_device}",
                f"link set {host.hub_device} up",
            ]
            if self.internet:
                hub.append(f"addr add {host.prefix6}::1/64 dev {host.hub_device} nodad")
        configure(self.hub, hub)
        for host in self.hosts:
            own = [
                "link set lo up",
                f"addr add {host.address}/24 dev eth0",
                "link set eth0 up",
                f"route add default via {host.gateway}",
            ]
            if self.internet:
                own += [
                    f"addr add {host.prefix6}::2/64 dev eth0 nodad",
                    f"route add default via {host.prefix6}::1",
                ]
            configure(host.namespace, own)
        write_settings(self.hub, FORWARDING)

    def _start_router(self) -> None:
        command = [
            "ip",
            "netns",
            "exec",
            self.hub,
            str(router()),
            "tun0",
            str(round(self.rtt_ms * 500)),
        ]
        self.fifo = self.start(command) == "ready fifo"
        lines = [
            "link set tun0 up txqueuelen 10000",
            "addr add 10.255.255.1/32 dev tun0",
            "route add default dev tun0 table 100",
        ]
        lines += [f"rule add iif {host.hub_device} lookup 100" for host in self.hosts]
        if self.internet:
            lines += ["route add ::/0 dev tun0 table 100"]
            lines += [f"rule add from ::/0 iif {host.hub_device} lookup 100" for host in self.hosts]
        configure(self.hub, lines)
        write_settings(self.hub, {"ipv4/conf/tun0/rp_filter": "0"})

    def start(self, command: Sequence[str]) -> str:
        """Start a helper that ends when its stdin does, at the latest with the laboratory; its
        first line. Raises LabError.
        """
        process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.processes.append(process)
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise LabError(f"did not start: {' '.join(command)}")
        return line

    def _lose(self, share: float) -> None:
        # With a delay router each packet is forwarded twice. Where it comes from a host it may
        # still be a bundle of twenty segments that the host's network card would have cut: one loss
        # of all of them is kinder than as many one by one. The delay router passes on single ones.
        rule = f'iifname "tun0" {_drop(share)}' if self.rtt_ms else _drop(share)
        run(["ip", "netns", "exec", self.hub, "nft", "-f", "-"], _table("loss", "forward", [rule]))

    # ---- using and checking
    def connect(self, a: int = 0, b: int = 1) -> tuple[socket.socket, socket.socket]:
        """A TCP connection from host ``a`` to host ``b``: both ends."""
        near, far = self.hosts[a], self.hosts[b]
        with far.inside(lambda: socket.create_server((far.address, 0))) as server:
            port = server.getsockname()[1]
            dialled = near.inside(
                lambda: socket.create_connection((far.address, port), timeout=PATIENCE_S)
            )
            accepted, _ = server.accept()
            accepted.settimeout(PATIENCE_S)
            return dialled, accepted

    def transfer(self, data: bytes, a: int = 0, b: int = 1) -> tuple[bytes, float]:
        """Send ``data`` from host ``a`` to host ``b`` by plain TCP: what arrives, and the seconds
        until its last byte.
        """
        near, far = self.connect(a, b)

        def send() -> None:
            with near:
                near.sendall(data)

        sender = threading.Thread(target=send)
        began = time.perf_counter()
        sender.start()
        with far:
            pieces = list(iter(lambda: far.recv(1 << 18), b""))
        elapsed = time.perf_counter() - began
        sender.join()
        return b"".join(pieces), elapsed

    def ping_ms(self, a: int = 0, b: int = 1, count: int = PINGS) -> float:
        """Median round-trip time from host ``a`` to host ``b``; infinite when half of the packets
        do not come back.
        """
        sender, target = self.hosts[a], self.hosts[b]
        with sender.inside(
            lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
        ) as sock:
            sock.settimeout(max(0.25, self.rtt_ms / 1000 * 4))
            times = [_ping(sock, target.address, number) for number in range(count)]
        return statistics.median(times)

    def on_target(self, ping_ms: float) -> bool:
        """Whether this round-trip time is the one that was asked for."""
        return abs(ping_ms - self.rtt_ms) <= 1.5 + 0.03 * self.rtt_ms

    def check(self, a: int = 0, b: int = 1) -> float:
        """The round-trip time in ms. Raises OffTargetError when it is not the one that was asked
        for.
        """
        found = self.ping_ms(a, b)
        if not self.on_target(found):
            raise OffTargetError(
                f"ping is {found:.2f} ms, wanted {self.rtt_ms:g} ms; the machine is too busy, or the laboratory broken"
            )
        return found


def configure(namespace: str, lines: Sequence[str]) -> None:
    """Commands of ``ip`` in a namespace, all at once. Raises LabError."""
    run(["ip", "-n", namespace, "-batch", "-"], "\n".join(lines) + "\n")


def write_settings(namespace: str, settings: dict[str, str]) -> None:
    def write() -> None:
        for path, value in settings.items():
            Path("/proc/sys/net", path).write_text(value, encoding="ascii")

    inside(namespace, write)


def _checksum(data: bytes) -> int:
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    total = (total & 0xFFFF) + (total >> 16)
    return ~(total + (total >> 16)) & 0xFFFF


def _ping(sock: socket.socket, address: str, number: int) -> float:
    """One ICMP echo, in ms."""
    ident = os.getpid() & 0xFFFF
    body = struct.pack(">BBHHH", 8, 0, 0, ident, number) + bytes(48)
    body = struct.pack(">BBHHH", 8, 0, _checksum(body), ident, number) + bytes(48)
    began = time.perf_counter()
    sock.sendto(body, (address, 0))
    while True:
        try:
            reply = sock.recv(2048)
        except TimeoutError:
            return float("inf")
        header = (reply[0] & 15) * 4
        kind, _, _, back, sequence = struct.unpack_from(">BBHHH", reply, header)
        if (kind, back, sequence) == (0, ident, number):
            return (time.perf_counter() - began) * 1000


def router() -> Path:
    """The delay router, compiled once a version of its source. Raises LabError."""
    source = Path(__file__).with_name("router.c")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    user = (
        Path("/proc/self/uid_map").read_text(encoding="ascii").split()[1]
    )  # who root of a user namespace is outside of it
    folder = Path(tempfile.gettempdir()) / f"atoll-netlab-{user}-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise LabError(f"{folder} belongs to somebody else")
    program = folder / f"router-{digest}"
    if not program.exists():
        fresh = program.with_suffix(f".{os.getpid()}")
        run(["cc", "-O2", "-o", str(fresh), str(source)])
        fresh.replace(program)
    return program
