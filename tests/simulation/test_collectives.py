"""The collectives of scripts among several members in virtual time: exact results, the same bits
everywhere, named contributors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from atoll.collectives import api
from atoll.collectives import messages as m
from atoll.collectives.errors import ConfigError, LocalProtocolError
from atoll.collectives.identifiers import PeerId
from atoll.collectives.outcomes import Outcome, Share
from atoll.collectives.swarm import LimitSettings, RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.modes.operations.naming import config_key, operation_key
from atoll.node.simulation.local_member import LocalMember

MAX_OPERATIONS = LimitSettings().operations
SETTINGS = RunSettings(codec="fp32")
P = [PeerId(f"p{index}") for index in range(8)]


def play(
    count: int,
    body: Callable[[LocalMember], Any],
    arrange: Callable[[LocalSwarm], object] = lambda swarm: None,
) -> list[Any]:
    """``body`` at every member, from when all are members until all have returned."""
    ended = set[int]()
    swarm = LocalSwarm(count, settings=SETTINGS)
    arrange(swarm)

    def script(member: Any) -> Any:
        api.enter(member)
        while len(member.members()) < count:
            member.sleep(0.1)
        member.sleep(1.0)  # until everybody has seen it
        try:
            return body(member)
        finally:
            ended.add(member.index)
            alive = {peer.index for peer in swarm.peers if peer.process is not None}
            while not ended >= alive:
                member.sleep(0.5)
                alive = {peer.index for peer in swarm.peers if peer.process is not None}

    return swarm.run(script, limit_s=600.0)


def names(outcome: Outcome) -> list[str]:
    return [share.peer for share in outcome.contributors]


def words(flat: torch.Tensor) -> list[int]:
    return flat.view(torch.int32).tolist()


@pytest.mark.parametrize(
    ("op", "weights", "expected"),
    [
        ("mean", (1, 1, 1), (3.0, 1.0)),
        ("mean", (1, 2, 5), (41 / 8, -1 / 8)),
        ("sum", (1, 1, 1), (9.0, 3.0)),
        ("max", (1, 1, 1), (8.0, 4.0)),
    ],
)
def test_reductions_are_exact(
    op: Any, weights: tuple[int, ...], expected: tuple[float, float]
) -> None:
    values = [torch.tensor([1.0, 4.0]), torch.tensor([0.0, 0.0]), torch.tensor([8.0, -1.0])]

    def body(member: LocalMember) -> tuple[Outcome, torch.Tensor]:
        flat = values[member.index].clone()
        return member.all_reduce(flat, op_id="r", op=op, weight=weights[member.index]).wait(), flat

    for outcome, flat in play(3, body):
        assert outcome.contributors == tuple(Share(P[index], weights[index]) for index in range(3))
        assert outcome.counted
        assert flat.tolist() == list(expected)


@pytest.mark.parametrize("bits", [1, 8, 13, 32, 33, 64])
def test_modular_sums_are_exact_and_masks_cancel(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    masks = [
        torch.randint(-(1 << 63), (1 << 63) - 1, (70_003,), generator=generator) for _ in range(2)
    ]
    masks.append(-masks[0] - masks[1])
    secrets = [torch.arange(70_003) * (index + 1) for index in range(3)]

    def body(member: LocalMember) -> torch.Tensor:
        masked = secrets[member.index] + masks[member.index]
        assert api.modular_sum(member, masked, op_id="m", bits=bits).wait().counted
        return masked

    true = 6 * torch.arange(70_003)
    for summed in play(3, body):
        assert torch.equal(summed, true if bits == 64 else true % (1 << bits))


def test_a_gather_gives_every_tensor_bit_for_bit_and_names_who_is_missing() -> None:
    strange = [
        torch.tensor([[0x7F800001, index]], dtype=torch.int64).to(torch.int32) for index in range(4)
    ]  # a signalling NaN as a float
    large = [torch.full((3, 40_000), index, dtype=torch.bfloat16) for index in range(4)]

    def body(member: LocalMember) -> Any:
        all_of_it = api.all_gather(member, strange[member.index], op_id="all").wait()
        assert list(all_of_it.tensors) == P[:4]
        assert all(torch.equal(all_of_it.tensors[P[index]], strange[index]) for index in range(4))
        flag = api.all_gather(member, torch.tensor(member.index == 2), op_id="flag").wait()
        assert [found.item() for found in flag.tensors.values()] == [False, False, True, False]
        if member.index == 1:
            return None  # does not call
        return api.all_gather(member, large[member.index], op_id="some").wait()

    results = play(4, body)
    for index in (0, 2, 3):
        assert names(results[index].outcome) == [P[0], P[2], P[3]]
        assert all(
            torch.equal(results[index].tensors[P[other]], large[other]) for other in (0, 2, 3)
        )


def test_a_broadcast_reaches_all_and_counts_its_root_alone() -> None:
    def body(member: LocalMember) -> tuple[Outcome, torch.Tensor]:
        mine = torch.arange(200_001, dtype=torch.int16).mul_(member.index).view(3, 66_667)
        return api.broadcast(member, mine, root=P[2], op_id="b").wait(), mine

    for index, (outcome, mine) in enumerate(play(4, body)):
        assert (outcome.status, outcome.contributors, outcome.counted) == (
            "committed",
            (Share(P[2], 1),),
            index == 2,
        )
        assert torch.equal(mine.view(-1), torch.arange(200_001, dtype=torch.int16).mul_(2))


def test_a_broadcast_without_its_root_ends_open_and_writes_nothing() -> None:
    def body(member: LocalMember) -> tuple[str, str, list[int]]:
        mine = torch.full((5,), member.index)
        if member.index == 1:
            return "", "", []
        outcome = api.broadcast(member, mine, root=P[1], op_id="b", deadline_s=4.0).wait()
        return outcome.status, outcome.reason, mine.tolist()

    results = play(3, body)
    for index in (0, 2):
        assert results[index][0] == "open"
        assert "p1" in results[index][1]
        assert results[index][2] == [index] * 5


def test_a_broadcast_whose_root_is_no_member_says_so() -> None:
    def body(member: LocalMember) -> tuple[str, str]:
        outcome = api.broadcast(member, torch.zeros(5), root=P[7], op_id="b", deadline_s=4.0).wait()
        return outcome.status, outcome.reason

    for status, reason in play(2, body):
        assert status == "open"
        assert reason.startswith("p7 is no member of the run")


def test_a_reduce_scatter_gives_each_contributor_its_share() -> None:
    def body(member: LocalMember) -> api.Scattered:
        return api.reduce_scatter(member, torch.arange(11.0), op_id="rs", op="sum").wait()

    results = play(4, body)
    assert [(found.start, found.values.tolist()) for found in results] == [
        (0, [0.0, 4.0, 8.0]),
        (3, [12.0, 16.0, 20.0]),
        (6, [24.0, 28.0, 32.0]),
        (9, [36.0, 40.0]),
    ]
    assert all(names(found.outcome) == P[:4] for found in results)


def test_a_barrier_waits_for_everyone_longer_than_other_operations_do() -> None:
    def body(member: LocalMember) -> tuple[Outcome, float]:
        member.sleep(40.0 if member.index == 2 else 0.0)
        return api.barrier(member, op_id="bar", deadline_s=100.0).wait(), member.clock()

    results = play(3, body)
    assert all(names(outcome) == P[:3] for outcome, _ in results)
    assert max(at for _, at in results) - min(at for _, at in results) < 1.0


def test_a_barrier_whose_deadline_passes_is_open_and_says_who_is_missing() -> None:
    def body(member: LocalMember) -> Outcome | None:
        if member.index == 1:
            member.sleep(30.0)
            return None
        return api.barrier(member, op_id="bar", deadline_s=10.0).wait()

    results = play(3, body)
    for index in (0, 2):
        assert (results[index].status, results[index].reason) == (
            "open",
            "the deadline passed: p1 did not call",
        )


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_a_barrier_does_not_wait_for_the_dead_nor_for_scripts_that_ended(victim: int) -> None:
    """Whoever convenes it: one of the four dies while the others wait, another one's script ends."""

    def body(member: LocalMember) -> Outcome | None:
        if member.index == (victim + 1) % 4:
            member.sleep(20.0)
            member.close()
            return None
        if member.index == victim:
            member.sleep(1e6)
        return api.barrier(member, op_id="bar", deadline_s=100.0).wait()

    results = play(4, body, lambda swarm: swarm.crash_at(victim, 12.0))
    callers = [index for index in range(4) if index not in (victim, (victim + 1) % 4)]
    assert all(names(results[index]) == [P[index] for index in callers] for index in callers)


