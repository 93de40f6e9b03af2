"""Two members that read the same data in the same order: what is compared, who is told, and what is
never said.
"""

from __future__ import annotations

import logging
import math
import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from atoll.collectives.digest import BATCH_BYTES, batch_digest
from atoll.collectives.errors import RemoteProtocolError
from atoll.collectives.identifiers import PeerId, RunId
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import PrivacySettings, RunSettings, SecureSettings, SiteSettings
from atoll.node.local import LocalSwarm
from atoll.node.run import membership_records as wire
from atoll.node.run.events import read_event
from atoll.node.run.membership import Membership
from atoll.node.run.membership_records import Record, sign_record
from atoll.node.run.same_order import RUNNING, RUNNING_BEHIND, SameOrder, said_by, shows_order
from atoll.node.run.verdicts import Verdicts
from atoll.optim import SoloSwarm, attach
from atoll.optim.data.first_batch import FirstBatches, content_of, gradients_of

H, ROUNDS = 2, 8
ONE, OTHER, THIRD = PeerId("one"), PeerId("other"), PeerId("third")
SETTINGS = RunSettings(sync_every=H, rounds=ROUNDS, codec="fp32", outer=OuterSettings("sgd", 1.0))


class Told:
    """A swarm that keeps what it is told of first batches."""

    def __init__(self, run: str = "run", **more: Any) -> None:
        self.run_id, self.settings = RunId(run), msgspec.structs.replace(SETTINGS, **more)
        self.told = list[tuple[int, bytes]]()

    def first_batch(self, round_: int, digest: bytes) -> None:
        self.told.append((round_, digest))


def told(batches: list[Any], run: str = "run", **more: Any) -> list[tuple[int, bytes]]:
    """What is told when each of these is the first batch of a round, from round 0 on."""
    swarm = Told(run, **more)
    first: Any = FirstBatches(swarm)  # pyright: ignore[reportArgumentType]
    for round_, batch in enumerate(batches):
        first.saw(batch, round_)
        first.saw(torch.rand(3), round_)  # a later batch of the same round
    return swarm.told


# ---- the digest


def test_gradients_that_say_nothing_of_the_data_are_not_told() -> None:
    parameters = [nn.Parameter(torch.zeros(100)) for _ in range(40)]
    assert gradients_of(parameters) is None
    for value, says in ((0.0, False), (1.0, True), (math.nan, False), (math.inf, False)):
        for each in parameters:
            each.grad = torch.zeros(100)
        parameters[0].grad = torch.full((100,), value)
        assert (gradients_of(parameters) is not None) == says
    parameters[0].grad = torch.ones(100).to_sparse()
    assert gradients_of(parameters) is None
    swarm = Told()
    first: Any = FirstBatches(swarm)  # pyright: ignore[reportArgumentType]
    parameters[0].grad = torch.ones(100)
    first.saw(torch.ones(3), 0)
    first.trained(parameters, 0)  # a batch was seen, which is better
    first.trained(parameters, 1)
    parameters[0].grad = torch.full((100,), 2.0)
    first.trained(parameters, 1)
    assert [round_ for round_, _ in swarm.told] == [0, 1]


def test_a_rounds_first_batch_is_told_and_no_other() -> None:
    batches = [torch.full((2,), float(number)) for number in range(4)]
    found = told(batches)
    assert [round_ for round_, _ in found] == [0, 1, 2, 3]
    assert {len(digest) for _, digest in found} == {BATCH_BYTES}
    assert found == told([batch.clone() for batch in batches])
    assert len({digest for _, digest in found}) == 4


def test_the_digest_says_nothing_of_the_data_to_who_is_in_another_run_or_round() -> None:
    batch = torch.arange(6.0)
    ((_, here),) = told([batch])
    ((_, there),) = told([batch], run="another")
    assert here != there
    assert content_of(batch)[:BATCH_BYTES] != here  # pyright: ignore[reportOptionalSubscript]
    _, (_, later) = told([torch.zeros(1), batch])
    assert later != here


