"""A committed round is computed again from what members have signed and kept, bit for bit, by every
rule; what does not fit names whose fault it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from session_table import LAYOUT, Peer, Table

from atoll.collectives import messages as m
from atoll.collectives.errors import ConfigError, SecurityError
from atoll.collectives.exchange import header as record_header
from atoll.collectives.group import Certified
from atoll.collectives.identifiers import PeerId
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.node.records import recompute as r
from atoll.node.records.audit import AuditSource
from atoll.node.session import events as ev
from atoll.node.session.record import statement_payload
from atoll.node.session.session import ROUND
from atoll.node.simulation.process import sign_as
from atoll.node.storage.contributions import DATA, SIGNED, ContributionFiles

KEPT = 2


def verify(peer: PeerId, domain: str, payload: bytes, signature: bytes) -> bool:
    """A simulation's signatures."""
    return signature == sign_as(peer, payload)


def played(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    codec: str,
    reducer: str,
    members: int = 3,
    rounds: int = 3,
) -> tuple[Table, AuditSource]:
    """Rounds of a run whose members keep their contributions, each in a folder of its own; and the
    log as the first has it.
    """
    monkeypatch.setattr(r, "verify", verify)
    settings = RunSettings(
        sync_every=1,
        codec=codec,
        reducer=reducer,
        outer=OuterSettings(kind="sgd", lr=1.0, momentum=0.0),
    )
    table = Table(members, settings)
    entries = contributed(folder, table, rounds)
    return table, AuditSource(
        folder, SimpleNamespace(run_id="run"), {"main": lambda: iter(entries)}
    )  # type: ignore[arg-type]


def contributed(
    folder: Path, table: Table, rounds: int, before_last: Callable[[], object] = lambda: None
) -> list[Certified]:
    """Rounds of all peers of a table, who keep their contributions; the log as the first has it."""
    for peer in table.peers:
        peer.storage.contributions = ContributionFiles(
            folder / peer.name, KEPT, lambda error: pytest.fail(str(error))
        )
    table.all_in()
    for number in range(1, rounds + 1):
        if number == rounds:
            before_last()
        for index, peer in enumerate(table.peers):
            vector = torch.randn(
                LAYOUT.numel, generator=torch.Generator().manual_seed(100 * number + index)
            )
            give(peer, f"{number}/{index}", vector)
        table.until(
            lambda number=number: all(
                len([e for e in peer.rounds() if e.contributors]) >= number for peer in table.peers
            )
        )
    table.world.run(until=table.world.now + 1)
    return list(table.peers[0].machine.journal.entries[:])


def give(peer: Peer, name: str, vector: torch.Tensor) -> None:
    peer.do(
        lambda session, now: session.contribute(
            now, name.encode().ljust(16, b"."), 3 + len(name), vector
        )
    )


@pytest.mark.parametrize(
    ("codec", "reducer", "members"),
    [
        ("fp32", "mean", 3),
        ("int8", "mean", 3),
        ("int8", "median:1", 3),
        ("fp32", "trimmed_mean:1", 3),
        ("int8", "geometric_median:1", 3),
        ("int8", "krum:1", 5),
        ("fp32", "nnm+trimmed_mean:1", 4),
        ("int8", "sum", 3),
    ],
)
def test_a_round_comes_out_the_same_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, reducer: str, members: int
) -> None:
    table, source = played(tmp_path, monkeypatch, codec, reducer, members)
    folders = [tmp_path / peer.name for peer in table.peers]
    found = r.recompute(source, "main", 3, folders)
    assert found.wrong == []
    assert (found.round, found.reducer, len(found.contributors)) == (3, reducer, members)
    assert {part.owner for part in found.parts} <= set(found.contributors)
    with pytest.raises(ConfigError, match="are not here"):
        r.recompute(source, "main", 1, folders)  # only the newest are kept
    with pytest.raises(ConfigError, match="no round 4"):
        r.recompute(source, "main", 4, folders)