def test_states_are_compared_and_only_what_differs_is_repaired_from_all_holders() -> None:
    good = {
        "w": torch.arange(90_000.0).view(300, 300),
        "b": torch.tensor([1, 2, 3]),
        "h": torch.ones(5, dtype=torch.float16),
    }

    def body(member: LocalMember) -> tuple[Any, ...]:
        state = {name: tensor.clone() for name, tensor in good.items()}
        if member.index == 3:
            state["w"][7, 7] = -1.0
            state["h"][0] = float("nan")
        check = api.check_state(member, state, op_id="check").wait()
        repair = api.repair_state(member, state, check, op_id="repair").wait()
        again = api.check_state(member, state, op_id="again").wait()
        return check, repair, again, state

    for check, repair, again, state in play(4, body):
        assert (check.agreed, check.holders, check.differing) == (
            False,
            (P[0], P[1], P[2]),
            {P[3]: ("h", "w")},
        )
        assert names(repair) == [P[0], P[1], P[2]]
        assert (again.agreed, again.differing, set(again.roots.values())) == (
            True,
            {},
            {check.reference},
        )
        assert all(torch.equal(state[name], good[name]) for name in good)


def test_handles_may_be_waited_for_in_any_order_and_again() -> None:
    def body(member: LocalMember) -> list[float]:
        flats = [torch.full((4,), float(member.index + turn)) for turn in range(5)]
        handles = [
            member.all_reduce(flat, op_id=f"turn {turn}", op="sum")
            for turn, flat in enumerate(flats)
        ]
        assert not handles[0].done()
        assert handles[4].wait(0.0).status == "open"
        for handle in reversed(handles):
            outcome = handle.wait()
            assert (outcome.status, handle.done(), handle.wait(0.0)) == ("committed", True, outcome)
        return [flat[0].item() for flat in flats]

    assert play(3, body) == [[3.0, 6.0, 9.0, 12.0, 15.0]] * 3