def test_gradients_that_repeat_are_not_told_again_and_batches_are() -> None:
    batches = [torch.tensor([0.0]), torch.tensor([1.0])] * 3
    assert [round_ for round_, _ in told(batches)] == [0, 1, 2, 3, 4, 5]
    parameter, swarm = torch.nn.Parameter(torch.ones(2)), Told()
    first: Any = FirstBatches(swarm)  # pyright: ignore[reportArgumentType]
    for round_, batch in enumerate(batches):
        parameter.grad = 1 + batch.expand(2)
        first.trained([parameter], round_)
    assert [round_ for round_, _ in swarm.told] == [0, 1]


def rounds_until_told(few: int, *, own: bool, read_first: bool) -> int | None:
    """Of a data set of so many batches that both read in one order, or each by lot. A node hears of
    what is read with a round's first batch, or after it.
    """
    run, draw = RunId("run"), random.Random(3)
    order = SameOrder(run)
    for round_ in range(400):
        mine = round_ % few
        theirs = draw.randrange(few) if own else mine
        contents = [b"%d" % (mine + at) for at in range(2)]
        if read_first:
            for content in contents[:1]:
                order.read(content)
        order.begun(round_, batch_digest(run, round_, contents[0]))
        order.look({ONE: (round_, batch_digest(run, round_, b"%d" % theirs))})
        if order.equal:
            return round_ + 1
        for content in contents[0 if not read_first else 1 :]:
            order.read(content)
    return None


@pytest.mark.parametrize("read_first", [False, True])
@pytest.mark.parametrize(
    ("few", "rounds"), [(1, 20), (2, 20), (3, RUNNING), (4, RUNNING), (100, RUNNING)]
)
def test_of_a_small_data_set_more_equal_rounds_are_asked_for(
    few: int, rounds: int, read_first: bool
) -> None:
    assert rounds_until_told(few, own=False, read_first=read_first) == rounds
    if few > 1:  # by chance at most before one repeats, where the data set may be a large one
        found = rounds_until_told(few, own=True, read_first=read_first)
        assert found is None or found <= few


@pytest.mark.parametrize(
    "more",
    [
        {"secure": SecureSettings()},
        {"secure": SecureSettings(), "privacy": PrivacySettings(4.0, 1.0, 1e-5, 9.0)},
        {"site": SiteSettings()},
    ],
)
def test_of_private_data_nothing_is_ever_made(more: dict[str, Any]) -> None:
    assert told([torch.arange(6.0)], **more) == []
    assert not shows_order(msgspec.structs.replace(SETTINGS, **more))
    assert shows_order(SETTINGS)


def test_a_digest_is_of_all_that_a_batch_holds() -> None:
    first = {"x": torch.arange(4), "names": ["a", "b"], "n": [1, 2.5], "raw": b"1"}
    alike = {"x": torch.arange(4), "names": ["a", "b"], "n": [1, 2.5], "raw": b"1"}
    assert content_of(first) == content_of(alike)
    others: list[Any] = [
        {**first, "x": torch.arange(4).float()},
        {**first, "x": torch.arange(4).reshape(2, 2)},
        {**first, "names": ["a", "c"]},
        {**first, "n": [1, 2.25]},
        {**first, "raw": b"2"},
        {**first, "x": np.arange(5)},
        (torch.arange(4, dtype=torch.bfloat16),),
        torch.tensor(True),
    ]
    assert len({content_of(each) for each in [first, *others]}) == 1 + len(others)
    assert content_of(object()) is None
    assert content_of([]) is None
    assert (
        content_of(
            torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (2,), check_invariants=True)
        )
        is None
    )


def test_of_a_large_tensor_a_sample_is_looked_at() -> None:
    large = torch.zeros(1 << 22)
    before = content_of(large)
    large[1::2] = 1.0
    assert content_of(large) == before
    large[4] = 1.0
    assert content_of(large) != before


# ---- the comparison


def compared(*rounds: tuple[bytes | None, dict[PeerId, bytes]]) -> list[dict[PeerId, int]]:
    """Who is equal after each round, of which this machine's digest and others' are given."""
    order, found = SameOrder(RunId("run")), list[dict[PeerId, int]]()
    for number, (own, others) in enumerate(rounds):
        if own is not None:
            order.begun(number, own)
        order.look({peer: (number, digest) for peer, digest in others.items()})
        found.append(dict(order.equal))
    return found