def test_what_stands_after_an_entry_without_contributors_is_signed_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the three that a median needs have offered theirs when somebody asks for any entry,
    which ends the round and counts nobody.
    """
    monkeypatch.setattr(r, "verify", verify)
    outer = OuterSettings(kind="sgd", lr=1.0, momentum=0.0)
    table = Table(3, RunSettings(sync_every=1, codec="fp32", reducer="median:1", outer=outer))
    for peer in table.peers:
        peer.storage.contributions = ContributionFiles(
            tmp_path / peer.name, KEPT, lambda error: pytest.fail(str(error))
        )
    table.all_in()
    first, second, third = table.peers
    vectors = torch.randn(3, LAYOUT.numel, generator=torch.Generator().manual_seed(3))
    give(first, "1/0", vectors[0])
    give(second, "1/1", vectors[1])
    table.world.run(until=table.world.now + 1)
    before = first.machine.round
    third.do(lambda session, now: session.machine.set_unsettled(now, True))
    table.until(lambda: all(peer.machine.round == before + 1 for peer in table.peers))
    give(third, "1/2", vectors[2])
    table.until(
        lambda: all(len([e for e in peer.rounds() if e.contributors]) == 1 for peer in table.peers)
    )
    table.world.run(until=table.world.now + 1)
    entries = list(first.machine.journal.entries[:])
    assert [len(each.entry.contributors) for each in entries[-2:]] == [0, 3]
    source = AuditSource(tmp_path, SimpleNamespace(run_id="run"), {"main": lambda: iter(entries)})  # type: ignore[arg-type]
    found = r.recompute(source, "main", 1, [tmp_path / peer.name for peer in table.peers])
    assert (found.wrong, len(found.contributors)) == ([], 3)


def test_whose_contribution_is_missing_or_changed_is_told_and_whose_part_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, source = played(tmp_path, monkeypatch, "fp32", "mean")
    folders = [tmp_path / peer.name for peer in table.peers]
    with pytest.raises(ConfigError, match=r"2 are not here: p1, p2|2 are not here: p2, p1"):
        r.recompute(source, "main", 3, folders[:1])
    signed = sorted(path.name for path in (tmp_path / "p0").rglob(f"*{SIGNED}"))
    assert signed == sorted(
        [f"p{index}{SIGNED}" for index in range(3)] * KEPT
    )  # all have said what theirs are
    assert len(list((tmp_path / "p0").rglob(f"*{DATA}"))) == KEPT  # its own only

    entries = list(source.logs["main"]())
    last = entries[-1].entry
    other = msgspec.structs.replace(last, part_digests=(b"x" * 32, *last.part_digests[1:]))
    lied = AuditSource(
        tmp_path,
        source.signed,
        {"main": lambda: iter([*entries[:-1], Certified(other, entries[-1].votes)])},
    )
    assert r.recompute(lied, "main", 3, folders).wrong == [last.parts[0].owner]

    (file,) = (tmp_path / "p1").rglob(f"{last.round:08}/*{DATA}")
    file.write_bytes(bytes([1]) + file.read_bytes()[1:])
    with pytest.raises(SecurityError, match="is not what p1 has signed"):
        r.recompute(source, "main", 3, folders)


def test_a_member_that_signs_two_contributions_under_one_id_is_proven_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, _ = played(tmp_path, monkeypatch, "fp32", "mean", rounds=1)
    first, session = table.peers[0], table.peers[0].session
    log, round_ = session.log, first.machine.round
    for root in (b"a" * 32, b"a" * 32, b"b" * 32):
        signature = sign_as(PeerId("p1"), statement_payload("run", log, round_, b"c" * 16, root))
        body = m.encode(m.Envelope(log, round_, 0, m.Retained(b"c" * 16, root, signature)))
        assert not [event for event in first.heard if isinstance(event, ev.Equivocated)]
        first.do(
            lambda session, now, body=body: session.on_message(now, PeerId("p1"), ROUND + body)
        )
    (proof,) = [event for event in first.heard if isinstance(event, ev.Equivocated)]
    kind, who, one, _, other, _ = msgspec.msgpack.decode(proof.evidence)
    assert (kind, who, {one, other}) == (
        "twice",
        "p1",
        {statement_payload("run", log, round_, b"c" * 16, root) for root in (b"a" * 32, b"b" * 32)},
    )


def on_two_levels(
    folder: Path, monkeypatch: pytest.MonkeyPatch, plan: str, liar: bool
) -> tuple[Table, AuditSource, list[PeerId]]:
    """Four members at two sites; with ``liar`` the first partial sum of the last round is not what
    its sender should have made of it: whose it was.
    """
    heads: list[PeerId] = []

    def tap(sender: PeerId, receiver: PeerId, channel: str, payload: Any) -> bool:
        if (
            channel != "record"
            or record_header.parse(payload[0], sender).kind != record_header.PARTIAL
        ):
            return False
        if heads and heads[0] != sender:
            return False
        heads.append(sender)
        table.network.tap = None
        table.network.send(
            sender, receiver, channel, (payload[0], bytes([payload[1][0] ^ 1]) + payload[1][1:])
        )
        table.network.tap = tap
        return True

    monkeypatch.setattr(r, "verify", verify)
    settings = RunSettings(
        sync_every=1, codec="fp32", plan=plan, outer=OuterSettings(kind="sgd", lr=1.0, momentum=0.0)
    )  # type: ignore[arg-type]
    table = Table(4, settings)
    labels = ("a/0", "b/0", "b/1", "b/1"), ("lab-0", "lab-0", "lab-1", "lab-1")
    table.place = replace(
        table.place,
        sites={peer.name: labels[plan != "three-level"][n] for n, peer in enumerate(table.peers)},
    )
    entries = contributed(
        folder, table, 3, lambda: setattr(table.network, "tap", tap if liar else None)
    )
    return (
        table,
        AuditSource(folder, SimpleNamespace(run_id="run"), {"main": lambda: iter(entries)}),
        heads,
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("plan", ["two-level", "checked", "three-level", "ring"])
def test_a_round_of_partial_sums_is_recomputed_sum_by_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    table, source, _ = on_two_levels(tmp_path, monkeypatch, plan, liar=False)
    found = r.recompute(source, "main", 3, [tmp_path / peer.name for peer in table.peers])
    assert found.wrong == []
    assert [*source.logs["main"]()][-1].entry.topology.kind == plan
    given = [
        torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(100 * number + index))
        for number in (1, 2, 3)
        for index in range(4)
    ]
    flat = -torch.stack(given).sum(0) / 4  # of three rounds, all of the same weight
    for peer in table.peers:
        assert torch.allclose(peer.session.replica.anchor[: LAYOUT.numel], flat, rtol=0, atol=1e-6)  # type: ignore[union-attr]
    for part in found.parts:
        assert part.owner not in part.heads
    heads = [len(part.heads) for part in found.parts]
    # of a chain of four all but its first and its owner; on three levels one of b and one of b/1,
    # but for owners there
    counts = {"ring": [2, 2], "three-level": [2, 1]}
    assert heads == counts.get(plan, [1, 1])


def test_a_head_that_states_another_sum_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All agree on the result, which is wrong. From what the members of the site have signed it is
    shown which part, and who added that up.
    """
    table, source, heads = on_two_levels(tmp_path, monkeypatch, "two-level", liar=True)
    assert heads
    found = r.recompute(source, "main", 3, [tmp_path / peer.name for peer in table.peers])
    wrong = [part for part in found.parts if not part.same]
    assert wrong
    assert all(part.heads == (heads[0],) for part in wrong)
    assert found.wrong == sorted({heads[0], *(part.owner for part in wrong)})
    assert len({peer.session.replica.anchor.numpy().tobytes() for peer in table.peers}) == 1  # type: ignore[union-attr]