def test_callers_under_different_configurations_come_together() -> None:
    """A third member joins; the organiser knows it first and calls, and so does the second member,
    which has not heard of it yet.
    """
    seen = dict[int, int]()

    def script(member: Any) -> Any:
        api.enter(member)
        if member.index == 2:
            return member.sleep(15.0)

        def config() -> int:
            return len(member._node().session.machine.config)

        while (config() < 3) if member.index == 0 else (0 not in seen):
            member.sleep(0.002)
        seen[member.index] = config()
        flat = torch.full((3,), 2.0**member.index)
        return member.all_reduce(flat, op_id="op", op="sum").wait(), flat.tolist()

    results = (
        LocalSwarm(3, settings=SETTINGS, latency_s=0.05).join_at(2, 5.0).run(script, limit_s=100.0)
    )
    assert seen == {0: 3, 1: 2}
    for outcome, flat in results[:2]:
        assert (names(outcome), flat) == (P[:2], [3.0] * 3)


# ── what goes wrong ──


def survivors(member: LocalMember, op_id: str) -> None:
    """The swarm works on: an operation of all three."""
    flat = torch.full((3,), float(member.index))
    outcome = member.all_reduce(flat, op_id=f"after {op_id}", op="sum").wait()
    assert (names(outcome), flat.tolist()) == (P[:3], [3.0] * 3)


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("first", [True, False])
def test_another_length_or_dtype_than_the_others_ends_it_at_all_and_leaves_their_values(
    odd: int, first: bool
) -> None:
    def body(member: LocalMember) -> list[float]:
        mine = member.index == odd
        member.sleep(0.0 if mine == first else 0.5)
        flat = torch.full((7 if mine else 5,), float(member.index))
        handle, since = member.all_reduce(flat, op_id="length", op="sum"), member.clock()
        for _ in range(2):  # the same, however often it is asked
            with pytest.raises(LocalProtocolError, match=r"[57] elements.*[57] elements"):
                handle.wait()
        assert member.clock() - since < 1.0
        words = torch.arange(4, dtype=torch.float32 if mine else torch.int32)
        with pytest.raises(LocalProtocolError, match=r"“(float|int)32\[4\]”.*“(float|int)32\[4\]”"):
            api.all_gather(member, words, op_id="dtype").wait()
        survivors(member, "length")
        return flat.tolist()

    for index, flat in enumerate(play(3, body)):
        assert flat == [float(index)] * (7 if index == odd else 5)


