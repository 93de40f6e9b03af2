"""Settings of an engine thread, and what is asked of its sockets."""

from __future__ import annotations

import ipaddress
import socket
import sys
from dataclasses import dataclass, field

from ..errors import ConfigError


def offers(name: str) -> bool:
    """Whether the system lets this process use a TCP congestion control."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        return control(sock, name)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How an engine treats its lanes. Times in seconds."""

    beat_s: float = 0.2  # a lane that sent nothing for this long sends a heartbeat
    dead_after_s: float = 1.0  # a lane that received nothing for this long is dead: five beats
    hello_s: float = 2.0  # the other end's first authenticated record must come within this
    # of the interpreter while an engine lives; 5 ms would cost an all-reduce tenfold beside busy
    # Python
    switch_interval_s: float = 0.0005
    # TCP congestion control by name, such as "bbr"; None: the system's. Ignored where unavailable.
    congestion: str | None = None
    # Whether a lane can be given bbr; without it several share the work.
    bbr: bool = field(default_factory=lambda: offers("bbr"))
    # Unsent bytes the kernel keeps: a heartbeat is never late behind megabytes.
    notsent_lowat_bytes: int | None = 131_072
    max_up: int = 0  # bytes/s over all lanes; 0: no limit
    max_down: int = 0
    # What a lane took is under way for this long: not sent again, whoever asks.
    resend_after_s: float = 0.4
    # the kernel's own verdict on unacknowledged data; a safety net, longer than any pause of a
    # reader
    user_timeout_s: float = 20.0

    def __post_init__(self) -> None:
        if not 0 < self.beat_s <= self.dead_after_s / 2:
            raise ConfigError(
                f"dead_after_s {self.dead_after_s} must be at least twice beat_s {self.beat_s}",
                key="lanes.dead_after_s",
            )


RTO_MOST_MS = 1000
LOSSY: tuple[tuple[str, int], ...] = (
    ("TCP_THIN_LINEAR_TIMEOUTS", 1),
    ("TCP_RTO_MAX_MS", RTO_MOST_MS),
    ("TCP_RTO_MIN_US", 50_000),
    ("TCP_DELACK_MAX_US", 10_000),
)
"""For links that lose packets. TCP doubles its pause before each repetition of the same bytes:
after five losses in a row nothing came for 12 s. With the first (Linux) few bytes under way are
repeated at a constant pause, with the second (Linux 6.15) no pause is longer than a second. The
other two (Linux 6.16) are for the end of a transfer, after which nothing comes that would tell of a
loss: what is not acknowledged is repeated a twentieth of a second after it should have been, not a
fifth, and the other end acknowledges it sooner."""


def tune(sock: socket.socket, settings: EngineSettings) -> None:
    """Prepare a lane's socket. Everything but non-blocking mode is optional: a system or socket
    family without it is left as it is.
    """
    sock.setblocking(False)
    options: list[tuple[str, int | bytes]] = [("TCP_NODELAY", 1)]
    if settings.congestion is not None:
        options.append(("TCP_CONGESTION", settings.congestion.encode()))
    if settings.notsent_lowat_bytes is not None:
        options.append(("TCP_NOTSENT_LOWAT", settings.notsent_lowat_bytes))
    options.append(("TCP_USER_TIMEOUT", int(1000 * settings.user_timeout_s)))
    options += LOSSY
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    for name, value in options:
        number = option_number(name)
        if number is None:
            continue
        try:
            sock.setsockopt(socket.IPPROTO_TCP, number, value)
        except OSError:
            continue  # not this kernel, or not permitted: the lane works without


def control(sock: socket.socket, name: str) -> bool:
    """Use a TCP congestion control, such as "bbr", from now on. False where the system does not
    allow it: then nothing has changed.
    """
    number = option_number("TCP_CONGESTION")
    if number is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        sock.setsockopt(socket.IPPROTO_TCP, number, name.encode())
    except OSError:
        return False
    return True


def begin_bbr(sock: socket.socket) -> None:
    """Use bbr, which the system must allow, as at a connection's beginning; anew, where it is used
    already.
    """
    control(sock, "reno")  # to ask for what is used already changes nothing
    control(sock, "bbr")


def on_this_machine(sock: socket.socket) -> bool:
    """Whether the other end is on loopback: no link that could be slow, whatever the rate."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        return ipaddress.ip_address(sock.getpeername()[0].partition("%")[0]).is_loopback
    except OSError:
        return False  # it has gone already


NUMBERS = {
    "TCP_NOTSENT_LOWAT": {"linux": 25, "darwin": 0x201},
    "TCP_THIN_LINEAR_TIMEOUTS": {"linux": 16},
    "TCP_RTO_MAX_MS": {"linux": 44},
    "TCP_RTO_MIN_US": {"linux": 45},
    "TCP_DELACK_MAX_US": {"linux": 46},
}
"""Options that Python 3.11 does not name everywhere."""


def option_number(name: str, platform: str = sys.platform) -> int | None:
    """The number of a TCP option here, or None."""
    number = getattr(socket, name, None)
    return NUMBERS.get(name, {}).get(platform) if number is None else number