def test_three_rounds_running_are_equal_and_one_that_differs_ends_it() -> None:
    found = compared(
        (b"a", {ONE: b"a", OTHER: b"x"}),
        (b"b", {ONE: b"b", OTHER: b"b"}),
        (b"c", {ONE: b"c", OTHER: b"y"}),
        (b"d", {ONE: b"d", OTHER: b"d"}),
        (b"e", {ONE: b"z", OTHER: b"e"}),
        (b"f", {ONE: b"f", OTHER: b"f"}),
    )
    assert RUNNING == 3
    assert found == [{}, {}, {ONE: 3}, {ONE: 4}, {}, {OTHER: 3}]


def test_rounds_that_are_not_known_of_both_are_left_out() -> None:
    found = compared(
        (b"a", {ONE: b"a"}), (None, {ONE: b"q"}), (b"b", {ONE: b"b"}), (b"c", {ONE: b"c"})
    )
    assert found == [{}, {}, {}, {ONE: 3}]


def test_what_is_said_twice_counts_once_and_who_is_gone_is_forgotten() -> None:
    order = SameOrder(RunId("run"))
    order.begun(0, b"a")
    for _ in range(10):
        order.look({ONE: (0, b"a"), OTHER: (10**12, b"a")})
    assert order.equal == {}
    for number in (1, 2):
        order.begun(number, b"a")
        order.look({ONE: (number, b"a")})
    assert order.equal == {ONE: 3}
    order.look({})
    assert order.equal == {}


def behind(places: list[int]) -> list[dict[PeerId, int]]:
    """Who is equal after each round, where a member's first batch is the one that was read here as
    the one of this number, of ten a round.
    """
    run, found = RunId("run"), list[dict[PeerId, int]]()
    order = SameOrder(run)
    for round_, place in enumerate(places):
        for number in range(10 * round_, 10 * round_ + 10):
            order.read(b"%d" % number)
        order.begun(round_, b"own %d" % round_)
        order.look({ONE: (round_, batch_digest(run, round_, b"%d" % place))})
        found.append(dict(order.equal))
    return found


def test_who_reads_the_same_some_batches_later_is_found() -> None:
    *before, last = behind([7 * round_ for round_ in range(RUNNING_BEHIND)])
    assert (before, last) == ([{}] * (RUNNING_BEHIND - 1), {ONE: RUNNING_BEHIND})
    assert behind([0, 7, 14, 5, 21, 28, 35, 36, 37])[-1] == {}  # not in one order
    assert behind([0, 7, 14, 999, 21, 28, 35, 36, 37])[-1] == {}  # one was not read here
    assert behind([0] * 20)[-1] == {}


def test_nobody_can_say_it_of_others() -> None:
    """A record is signed by whom it is about; a member that lies copies what another said."""
    said = {ONE: b"1", OTHER: b"2"}
    at_one, at_other = SameOrder(RunId("run")), SameOrder(RunId("run"))
    for number in range(6):
        for order, own in ((at_one, said[ONE]), (at_other, said[OTHER])):
            order.begun(number, own)
            order.look(
                {
                    **{peer: (number, digest) for peer, digest in said.items() if digest != own},
                    THIRD: (number, said[ONE]),
                }
            )
    assert at_one.equal == {THIRD: 6}
    assert at_other.equal == {}


# ---- records


def test_a_record_without_a_digest_has_the_bytes_that_it_had() -> None:
    record = Record("run", ONE, 1, 2, ("/ip4/127.0.0.1/tcp/1",), 3, b"l", b"b", False, b"c")
    plain = sign_record(record, lambda data: b"s")
    assert len(msgspec.msgpack.decode(plain.record)) == 10
    assert wire.open_record(plain, OTHER) == record
    more = msgspec.structs.replace(record, first_batch=(7, b"d" * 16))
    assert wire.open_record(sign_record(more, lambda data: b"s"), OTHER) == more


@pytest.mark.parametrize("odd", [(-1, b""), (1, b"d" * 17), (1,), "x", (1 << 63, b"")])
def test_an_odd_digest_in_a_record_is_refused(odd: Any) -> None:
    fields = ("run", "one", 1, 2, (), 0, b"", b"", False, b"", odd)
    signed = wire.SignedRecord(msgspec.msgpack.encode(fields), b"s")
    with pytest.raises(RemoteProtocolError):
        wire.open_record(signed, OTHER)