def test_two_that_want_different_reductions_do_not_wait_for_the_deadline() -> None:
    """Not even the organiser, with whom alone half of the members are a quorum."""

    def body(member: LocalMember) -> float:
        flat, since = torch.full((5,), float(member.index)), member.clock()
        with pytest.raises(LocalProtocolError, match="this peer with"):
            member.all_reduce(
                flat, op_id="op", op="sum" if member.index else "max", deadline_s=300.0
            ).wait()
        return member.clock() - since

    assert max(play(2, body)) < 1.0


def test_a_call_that_was_refused_may_be_made_again_once_who_was_wrong_has_called_anew() -> None:
    def body(member: LocalMember) -> tuple[Outcome, list[float]]:
        odd = member.index == 2
        with pytest.raises(LocalProtocolError, match="this peer with"):
            member.all_reduce(torch.ones(9 if odd else 4), op_id="op", op="sum").wait()
        member.sleep(1.0 if odd else 2.0)
        flat = torch.ones(4)
        return member.all_reduce(flat, op_id="op", op="sum").wait(), flat.tolist()

    for outcome, flat in play(3, body):
        assert (names(outcome), outcome.counted, flat) == (P[:3], True, [3.0] * 4)


def strange() -> list[Any]:
    """What is no non-empty tensor whose values lie in CPU memory as they are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes and the deprecated
        odd = [
            torch.ones(2).to_sparse(),
            torch.eye(2).to_sparse_csr(),
            torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]),
            torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
            torch.ones(2).to_mkldnn(),
        ]
    with FakeTensorMode():
        odd.append(torch.ones(3))
    views = [
        torch.ones(2, 3).t(),
        torch.ones(6)[::2],
        torch.ones(1).expand(6),
        torch.ones(2, dtype=torch.complex64).conj(),
    ]
    negated = torch.ones(2, dtype=torch.complex64).conj().imag
    return [
        *odd,
        *views,
        negated,
        torch.empty(0),
        torch.ones(2, device="meta"),
        [1.0],
        None,
        1.0,
        torch.ones(2).numpy(),
    ]


def test_tensors_with_a_history_or_no_dimension_and_of_inference_mode_are_fine() -> None:
    def body(member: LocalMember) -> None:
        learnt = torch.nn.Parameter(torch.full((3,), float(member.index)))
        with torch.inference_mode():
            inferred, scalar = (
                torch.full((3,), float(member.index)),
                torch.tensor(float(member.index)),
            )
            handle = member.all_reduce(inferred, op_id="in", op="sum", codec="int4")
            assert handle.wait().status == "committed"
        for op_id, tensor in (
            ("after", inferred),
            ("learnt", learnt),
            ("doubled", learnt * 1),
            ("scalar", scalar),
        ):
            before, shape = tensor.tolist(), tensor.shape
            assert (
                member.all_reduce(tensor, op_id=op_id, op="max", codec="fp32").wait().status
                == "committed"
            )
            assert (tensor.shape, tensor.tolist() == before) == (
                shape,
                op_id == "after" or member.index == 2,
            )
        assert learnt.requires_grad
        root = member.index == 1
        odd = (
            torch.arange(9, dtype=torch.uint8)[1:4]
            if root
            else torch.zeros(9, dtype=torch.uint8)[1:4]
        )  # begins at an odd address
        assert api.broadcast(member, odd, root=P[1], op_id="odd").wait().status == "committed"
        assert odd.tolist() == [1, 2, 3]

    play(3, body)


def any_dtype(member: LocalMember, value: Any) -> list[Callable[[], object]]:
    """Calls of every collective that takes any dtype."""
    return [
        lambda: api.all_gather(member, value, op_id="x"),
        lambda: api.broadcast(member, value, root=P[0], op_id="x"),
        lambda: api.check_state(member, {"fine": torch.ones(2), "x": value}, op_id="x"),
    ]


def test_arguments_that_cannot_be_are_typed_errors_and_nothing_happens() -> None:
    def body(member: LocalMember) -> None:
        fine = torch.ones(6)
        for wrong in (
            fine.to(torch.complex64),
            torch.ones(2, 3).t(),
            torch.empty(0),
            fine[::2],
            torch.ones(6, device="meta"),
        ):
            for collective in (
                member.all_reduce,
                lambda tensor, op_id: api.reduce_scatter(member, tensor, op_id=op_id),
            ):
                with pytest.raises(LocalProtocolError, match="float32"):
                    collective(wrong, op_id="x")
        for tag, options in (
            ("op", {"op": "gather"}),
            ("op", {"op": "wrap8"}),
            ("weight", {"weight": 0}),
            ("weight", {"op": "max", "weight": 2}),
        ):
            with pytest.raises(
                LocalProtocolError, match="mean, sum, max" if tag == "op" else "weight"
            ):
                api.reduce_scatter(member, fine, op_id="x", **options)  # type: ignore[arg-type]
        for wrong in strange():
            for call in any_dtype(member, wrong):
                with pytest.raises(LocalProtocolError, match="takes a non-empty"):
                    call()
        for options in (
            {"weight": 0},
            {"weight": -1},
            {"op": "sum", "weight": 2},
            {"op": "mode"},
            {"op_id": ""},
            {"op_id": "x" * 65},
            {"deadline_s": -1.0},
            {"deadline_s": float("nan")},
            {"deadline_s": "soon"},
            {"deadline_s": None},
            {"weight": 1 << 48},
            {"weight": 2.5},
            {"weight": None},
            {"op_id": 7},
            {"op_id": None},
            {"op": None},
            {"codec": 8},
        ):
            with pytest.raises(LocalProtocolError):
                member.all_reduce(fine, **{"op_id": "x", **options})  # type: ignore[arg-type]
        for codec in ("zfp", "bits"):
            with pytest.raises(ConfigError, match="codec"):
                member.all_reduce(fine, op_id="x", codec=codec)
        with pytest.raises(LocalProtocolError, match="int64"):
            api.modular_sum(member, fine, op_id="x")
        for bits in (0, 65, 8.5, None):
            with pytest.raises(LocalProtocolError, match="bits"):
                api.modular_sum(member, torch.ones(2, dtype=torch.int64), op_id="x", bits=bits)
        assert fine.tolist() == [1.0] * 6
        assert (
            member.all_reduce(fine, op_id="x", op="sum").wait().status == "committed"
        )  # the id was not used up

    play(2, body)


@pytest.mark.parametrize(
    "log",
    [
        "op/3/zfp/sum/any/{key}/{config}",
        "op/3/fp32/median/any/{key}/{config}",
        "op/3/fp32/sum/any/{key}/strange",
    ],
)
def test_what_only_a_newer_version_knows_is_not_answered_and_harms_nothing(log: str) -> None:
    """p0 hears p1 call the operation in words it does not know; later all call it in words it does."""

    def body(member: LocalMember) -> None:
        session = member._node().session
        if member.index == 0:
            assert session.machine is not None
            name = log.format(
                key=operation_key(session.run, "op"), config=config_key(session.machine.config)
            )
            sent = member._place.network.bytes_sent[P[0]]
            envelope = m.Envelope(name, 1, 0, m.Ready(bytes(32), bytes(16), 1, False))
            session.on_message(member.clock(), P[1], b"R" + m.encode(envelope))
            assert session.operations.by_key == {}
            assert member._place.network.bytes_sent[P[0]] == sent
        flat = torch.ones(3)
        assert names(member.all_reduce(flat, op_id="op", op="sum").wait()) == P[:3]
        assert flat.tolist() == [3.0] * 3

    play(3, body)


@pytest.mark.parametrize("op", ["mean", "sum", "max"])
def test_nan_is_refused_at_its_source_and_the_others_go_on(op: Any) -> None:
    def body(member: LocalMember) -> None:
        flat = torch.full((5,), float(member.index + 1))
        if member.index == 1:
            flat[3] = float("nan")
        before = words(flat)
        outcome = member.all_reduce(flat, op_id="nan", op=op).wait()
        if member.index == 1:
            assert (outcome.status, words(flat)) == ("open", before)
            assert "NaN" in outcome.reason
        else:
            assert names(outcome) == [P[0], P[2]]
            assert flat.tolist() == [{"mean": 2.0, "sum": 4.0, "max": 3.0}[op]] * 5
        survivors(member, "nan")

    play(3, body)


def test_an_operation_id_serves_once() -> None:
    def body(member: LocalMember) -> None:
        assert member.all_reduce(torch.ones(3), op_id="one").wait().status == "committed"
        for again in (
            lambda: member.all_reduce(torch.ones(3), op_id="one"),
            lambda: member.all_reduce(torch.ones(4), op_id="one", op="max"),
            lambda: api.barrier(member, op_id="one"),
        ):
            with pytest.raises(LocalProtocolError, match="was called already"):
                again()
        pending = member.all_reduce(torch.ones(3), op_id="two")
        with pytest.raises(LocalProtocolError, match="under way"):
            member.all_reduce(torch.ones(3), op_id="two")
        assert pending.wait().status == "committed"

    play(3, body)


def test_what_was_given_is_let_go_when_it_is_decided_or_withdrawn() -> None:
    def body(member: LocalMember) -> None:
        assert member.all_reduce(torch.ones(9), op_id="decided").wait().status == "committed"
        if member.index == 0:
            pending = member.all_reduce(torch.ones(9), op_id="withdrawn", everyone=True)
            pending.cancel()
            assert pending.wait().status == "open"
        operations = member._node().session.operations.by_key.values()
        assert len(operations) >= 1
        assert [operation.given for operation in operations] == [None] * len(operations)

    play(2, body)


@pytest.mark.parametrize(("late_s", "gone"), [(100.0, False), (130.0, True)])
def test_who_calls_late_gets_the_result_as_long_as_it_is_kept(late_s: float, gone: bool) -> None:
    def body(member: LocalMember) -> None:
        member.sleep(late_s if member.index == 2 else 0.0)
        flat = torch.full((3,), 2.0**member.index)
        if gone and member.index == 2:
            with pytest.raises(
                LocalProtocolError, match="was called already, or long ago without this peer"
            ):
                member.all_reduce(flat, op_id="late", op="sum")
            return
        outcome = member.all_reduce(flat, op_id="late", op="sum").wait()
        assert (names(outcome), outcome.counted, flat.tolist()) == (
            P[:2],
            member.index < 2,
            [3.0] * 3,
        )

    play(3, body)


def test_calls_that_ended_open_take_nobodys_place() -> None:
    """p1 asks again and again whether the others are there; more often than there is room for at
    once, here and at the others.
    """

    def body(member: LocalMember) -> None:
        if member.index == 1:
            for turn in range(MAX_OPERATIONS + 6):
                assert (
                    api.barrier(member, op_id=f"there? {turn}", deadline_s=0.1).wait().status
                    == "open"
                )
        member.sleep(20.0 - member.clock())
        assert len(member._node().session.operations.by_key) <= MAX_OPERATIONS
        survivors(member, "barriers")

    play(3, body)


def test_who_waits_for_too_many_at_once_is_told() -> None:
    def body(member: LocalMember) -> None:
        if member.index == 1:
            handles = [
                api.barrier(member, op_id=f"{turn}", deadline_s=5.0)
                for turn in range(MAX_OPERATIONS)
            ]
            with pytest.raises(
                LocalProtocolError, match=f"{MAX_OPERATIONS} operations are under way"
            ):
                member.all_reduce(torch.ones(3), op_id="after many", op="sum")
            handles[7].cancel()
        survivors(member, "many")
        if member.index == 1:
            assert {handle.wait().status for handle in handles} == {"open"}

    play(3, body)


def test_one_member_alone_gets_its_own_values() -> None:
    def body(member: LocalMember) -> None:
        flat = torch.tensor([1.0, -0.0])
        assert member.all_reduce(flat, op_id="m", weight=3).wait().contributors == (Share(P[0], 3),)
        assert words(flat) == words(torch.tensor([1.0, -0.0]))
        assert api.all_gather(member, flat, op_id="g").wait().tensors[P[0]].tolist() == [1.0, 0.0]
        assert api.reduce_scatter(member, flat, op_id="s").wait().values is not None
        assert api.barrier(member, op_id="b").wait().counted
        assert api.check_state(member, {"x": flat}, op_id="c").wait().agreed

    play(1, body)


@pytest.mark.parametrize("late", [0.0, 0.04, 0.3])
def test_a_caller_that_cancels_is_out_or_counted_never_half(late: float) -> None:
    """Early it is not counted; once a plan names it, the others' result holds all of its values."""

    def body(member: LocalMember) -> tuple[Outcome, list[float]]:
        flat = torch.full((4,), 2.0**member.index)
        pending = member.all_reduce(flat, op_id="op", op="sum")
        if member.index == 1:
            member.sleep(late)
            pending.cancel()
            pending.cancel()
        outcome = pending.wait()
        survivors(member, "cancel")
        return outcome, flat.tolist()

    results = play(3, body)
    counted = names(results[0][0])
    assert counted in ([P[0], P[2]], P[:3])
    total = sum(2.0 ** int(peer[1:]) for peer in counted)
    for outcome, flat in (results[0], results[2]):
        assert (names(outcome), flat) == (counted, [total] * 4)
    outcome, flat = results[1]
    if outcome.status == "open":
        assert (flat, outcome.reason.split(":")[0]) == ([2.0] * 4, "cancelled by its caller")
    else:
        assert (names(outcome), flat) == (P[:3], [7.0] * 4)


