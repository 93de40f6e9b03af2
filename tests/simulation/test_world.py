"""Virtual time and the in-memory network: order, determinism, and every way a message can fare."""

from __future__ import annotations

import pytest
from kits.rounds.injection import (
    FaultInjector,
    FaultPlan,
    InjectedFault,
    Trap,
    quiet_plan,
    random_plan,
)

from atoll.collectives.identifiers import PeerId
from atoll.collectives.simulation import Network, ProcessDied, Weather, World

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def wired(world: World, network: Network) -> list[tuple[float, str, str, object]]:
    """Attach A, B and C; returns the log of deliveries (time, receiver, sender, payload)."""
    log: list[tuple[float, str, str, object]] = []
    for peer in (A, B, C):
        network.attach(
            peer,
            lambda sender, _channel, payload, p=peer: log.append((world.now, p, sender, payload)),
        )
    return log


def test_events_run_in_order_of_time_then_of_making() -> None:
    world, seen = World(1), list[str]()
    world.at(2.0, lambda: seen.append("late"))
    world.at(1.0, lambda: seen.append("first"))
    world.at(1.0, lambda: seen.append("second"))
    world.at(1.5, lambda: seen.append("never")).cancel()
    assert world.run(until=1.9) is False
    assert world.now == 1.9
    world.run()
    assert seen == ["first", "second", "late"]
    assert world.now == 2.0


def test_an_event_in_the_past_runs_now_and_stop_is_asked_after_each() -> None:
    world, seen = World(1), list[float]()
    for when in (1.0, 2.0, 3.0):
        world.at(when, lambda: seen.append(world.now))
    assert world.run(stop=lambda: world.now >= 2.0) is True
    world.at(0.5, lambda: seen.append(world.now))
    world.run()
    assert seen == [1.0, 2.0, 2.0, 3.0]


def test_streams_do_not_disturb_each_other() -> None:
    one, two = World(7), World(7)
    one.stream("x").random()
    assert one.stream("y").random() == two.stream("y").random() != World(8).stream("y").random()


def test_latency_and_bandwidth_are_exact() -> None:
    world = World(1)
    network = Network(world, latency_s=0.5, bandwidth_bytes_per_s=100.0)
    log = wired(world, network)
    assert network.send(A, B, "m", b"x" * 50) == 0.5
    assert network.send(A, B, "m", b"y" * 100) == 1.5
    assert network.send(B, A, "m", (b"h" * 10, b"z" * 90)) == 1.0
    world.run()
    assert [(t, to) for t, to, _, _ in log] == [(1.0, B), (1.5, A), (2.0, B)]
    assert network.bytes_sent == {A: 150, B: 100}


def test_cut_is_one_way_and_partition_is_not() -> None:
    world = World(1)
    network = Network(world)
    log = wired(world, network)
    network.cut(A, B)
    network.send(A, B, "m", b"lost")
    network.send(B, A, "m", b"heard")
    world.run()
    network.mend()
    network.partition({A: 0, B: 1, C: 1})
    for sender, receiver in ((A, B), (B, A), (B, C)):
        network.send(sender, receiver, "m", b"split")
    world.run()
    assert [(to, sender, payload) for _, to, sender, payload in log] == [
        (A, B, b"heard"),
        (C, B, b"split"),
    ]


def test_a_partition_loses_what_is_under_way() -> None:
    world = World(1)
    network = Network(world, latency_s=1.0)
    log = wired(world, network)
    network.send(A, B, "m", b"x")
    world.at(0.5, lambda: network.partition({A: 0, B: 1}))
    world.run()
    assert log == []


def test_frozen_gets_its_backlog_and_the_dead_gets_nothing() -> None:
    world = World(1)
    network = Network(world, latency_s=0.1)
    log = wired(world, network)
    network.freeze(A)
    network.detach(B)
    for n in range(3):
        network.send(C, A, "m", bytes([n]))
        network.send(C, B, "m", bytes([n]))
    world.run()
    assert log == []
    world.at(5.0, lambda: network.thaw(A))
    world.run()
    assert log == [(5.0, A, C, bytes([n])) for n in range(3)]


@pytest.mark.parametrize(
    ("weather", "low", "high"),
    [
        (Weather(loss=0.25), 700, 800),
        (Weather(duplicate=0.2), 1150, 1250),
        (Weather(storm=0.85), 120, 180),
    ],
)
def test_weather_does_what_it_says(weather: Weather, low: int, high: int) -> None:
    world = World(3)
    network = Network(world)
    log = wired(world, network)
    network.weather = weather
    for _ in range(1000):
        network.send(A, B, "m", b"x")
    world.run()
    assert low < len(log) < high


