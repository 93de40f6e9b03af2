"""What a node takes its links for, from recorded counters of its lanes."""

from __future__ import annotations

import socket

import pytest

from atoll.collectives.engine.meter import AHEAD_S, LaneCounters, Meter, read_socket
from atoll.collectives.pace import Pace

STEP = 0.2


class Recorded:
    """A sequence of windows, each: bytes acknowledged by lane, which lanes were busy throughout,
    which were held up by their receivers.
    """

    def __init__(self, lanes: int = 3, **caps: int) -> None:
        self.meter = Meter(**caps)
        self.now = 0.0
        self.lanes = {number: LaneCounters(0, 0, 0.0, 0.0, 0.05) for number in range(lanes)}
        self.meter.read(self.now, self.lanes)

    def window(
        self,
        *acked: int,
        busy: tuple[int, ...] = (),
        held_up: tuple[int, ...] = (),
        received: int = 0,
        step_s: float = STEP,
    ) -> Pace:
        for _ in range(2):  # a stretch
            self.now += step_s
            for number, count in enumerate(acked):
                old = self.lanes[number]
                busy_s, held_up_s = (
                    old.busy_s + step_s * (number in busy),
                    old.held_up_s + step_s * (number in held_up),
                )
                self.lanes[number] = LaneCounters(
                    old.acked + count, old.received + received, busy_s, held_up_s, 0.05, 0.04
                )
            self.meter.read(self.now, self.lanes)
        return self.meter.pace


def test_busy_lanes_together_give_the_uplink() -> None:
    found = Recorded().window(800_000, 900_000, 700_000, busy=(0, 1, 2), received=500_000)
    assert found == Pace(up=12_000_000, down=0, proven=7_500_000, rtt_s=0.05)


def test_a_member_that_waits_for_others_is_not_slow() -> None:
    swarm = Recorded()
    before = swarm.window(800_000, 800_000, 800_000, busy=(0, 1, 2))
    for _ in range(100):  # it sends little, as there is little to send
        assert swarm.window(50_000, 50_000, 50_000).up == before.up


def test_a_receiver_that_does_not_read_says_nothing_of_the_link() -> None:
    assert Recorded().window(90_000, 90_000, 0, busy=(0, 1), held_up=(0, 1)).up == 0


def test_one_slow_receiver_does_not_make_its_sender_slow() -> None:
    swarm = Recorded()
    before = swarm.window(800_000, 800_000, 800_000, busy=(0, 1, 2))
    for _ in range(5):  # a second in which only the lane to it is busy
        assert swarm.window(0, 0, 250_000, busy=(2,)).up == before.up


def test_a_link_that_became_slow_is_believed_in_time() -> None:
    swarm = Recorded()
    swarm.window(800_000, 800_000, 800_000, busy=(0, 1, 2))
    seconds = 0.0
    while swarm.window(100_000, 100_000, 100_000, busy=(0, 1, 2)).up > 2_000_000:
        seconds += 2 * STEP
    assert 20 < seconds < 80


def test_a_link_that_was_slow_for_a_while_is_not_known_once_it_carries_far_more() -> None:
    """It may be too fast now to be the limit in any stretch: what was measured would be announced
    for ever.
    """
    swarm = Recorded()
    assert swarm.window(20_000, 20_000, 30_000, busy=(0, 1, 2)).up == 350_000
    assert swarm.window(80_000, 80_000, 80_000).up == 350_000
    assert swarm.window(400_000, 400_000, 400_000) == Pace(up=0, down=0, proven=0, rtt_s=0.05)
    swarm.window(800_000, 800_000, 800_000, busy=(0, 1, 2))
    assert swarm.window(800_000, 800_000, 800_000, busy=(0, 1, 2)).up == 12_000_000


def test_noise_is_not_announced() -> None:
    swarm = Recorded()
    said = {
        swarm.window(800_000 + noise, 800_000, 800_000, busy=(0, 1, 2)).up
        for noise in (0, 90_000, -200_000, 150_000, 30_000)
    }
    assert said == {12_000_000}
    assert swarm.window(1_200_000, 1_200_000, 1_200_000, busy=(0, 1, 2)).up == 18_000_000


def test_a_pause_of_the_process_and_a_new_lane_say_nothing() -> None:
    swarm = Recorded()
    assert swarm.window(9_000_000, 0, 0, busy=(0,), step_s=1.5).up == 0
    swarm.lanes[7] = LaneCounters(10_000_000, 10_000_000, 5.0, 0.0)
    swarm.now += STEP
    swarm.meter.read(swarm.now, swarm.lanes)
    assert swarm.meter.pace.proven == 0
    assert swarm.window(100_000, 100_000, 100_000, busy=(0,)).up == 1_500_000


def test_how_far_contributions_may_run_ahead() -> None:
    swarm = Recorded()
    assert swarm.meter.lead.rate == 0
    swarm.window(800_000, 800_000, 800_000, busy=(0, 1, 2))
    assert swarm.meter.lead == (12_000_000, AHEAD_S + 2 * 0.04, False)
    swarm.window(8_000_000, 8_000_000, 8_000_000, busy=(0, 1, 2))  # the processor is the limit
    assert swarm.meter.lead.rate == 0
    assert Recorded(max_up=2_000_000).meter.lead.rate == 2_000_000


@pytest.mark.parametrize(
    ("least_rtts", "near"),
    [((0.00004, 0.0004), True), ((0.00004, 0.0006), False), ((0.0, 0.0), False)],
)
def test_all_are_near_if_every_lane_is_short(least_rtts: tuple[float, ...], near: bool) -> None:
    meter = Meter()
    meter.read(
        0.0,
        {
            number: LaneCounters(0, 0, 0.0, 0.0, 0.02, least)
            for number, least in enumerate(least_rtts)
        },
    )
    assert meter.lead.near == near


def test_a_limit_holds_from_the_beginning_and_bounds_what_is_measured() -> None:
    swarm = Recorded(max_up=2_000_000, max_down=5_000_000)
    assert swarm.meter.pace[:2] == (2_000_000, 5_000_000)
    assert swarm.window(800_000, 800_000, 800_000, busy=(0, 1, 2))[:2] == (2_000_000, 5_000_000)
    assert Recorded(max_up=2_000_000).window(100_000, 100_000, 0, busy=(0, 1)).up == 1_000_000


def test_the_kernel_counts_what_a_connection_carried() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as near,
    ):
        far, _ = server.accept()
        with far:
            near.sendall(bytes(50_000))
            left = 50_000
            while left:
                left -= len(far.recv(left))
            far.sendall(b"x")
            near.recv(1)
            sent, got = read_socket(near), read_socket(far)
    if sent is None or got is None:  # not Linux: counted by the lane instead
        return
    assert sent.received == 1
    assert 50_000 <= sent.acked <= 50_001
    assert got.received == 50_000
    assert 0 <= sent.held_up_s <= sent.busy_s < 5
    assert 0 < sent.rtt_s < 1


def test_what_is_no_tcp_connection_has_no_counters() -> None:
    near, far = socket.socketpair()
    with near, far:
        assert read_socket(near) is None