def test_a_digest_goes_with_the_next_record_and_makes_none() -> None:
    def sign(data: bytes) -> bytes:
        return b"s"

    membership = Membership(
        ONE, RunId("run"), sign=sign, verify=lambda *of: True, rng=random.Random(0)
    )
    membership.announce(0.0, round=1)
    before = membership.record(ONE)
    membership.announce(0.5, first_batch=(1, b"d"))
    assert membership.record(ONE) == before
    membership.announce(1.0, round=2)
    now = membership.record(ONE)
    assert now is not None
    assert (now.round, now.first_batch) == (2, (1, b"d"))
    assert said_by(membership, [ONE]) == {}


# ---- the verdict


def test_the_verdict_names_who_it_is_and_is_withdrawn() -> None:
    verdicts = Verdicts()

    def take(at: float, **event: Any) -> list[tuple[bool, str, str]]:
        changes = verdicts.take(read_event({"at": at, **event}))
        return [(raised, verdict.code, verdict.subject) for raised, verdict, _ in changes]

    assert take(1.0, event="data.order", equal={"p1": 3}) == [(True, "V17", "p1")]
    assert "same data in the same order" in verdicts.standing["V17", "p1"].said
    assert "3 rounds running" in verdicts.standing["V17", "p1"].said
    assert take(2.0, event="data.order", equal={"p1": 4, "p2": 3}) == [(True, "V17", "p2")]
    assert take(3.0, event="data.order", equal={"p2": 4}) == [(False, "V17", "p1")]
    assert take(4.0, event="script.ended", pid=1) == [(False, "V17", "p2")]
    assert take(5.0, event="data.order", equal="p1") == []


# ---- in a run


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "same data" in record.getMessage()]


def play(
    caplog: pytest.LogCaptureFixture, *, seeds: list[int], shard: bool = False, plain: bool = False
) -> list[Any]:
    """Members of a run that read by a shard, or all of the data in an order by their seed;
    ``plain``: in loops of their own. Returns of each whom it found to read the same.
    """
    data = TensorDataset(torch.arange(512.0).unsqueeze(1))

    def script(swarm: Any) -> dict[int, int]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        sync = attach(model, optimizer, swarm, batch_size=4, clock=swarm.clock)
        generator = torch.Generator().manual_seed(seeds[swarm.index])
        loader = DataLoader(data, batch_size=4, shuffle=True, generator=generator)
        most = dict[int, int]()
        for (batch,) in swarm.shard(loader) if shard else loader:
            if not shard and not plain:  # as the integrations do
                sync.first_batches.saw(batch, sync.round)
            model(batch / 512).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            swarm.sleep(1.0)
            for view in swarm.members():
                if view.same_order:
                    number = int(view.peer[-1])
                    most[number] = max(most.get(number, 0), view.same_order)
            if sync.done:
                break
        return most

    with caplog.at_level(logging.WARNING, logger="atoll"):
        swarm = LocalSwarm(len(seeds), settings=SETTINGS, latency_s=0.01)
        return swarm.run(script)


@pytest.mark.parametrize("plain", [False, True])
def test_members_with_one_seed_are_named_to_one_another(
    plain: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = play(caplog, seeds=[5, 5, 6], plain=plain)
    assert first.keys() == {1}
    assert second.keys() == {0}
    assert third == {}
    assert min(first[1], second[0]) >= RUNNING
    words = warned(caplog)
    assert len(words) == 2
    assert all("swarm.shard(loader)" in each and "shard=True" in each for each in words)


@pytest.mark.parametrize(
    ("seeds", "shard", "plain"),
    [([5, 6, 7], False, False), ([5, 5, 5], True, False), ([5, 6, 7], False, True)],
)
def test_members_that_read_apart_are_told_nothing(
    seeds: list[int], shard: bool, plain: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert play(caplog, seeds=seeds, shard=shard, plain=plain) == [{}, {}, {}]
    assert warned(caplog) == []


def test_a_script_of_one_has_nobody_to_be_compared_with() -> None:
    swarm = SoloSwarm(SETTINGS)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sync = attach(model, optimizer, swarm)
    sync.first_batches.saw(torch.ones(3), 0)
    assert [view.same_order for view in swarm.members()] == [0]