def test_jitter_reorders() -> None:
    world = World(3)
    network = Network(world, latency_s=0.001, jitter_s=0.01)
    log = wired(world, network)
    for n in range(50):
        network.send(A, B, "m", bytes([n]))
    world.run()
    order = [payload for _, _, _, payload in log]
    assert sorted(order, key=str) == sorted([bytes([n]) for n in range(50)], key=str)
    assert order != [bytes([n]) for n in range(50)]


class Recorder:
    """A Subject that writes down what is done to it."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []

    def peers(self) -> list[PeerId]:
        return [A, B, C]

    def crash(self, peer: PeerId, *, amnesia: bool = False) -> bool:
        self.done.append(("amnesia" if amnesia else "crash", peer))
        return not amnesia

    def restart(self, peer: PeerId) -> None:
        self.done.append(("restart", peer))

    def freeze(self, peer: PeerId) -> bool:
        self.done.append(("freeze", peer))
        return True

    def thaw(self, peer: PeerId) -> None:
        self.done.append(("thaw", peer))

    def leave(self, peer: PeerId) -> bool:
        self.done.append(("leave", peer))
        return True


def test_faults_strike_and_heal() -> None:
    world, subject = World(1), Recorder()
    network = Network(world)
    plan = FaultPlan(
        Weather(loss=0.1),
        [
            InjectedFault(1.0, "crash", A, 0.5),
            InjectedFault(2.0, "freeze", B, 9.0),
            InjectedFault(2.5, "isolate", C, 9.0),
            InjectedFault(2.6, "amnesia", C, 0.1),
            InjectedFault(6.0, "crash", A, 1),
        ],
        [],
        5.0,
    )
    faults = FaultInjector(world, network, subject, plan, world.stream("faults"))
    faults.start()
    world.run(until=3.0)
    assert network.severed(C, A)
    assert network.severed(A, C)
    assert not network.severed(A, B)
    assert network.weather.loss == 0.1
    world.run()
    healing = [(what, peer) for peer in (A, B, C) for what in ("thaw", "restart")]
    assert subject.done == [
        ("crash", A),
        ("restart", A),
        ("freeze", B),
        ("amnesia", C),
        *healing,
        ("thaw", B),
    ]
    assert faults.struck == {"crash": 1, "freeze": 1, "isolate": 1}
    assert not network.severed(C, A)
    assert network.weather.loss == 0.0


def test_a_trap_strikes_at_the_nth_message_between_two_sends_of_one_broadcast() -> None:
    world, subject = World(1), Recorder()
    network = Network(world)
    log = wired(world, network)
    faults = FaultInjector(
        world,
        network,
        subject,
        FaultPlan(Weather(), [], [Trap("accept", 2, "mid", True, 0.0, 0.1)], 5.0),
        world.stream("faults"),
    )
    network.tap = lambda sender, receiver, _channel, payload: faults.event(
        bytes(payload).decode(), sender, receiver
    )  # type: ignore[arg-type]
    network.send(C, A, "m", b"other")
    network.send(A, B, "m", b"accept")
    with pytest.raises(ProcessDied) as died:
        network.send(A, C, "m", b"accept")
    world.run(until=1.0)
    assert died.value.peer == A
    assert [(to, payload) for _, to, _, payload in log] == [(A, b"other"), (B, b"accept")]


def test_a_whisper_lets_one_peer_alone_hear_the_votes_and_then_cuts_it_off() -> None:
    world = World(1)
    network = Network(world, latency_s=0.001)
    log = wired(world, network)
    faults = FaultInjector(
        world,
        network,
        Recorder(),
        FaultPlan(Weather(), [], [Trap("accept", 1, "whisper", True, 0.0, 0.1)], 5.0),
        world.stream("faults"),
    )
    network.tap = lambda sender, receiver, _channel, payload: faults.event(
        bytes(payload).decode(), sender, receiver
    )  # type: ignore[arg-type]
    network.send(A, B, "m", b"accept")
    network.send(C, A, "m", b"accepted")
    network.send(C, B, "m", b"accepted")
    world.run(until=0.03)
    assert [(to, payload) for _, to, _, payload in log] == [(B, b"accept"), (B, b"accepted")]
    assert network.severed(B, A)
    assert not network.severed(A, C)
    world.run(until=4.0)
    assert not network.severed(B, A)
    network.send(C, A, "m", b"accepted")
    world.run(until=4.1)
    assert log[-1][1:] == (A, C, b"accepted")


def test_plans_are_seeded() -> None:
    plans = [
        random_plan(World(seed).stream("plan"), [A, B, C], horizon_s=9.0) for seed in (5, 5, 6)
    ]
    assert plans[0] == plans[1] != plans[2]
    assert quiet_plan().faults == []
    assert all(0 <= fault.at_s < 9.0 for fault in plans[0].faults)