@pytest.mark.parametrize("after_s", [0.01, 0.02, 0.05, 0.2])
def test_a_caller_that_dies_is_named_or_left_out(after_s: float) -> None:
    def body(member: LocalMember) -> tuple[Outcome, list[float]]:
        member.sleep(10.0 - member.clock())
        flat = torch.full((300_000,), 2.0**member.index)
        outcome = member.all_reduce(flat, op_id="op", op="sum").wait()
        return outcome, [flat.min().item(), flat.max().item()]

    results = play(4, body, lambda swarm: swarm.crash_at(3, 10.0 + after_s))
    counted = names(results[0][0])
    assert counted in (P[:3], P[:4])
    total = sum(2.0 ** int(peer[1:]) for peer in counted)
    assert [(names(outcome), flat) for outcome, flat in results[:3]] == [(counted, [total] * 2)] * 3


# ── the same for every operation ──

INTS = torch.arange(300)
EVERY: dict[str, Callable[[LocalMember, str], Any]] = {
    "mean": lambda member, op_id: member.all_reduce(
        torch.full((300,), 2.0**member.index), op_id=op_id, deadline_s=20.0
    ),
    "sum": lambda member, op_id: member.all_reduce(
        torch.full((300,), 2.0**member.index), op_id=op_id, op="sum", deadline_s=20.0
    ),
    "max": lambda member, op_id: member.all_reduce(
        torch.full((300,), 2.0**member.index), op_id=op_id, op="max", deadline_s=20.0
    ),
    "modular_sum": lambda member, op_id: api.modular_sum(
        member, INTS + member.index, op_id=op_id, deadline_s=20.0
    ),
    "all_gather": lambda member, op_id: api.all_gather(
        member, INTS + member.index, op_id=op_id, deadline_s=20.0
    ),
    "reduce_scatter": lambda member, op_id: api.reduce_scatter(
        member, torch.full((300,), 2.0**member.index), op_id=op_id, deadline_s=20.0
    ),
    "broadcast": lambda member, op_id: api.broadcast(
        member, INTS + member.index, root=P[0], op_id=op_id, deadline_s=20.0
    ),
    "barrier": lambda member, op_id: api.barrier(member, op_id=op_id, deadline_s=20.0),
    "check_state": lambda member, op_id: api.check_state(
        member, {"x": INTS + member.index}, op_id=op_id, deadline_s=20.0
    ),
}


