"""What a site measures stays there: every byte that it sends is searched for its loss, its accuracy
and its number of samples.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec import structs
from secure_kit import SECURE, TERMS
from session_table import LAYOUT, SETTINGS, Peer, Table

from atoll.collectives.identifiers import PeerId
from atoll.collectives.swarm import RunSettings
from atoll.node.modes.secure.rounds import SecureRounds
from atoll.node.modes.secure.vectors import RingLayout, Summed
from atoll.node.session.mode_events import Unmasked
from atoll.optim import SoloSwarm, attach

MEASURED = structs.replace(
    SECURE, secure=structs.replace(TERMS, max_weight=1_000_000, metrics=("loss", "accuracy"))
)


def metrics_of(number: int) -> dict[str, float]:
    """Of a site; numbers that are nowhere else."""
    return {
        "loss": 1.73205081 + number / 7,
        "accuracy": 0.141592653 + number / 11,
        "f1": 0.577215664 + number / 13,
    }


def samples_of(number: int) -> int:
    """Of a site."""
    return 700_123 + 1009 * number


def traces(number: int) -> set[bytes]:
    """The ways in which a site's numbers could stand in a message: msgpack, binary, text, and as
    they are before they are masked.
    """
    found = set[bytes]()
    for value in metrics_of(number).values():
        found |= {
            msgspec.msgpack.encode(value),
            *(struct.pack(f"{order}{kind}", value) for order in "<>" for kind in "fd"),
        }
        found |= {f"{value:.{digits}g}".encode() for digits in (6, 8, 17)}
    samples = samples_of(number)
    found |= {
        msgspec.msgpack.encode(samples),
        *(struct.pack(f"{order}{kind}", samples) for order in "<>" for kind in "IQ"),
        b"%d" % samples,
    }
    return found


class Listener:
    """Everything that goes out of each site."""

    def __init__(self, table: Table) -> None:
        self.sent: dict[PeerId, bytearray] = {peer.name: bytearray() for peer in table.peers}
        table.network.tap = self._tap

    def _tap(self, sender: PeerId, receiver: PeerId, channel: str, payload: Any) -> bool:
        self.sent[sender] += payload if isinstance(payload, bytes) else b"".join(payload)
        return False

    def told(self, peers: list[Peer]) -> list[tuple[int, bytes]]:
        """What of whom was found in what it, or another one, sent."""
        return [
            (number, trace)
            for number, _ in enumerate(peers)
            for trace in traces(number)
            if any(trace in data for data in self.sent.values())
        ]


def contribute(peer: Peer, number: int, name: str) -> bytes:
    """A vector of so many samples, after what was measured was told to its own node."""
    cid = name.encode().ljust(16, b".")
    vector = torch.full((LAYOUT.numel,), (number + 1) / 8)
    if isinstance(rounds := peer.session.pre_round, SecureRounds):
        rounds.work.metrics.update(metrics_of(number))
    peer.do(lambda session, now: session.contribute(now, cid, samples_of(number), vector))
    return cid


def test_only_means_over_a_sum_are_told() -> None:
    table = Table(4, MEASURED)
    listener, peers = Listener(table), table.all_in()
    for number, peer in enumerate(peers):
        contribute(peer, number, f"{number}")
    table.until(lambda: all(peer.session.completed == 1 for peer in peers))
    sums = [event for peer in peers for event in peer.heard if isinstance(event, Unmasked)]
    assert len(sums) == 4
    weights = [samples_of(number) for number in range(4)]
    for event in sums:
        assert len(event.members) == 4
        assert event.weight == sum(weights)
        for name in ("loss", "accuracy"):
            mean = np.average([metrics_of(number)[name] for number in range(4)], weights=weights)
            assert event.metrics[name] == pytest.approx(mean, abs=0.05)
    assert {name for event in sums for name in event.metrics} == {
        "loss",
        "accuracy",
    }  # what was not asked for is not in the sum
    assert all(len(data) > 2_000 for data in listener.sent.values())
    assert listener.told(peers) == []
    for number, peer in enumerate(peers):
        others = repr([other.heard for other in peers if other is not peer]).encode()
        assert not any(trace in others for trace in traces(number))
        assert all(share.samples == 1 for event in peer.rounds() for share in event.contributors)
    table.end()


def test_below_the_threshold_nothing_is_told() -> None:
    """Three are needed, one is gone before the sum: the two that are left have begun, and nothing
    of theirs is known.
    """
    table = Table(3, MEASURED)
    listener, peers = Listener(table), table.all_in()
    peers[2].kill()
    for number, peer in enumerate(peers[:2]):
        contribute(peer, number, f"{number}")
    table.wait(30.0)
    assert not any(isinstance(event, Unmasked) for peer in peers for event in peer.heard)
    assert listener.told(peers) == []
    table.end()


def test_the_search_finds_what_is_told_in_other_runs() -> None:
    """Without secure aggregation the number of samples is a weight in the plan: the search is no
    blind one.
    """
    table = Table(3, SETTINGS)
    listener, peers = Listener(table), table.all_in()
    for number, peer in enumerate(peers):
        contribute(peer, number, f"{number}")
    table.until(lambda: all(peer.session.completed == 1 for peer in peers))
    assert {number for number, _ in listener.told(peers)} == {0, 1, 2}
    table.end()


def summed(told: Sequence[Mapping[str, float]], seed: int = 0) -> tuple[Summed, np.ndarray]:
    """What is known of sites that report this, and the words of the sum."""
    vectors = RingLayout(structs.replace(TERMS, metrics=("loss", "auc")), None, 5, 4, 3)
    rows = [
        vectors.words(torch.full((5,), 0.25), 1, random.Random(seed + number), metrics)
        for number, metrics in enumerate(told)
    ]
    total = np.array([row for row in rows if not isinstance(row, str)], np.uint32).sum(
        axis=0, dtype=np.uint32
    )
    return vectors.summed(total), total


def test_a_metric_is_told_where_all_of_a_sum_have_it() -> None:
    found, _ = summed([{"loss": value, "auc": value / 8} for value in (2.0, -1.0, 16.0, 3.0)])
    assert found.weight == 4
    assert found.mean.tolist() == pytest.approx([0.25] * 5, abs=1e-4)
    assert found.metrics == pytest.approx({"loss": 5.0, "auc": 0.625}, abs=1e-4)
    assert (
        RingLayout(TERMS, None, 5, 4, 3).summed(np.array([1, 2, 3, 4, 5, 1], np.uint32)).metrics
        == {}
    )


@pytest.mark.parametrize(
    "silent", [{}, {"loss": float("nan")}, {"loss": float("inf")}, {"loss": 99.0}]
)
def test_of_a_metric_that_one_lacks_nothing_is_known_of_the_others(
    silent: dict[str, float],
) -> None:
    """Least of all that of a single one that has it: what stands in its place is as good as chance."""
    silent = {**silent, "auc": 0.5}
    for told in (
        [{"loss": 2.0, "auc": 0.5}, silent, silent, silent],
        [{"loss": 2.0, "auc": 0.5}] * 3 + [silent],
    ):
        found, total = summed(told)
        assert found.metrics == pytest.approx({"auc": 0.5}, abs=1e-4)
        apart = (total[5:7] - summed(told, seed=100)[1][5:7]).view(np.int32)
        assert (
            np.abs(apart.astype(float)).min() > 1e5
        )  # where it is told, sums of other chances are 4 apart at most


class Heard(SoloSwarm):
    """One member alone, and what its script tells its node, in order."""

    def __init__(self, settings: RunSettings) -> None:
        super().__init__(settings)
        self.order: list[dict[str, float] | str] = []

    def report(self, metrics: Mapping[str, float]) -> None:
        self.order.append(dict(metrics))

    def contribute(self, **given: Any) -> Any:
        self.order.append("contribution")
        return super().contribute(**given)


def test_an_attached_script_tells_its_node_what_is_added_up_before_it_contributes() -> None:
    swarm = Heard(
        RunSettings(
            sync_every=2, rounds=1, codec="fp32", secure=structs.replace(TERMS, metrics=("loss",))
        )
    )
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment = attach(model, optimizer, swarm)
    for loss in (1.0, 2.0):
        model(torch.ones(1, 2)).sum().backward()
        attachment.log(loss=loss, accuracy=0.5)
        optimizer.step()
    at = swarm.order.index("contribution")
    assert swarm.order[at - 1] == {"loss": 1.5}
