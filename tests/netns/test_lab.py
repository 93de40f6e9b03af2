"""The laboratory itself: rates, delays, losses and faults are what they say, and nothing of it
outlives whoever made it.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from netns.lab import FOLDER, Lab, OffTargetError, inside, missing, stale, sweep

pytestmark = pytest.mark.netns
Build = Callable[..., Lab]

CHILD = """
import sys, subprocess
sys.path.insert(0, {tests!r})
from netns.lab import Lab
lab = Lab(2, rtt_ms=20)
asleep = subprocess.Popen(lab.hosts[0].command(["sleep", "600"]))
print(lab.name, asleep.pid, lab.processes[0].pid, flush=True)
sys.stdin.read()
"""


def test_a_rate_is_not_exceeded_and_used(build: Build) -> None:
    data = bytes(3_000_000)
    got, seconds = build(2, mbit=50).transfer(data)
    assert got == data
    assert 0.5 < len(data) * 8 / seconds / 50e6 < 1.0


def test_every_pair_has_the_delay(build: Build) -> None:
    lab = build(3, rtt_ms=30)
    assert lab.ping_ms(0, 1) > 29.5
    assert 29.5 < lab.ping_ms(2, 1) < math.inf


def test_a_run_off_target_is_void(build: Build) -> None:
    lab = build(2)
    lab.rtt_ms = 30  # it was built without
    with pytest.raises(OffTargetError, match="wanted 30 ms"):
        lab.check()


def test_loss(build: Build) -> None:
    lab = build(2, loss=0.5)
    lost = sum(
        lab.ping_ms(count=1) == math.inf for _ in range(8)
    )  # each way: a ping in four comes back
    assert lost >= 1
    free = build(2)
    free.hosts[0].prepare("lose", share=1.0)()
    assert free.ping_ms(count=1) == math.inf


def test_a_black_hole_swallows_until_it_is_healed(build: Build) -> None:
    lab = build(3)
    lab.hosts[1].prepare("blackhole")()
    assert lab.ping_ms(0, 1, 1) == math.inf
    assert lab.ping_ms(1, 0, 1) == math.inf
    assert lab.ping_ms(0, 2, 1) < math.inf
    lab.hosts[1].heal()
    assert lab.ping_ms(0, 1, 1) < math.inf


def test_slow_lasts_until_it_is_healed(build: Build) -> None:
    lab = build(2, mbit=200)
    lab.hosts[0].prepare("slow", mbit=2)()
    _, slow = lab.transfer(bytes(200_000))
    assert slow > 0.5  # 0.8 s less the first burst: a bucket cannot be faster
    lab.hosts[0].heal()
    _, fast = lab.transfer(bytes(8_000_000))  # 32 s at the slow rate
    assert fast < 16


def test_corrupt_changes_one_place_in_one_segment(build: Build) -> None:
    lab = build(2)
    lab.hosts[0].prepare("corrupt")()
    data = b"\x07" * 5_000_000
    got, _ = lab.transfer(data)
    assert len(got) == len(data)
    wrong = [index for index, byte in enumerate(got) if byte != 7]
    assert len(wrong) == 2
    assert wrong[1] == wrong[0] + 1
    assert lab.hosts[0].corrupted() == 1


def test_corrupt_spares_other_ports(build: Build) -> None:
    lab = build(2)
    lab.hosts[0].prepare("corrupt", port=1)()
    data = b"\x07" * 1_000_000
    assert lab.transfer(data)[0] == data
    assert lab.hosts[0].corrupted() == 0


def test_reset_is_felt_at_both_ends(build: Build) -> None:
    lab = build(2)
    near, far = lab.connect()
    with near, far:
        near.sendall(b"x")
        assert far.recv(1) == b"x"
        lab.hosts[0].prepare("reset")()
        for end in (near, far):
            with pytest.raises((ConnectionResetError, ConnectionAbortedError)):
                end.recv(1)


def test_a_switch_that_is_not_thrown_does_nothing(build: Build) -> None:
    lab = build(2)
    lab.hosts[0].prepare("blackhole").cancel()
    assert lab.ping_ms() < math.inf


def test_laboratories_do_not_meet(build: Build) -> None:
    one, two = build(2), build(2)
    names = {host.namespace for lab in (one, two) for host in lab.hosts}
    assert len(names) == 4
    assert one.ping_ms() < math.inf
    one.close()
    assert two.ping_ms() < math.inf


def test_nothing_outlives_its_maker(tmp_path: Path) -> None:
    program = CHILD.format(tests=str(Path(__file__).resolve().parent.parent))
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child.stdin, child.stdout:
        name, *pids = child.stdout.readline().split()
        assert not [left for left in stale() if left.startswith(name)]
        child.kill()
        child.wait()
        assert {f"{name}-h0", f"{name}-h1", f"{name}-hub"} <= set(sweep())
    assert not list(FOLDER.glob(f"{name}-*"))
    for pid in pids:
        for _ in range(500):
            if (
                not Path(f"/proc/{pid}").exists()
                or "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            ):
                break
            time.sleep(0.01)
        else:
            os.kill(int(pid), signal.SIGKILL)
            raise AssertionError(f"process {pid} lives on")


def test_hosts_are_cut_off_from_this_machine(build: Build) -> None:
    host = build(1).hosts[0]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def dial() -> int:
            with socket.socket() as sock:
                return sock.connect_ex(("127.0.0.1", port))

        assert inside(host.namespace, dial) != 0


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (
        missing.__wrapped__()
        == "not found: ip, tc, ss, nft, cc (apt-get install gcc iproute2 nftables)"
    )
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert missing.__wrapped__().startswith("network namespaces need root on Linux")