def outcome_of(result: Any) -> Outcome:
    return result if isinstance(result, Outcome) else result.outcome


@pytest.mark.parametrize("what", EVERY)
def test_an_id_serves_once_whatever_is_called(what: str) -> None:
    def body(member: LocalMember) -> None:
        handle = EVERY[what](member, "one")
        for again in (EVERY[what], EVERY["max"], EVERY["all_gather"]):
            with pytest.raises(LocalProtocolError, match="under way"):
                again(member, "one")
        assert outcome_of(handle.wait()).status == "committed"
        for again in (EVERY[what], EVERY["sum"]):
            with pytest.raises(LocalProtocolError, match="was called already"):
                again(member, "one")

    play(2, body)


@pytest.mark.parametrize("what", EVERY)
def test_who_cancels_or_dies_is_named_or_left_out_by_all_alike(what: str) -> None:
    """p1 cancels at once, p3 dies a moment after it has called; whoever is told of a result is told
    the same one.
    """

    def body(member: LocalMember) -> Outcome:
        member.sleep(10.0 - member.clock())
        handle = EVERY[what](member, "op")
        if member.index == 1:
            handle.cancel()
        outcome = outcome_of(handle.wait())
        member.sleep(40.0 - member.clock())
        survivor = torch.full((3,), float(member.index))
        after = member.all_reduce(survivor, op_id="after", op="sum").wait()
        assert (names(after), survivor.tolist()) == (P[:3], [3.0] * 3)
        return outcome

    results = play(4, body, lambda swarm: swarm.crash_at(3, 10.03))
    told = {tuple(names(outcome)) for outcome in results[:3] if outcome.status == "committed"}
    assert len(told) <= 1
    if what != "barrier":  # which waits for p1, who is there and does not come
        assert [results[index].status for index in (0, 2)] == ["committed"] * 2
        assert {P[0]} <= set(told.pop()) <= set(P[:4])
