"""Programs of collective calls, drawn from a seed; how a member plays one; and what of it is right.

A program is the same at all members: which operations, of which types and shapes, who calls when,
who cancels, who calls otherwise than the others, who dies. `play` carries out one member's part,
in a `LocalSwarm` or with real nodes, and notes what each call came to. `judge` holds these against
numpy: whoever is told "committed" has the values of exactly the contributors that it is told, the
same bits as everybody else, and whoever is not has what it had.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.collectives import api
from atoll.collectives.averaging import average
from atoll.collectives.errors import AtollError
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm

FLOATS = ("float32", "bfloat16", "float16", "float64")
INTEGERS = ("int8", "uint8", "int16", "int32", "int64")
REDUCTIONS = ("sum", "mean", "max", "min", "product")
KINDS = (
    *("reduce",) * 8,
    *("gather", "broadcast", "scatter", "modular", "barrier", "check", "tree"),
    *("average",) * 2,
)
ROUNDING = {"bfloat16": 2**-7, "float16": 2**-10, "float32": 2e-6, "float64": 1e-14}
LOST = {"int8": 0.02, "bf16": 0.01}  # of the largest value, by a codec, for each member
CALM_S = 40.0
LEAD_S = 8.0  # virtual seconds until the first call
TOGETHER_S = 1.0  # calls so near to each other meet


@dataclass(frozen=True)
class Step:
    """One operation, and what each member does about it."""

    name: str
    kind: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    codec: str
    everyone: bool
    deadline_s: float
    plan: str
    root: int
    weights: tuple[int, ...]
    callers: tuple[int, ...]
    delays: tuple[float, ...]
    cancels: Mapping[int, float]
    odd: int  # who calls it otherwise, -1: nobody
    naught: int  # whose values are not all finite
    huge: bool
    how: str  # "wait", "poll", "later", "threads"


@dataclass(frozen=True)
class Program:
    """``crashes``: (member, when, back after so long or None), in seconds."""

    seed: int
    members: int
    steps: tuple[Step, ...]
    crashes: tuple[tuple[int, float, float | None], ...]


@dataclass
class Seen:
    """What one call came to at one member, in one life of it."""

    step: Step
    member: int
    called_at: float = 0.0
    status: str = "unknown"  # its process ended before it knew
    contributors: tuple[tuple[int, int], ...] = ()
    counted: bool = False
    result: Any = None
    untouched: bool = True
    error: str = ""
    reason: str = ""
    more: dict[str, Any] = field(default_factory=dict[str, Any])


def draw(
    seed: int, *, members: int = 0, slow: float = 1.0, lead_s: float = 0.0, deaths: float = 0.3
) -> Program:
    """The program of a seed. ``slow``: how many seconds its seconds take; ``lead_s``: until its
    first call. ``deaths``: in which share of programs somebody dies.
    """
    rng = random.Random(f"calls {seed}")
    members = members or rng.randint(2, 5)
    disturbed = rng.random() < 0.5
    steps = tuple(
        _step(rng, f"{seed}/{number}", members, disturbed, slow)
        for number in range(rng.randint(2, 6))
    )
    falls = list[tuple[int, float, float | None]]()
    if rng.random() < deaths:
        for member in rng.sample(range(members), rng.randint(1, (members + 1) // 2)):
            back = rng.uniform(0.5, 8.0) if rng.random() < 0.6 else None
            falls.append((member, lead_s + rng.uniform(0.0, 12.0) * slow, back))
    return Program(seed, members, steps, tuple(falls))


def _step(rng: random.Random, name: str, members: int, disturbed: bool, slow: float) -> Step:
    kind = rng.choice(KINDS)
    dtype = rng.choice(FLOATS + INTEGERS)
    if kind in ("average", "scatter"):
        dtype = "float32"
    if kind == "modular":
        dtype = "int64"
    ops = REDUCTIONS if dtype in FLOATS else ("sum", "max", "min", "product")
    op = rng.choice(("mean", "sum", "max")) if kind == "scatter" else rng.choice(ops)
    shape = rng.choice(
        [(1,), (), (7,), (3, 5), (2, 2, 2), (257,), (1000,), (rng.randint(1, 300),), (70_001,)]
    )
    mangled = disturbed and rng.random() < 0.5
    cancels = dict[int, float]()
    if mangled and rng.random() < 0.3:
        cancels = {
            member: rng.uniform(0.0, 1.0) * slow
            for member in rng.sample(range(members), rng.randint(1, members))
        }
    callers = list(range(members))
    if mangled and rng.random() < 0.3:
        callers = sorted(rng.sample(callers, rng.randint(1, members)))
    spread = rng.choice((0.0, 0.3, 0.3, 3.0, 9.0)) if mangled else rng.choice((0.0, 0.3))
    floats = dtype in ("float32", "bfloat16", "float16")
    lossy = floats and op in ("mean", "sum") and kind in ("reduce", "average", "tree")
    return Step(
        name,
        kind,
        op,
        dtype,
        shape,
        rng.choice(("", "", "", "fp32", "int8", "bf16")) if lossy else "",
        rng.random() < 0.3,
        _deadline(rng, mangled, len(callers) < members, slow),
        rng.choice(("grid", "pairwise", "gossip")),
        rng.randrange(members),
        tuple(rng.randint(1, 9) if op == "mean" else 1 for _ in range(members)),
        tuple(callers),
        tuple(rng.uniform(0, spread) * slow for _ in range(members)),
        cancels,
        rng.randrange(members) if mangled and rng.random() < 0.3 else -1,
        rng.randrange(members) if mangled and floats and rng.random() < 0.15 else -1,
        mangled and dtype in ("float32", "float64") and rng.random() < 0.15,
        rng.choice(("wait", "wait", "poll", "later", "threads")),
    )


def _deadline(rng: random.Random, mangled: bool, lacking: bool, slow: float) -> float:
    """A call that waits for everybody where somebody never calls waits until then."""
    if mangled and (lacking or rng.random() < 0.3):
        return rng.choice((0.3, 1.0, 4.0, 8.0)) * slow
    return CALM_S


# ---- what is given


def as_called(step: Step, member: int) -> Step:
    """The step as a member calls it: who is odd means something else."""
    if step.odd != member:
        return step
    odd = (*step.shape, 2)
    return replace(step, shape=odd, odd=-1)


def given(step: Step, member: int) -> Tensor:
    """What a member gives."""
    step = as_called(step, member)
    dtype: torch.dtype = getattr(torch, step.dtype)
    rng = torch.Generator().manual_seed(hash((step.name, member)) % (1 << 40))
    rng.manual_seed(random.Random(f"{step.name} {member}").getrandbits(40))
    if dtype.is_floating_point:
        values = torch.randn(step.shape, generator=rng, dtype=torch.float64)
        if step.huge:
            values = values.sign() * (3e38 if step.dtype == "float32" else 1.5e308)
        values = values.to(dtype)
        if step.naught == member and step.dtype != "float64":
            values.view(-1)[-1] = float("nan")
        return values
    least, most = (0, 4) if dtype == torch.uint8 else (-2, 3)
    values = torch.randint(least, most, step.shape, generator=rng)
    if dtype == torch.int64:
        values = values * ((1 << 60) + 1)
    return values.to(dtype)


def tree(step: Step, member: int) -> dict[str, Tensor]:
    """The same, named, in an order that differs from member to member."""
    whole = given(step, member)
    pairs = [("w", whole), ("a b", whole.flatten()[:1].clone())]
    return dict(pairs if member % 2 else reversed(pairs))


# ---- one member's part


class Player:
    """Plays a program at one member. ``clock`` and ``sleep`` in the seconds of its swarm;
    ``threads``: whether other threads may call. What it sees is in ``seen`` as it happens: of one
    that is killed, too.
    """

    def __init__(
        self,
        program: Program,
        swarm: Any,
        member: int,
        index_of: Callable[[str], int],
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        threads: bool,
        seen: list[Seen],
        prefix: str = "",
    ) -> None:
        self.program, self.swarm, self.member, self.index_of = program, swarm, member, index_of
        self.clock, self.sleep, self.threads, self.seen = clock, sleep, threads, seen
        self.prefix = prefix

    def play(self) -> None:
        later = list[Callable[[], None]]()
        for step in self.program.steps:
            self.sleep(step.delays[self.member])
            if self.member not in step.callers:
                continue
            seen = Seen(step, self.member, self.clock())
            self.seen.append(seen)
            conclude = self._call(step, seen)
            if conclude is None:
                continue
            if step.how == "later":
                later.append(conclude)
            else:
                conclude()
        random.Random(f"{self.program.seed} {self.member}").shuffle(later)
        for conclude in later:
            conclude()

    def _call(self, step: Step, seen: Seen) -> Callable[[], None] | None:
        mine = as_called(step, self.member)
        tensors = tree(mine, self.member) if step.kind == "tree" else given(mine, self.member)
        every = list(tensors.values()) if isinstance(tensors, dict) else [tensors]
        before = [tensor.clone() for tensor in every]
        try:
            handle = self._begin(mine, tensors)
        except AtollError as error:
            return _failed(seen, error, every, before)

        def conclude() -> None:
            try:
                found = self._settle(step, handle)
            except AtollError as error:
                _failed(seen, error, every, before)
                return
            self._note(seen, found, every, before)

        return conclude

    def _begin(self, step: Step, tensors: Any) -> Any:
        named: dict[str, Any] = {"op_id": self.prefix + step.name, "deadline_s": step.deadline_s}
        every: dict[str, Any] = {**named, "everyone": step.everyone}
        weight, swarm = step.weights[self.member], self.swarm
        match step.kind:
            case "gather":
                return api.all_gather(swarm, tensors, **every)
            case "broadcast":
                return api.broadcast(swarm, tensors, root=self.name_of(step.root), **every)
            case "scatter":
                return api.reduce_scatter(
                    swarm,
                    tensors,
                    op=step.op,  # type: ignore[arg-type]
                    weight=weight,
                    codec=step.codec,
                    **every,
                )
            case "modular":
                return api.modular_sum(swarm, tensors, bits=64, **every)
            case "barrier":
                return api.barrier(swarm, **named)
            case "check":
                return api.check_state(swarm, {"t": tensors}, **every)
            case "average":
                return average(
                    swarm,
                    tensors,
                    plan=step.plan,  # type: ignore[arg-type]
                    codec=step.codec,
                    **every,
                )
            case _:
                return api.all_reduce(
                    swarm,
                    tensors,
                    op=step.op,  # type: ignore[arg-type]
                    weight=weight,
                    codec=step.codec,
                    **every,
                )

    def name_of(self, index: int) -> Any:
        return next(
            member.peer for member in self.swarm.members() if self.index_of(member.peer) == index
        )

    def _settle(self, step: Step, handle: Any) -> Any:
        if self.member in step.cancels:
            if self.threads:
                timer = threading.Timer(step.cancels[self.member], handle.cancel)
                timer.start()
                try:
                    return handle.wait()
                finally:
                    timer.join()
            self.sleep(step.cancels[self.member])
            handle.cancel()
            return handle.wait()
        if step.how == "poll":
            while not handle.done():
                self.sleep(0.05)
        if step.how == "threads" and self.threads:
            found = list[Any]()

            def wait() -> None:
                with contextlib.suppress(AtollError):
                    found.append(handle.wait())

            waiting = [threading.Thread(target=wait) for _ in range(3)]
            for thread in waiting:
                thread.start()
            for thread in waiting:
                thread.join()
            last = handle.wait()
            assert all(each == last or step.kind in ("gather", "scatter") for each in found)
            return last
        return handle.wait()

    def _note(
        self, seen: Seen, found: Any, every: Sequence[Tensor], before: Sequence[Tensor]
    ) -> None:
        step = seen.step
        if step.kind == "average":
            seen.more = {"exact": found.exact, "weight": found.weight, "steps": found.steps}
            seen.status = found.status
        else:
            outcome = found.outcome if hasattr(found, "outcome") else found
            seen.status, seen.counted, seen.reason = outcome.status, outcome.counted, outcome.reason
            seen.contributors = tuple(
                (self.index_of(share.peer), share.samples) for share in outcome.contributors
            )
        seen.untouched = _same(every, before)
        match step.kind:
            case "gather":
                seen.result = {self.index_of(p): t for p, t in found.tensors.items()}
            case "scatter":
                seen.result = (found.start, found.values)
            case "check":
                seen.result = found
            case _:
                seen.result = [tensor.clone() for tensor in every]


def _same(every: Sequence[Tensor], before: Sequence[Tensor]) -> bool:
    return all(bits(a) == bits(b) for a, b in zip(every, before, strict=True))


def _failed(
    seen: Seen, error: AtollError, every: Sequence[Tensor], before: Sequence[Tensor]
) -> None:
    seen.status, seen.error = "raised", f"{type(error).__name__}: {error.message}"
    seen.untouched = _same(every, before)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


# ---- what is right


def judge(program: Program, seen: Sequence[Seen]) -> list[str]:
    """What is wrong, in words; nothing where all is right."""
    return [
        f"seed {program.seed}, {step.name} ({step.kind} {step.op} {step.dtype} {step.shape}): {why}"
        for step in program.steps
        for why in _faults(program, step, [each for each in seen if each.step is step])
    ]


def _faults(program: Program, step: Step, seen: Sequence[Seen]) -> Iterator[str]:
    decided = [each for each in seen if each.status == "committed"]
    for each in seen:
        who = f"p{each.member}"
        if each.status not in ("committed", "open", "raised", "unknown"):
            yield f"{who} is told {each.status!r}"
        if each.status != "committed" and not each.untouched:
            yield f"{who}'s tensor was written, and the outcome is {each.status}"
        if each.status == "raised" and not _may_raise(program, step, each):
            yield f"{who} is refused: {each.error}"
    if step.kind == "average":
        yield from _averages(program, step, decided)
        return
    told = {each.contributors for each in decided}
    if len(told) > 1:
        yield f"two decisions: {told}"
    for each in decided:
        names = [member for member, _ in each.contributors]
        if each.counted and each.member not in names:
            yield f"p{each.member} is counted and not named"
        if len(set(names)) != len(names) or not names or not {*names} <= {*step.callers}:
            yield f"contributors {names}"
        if step.odd in names and len(names) > 1 and step.kind != "barrier":
            yield f"p{step.odd}, who called otherwise, is counted with others: {names}"
        if step.kind in ("reduce", "tree", "scatter") and any(
            weight != step.weights[member] for member, weight in each.contributors
        ):
            yield f"weights {each.contributors}"
        yield from (f"p{each.member}: {why}" for why in _values(step, each, names))
    if _calm(program, step, seen):
        everybody = {*range(program.members)}
        for each in seen:
            named = {member for member, _ in each.contributors}
            if step.kind == "broadcast":
                named |= everybody
            if each.status != "committed" or named != everybody:
                yield f"p{each.member}: {each.status} {named} {each.reason}, and nothing happened"


def _may_raise(program: Program, step: Step, seen: Seen) -> bool:
    """Whether an error is one that there is a reason for."""
    again = any(member == seen.member for member, _, _ in program.crashes)
    return (
        (step.odd >= 0 and step.kind != "barrier")
        or (again and any(w in seen.error for w in ("was called already", "SwarmClosed", "open")))
        or (step.huge and any(w in seen.error for w in ("overflows", "does not fit")))
        or (step.dtype in ("int8", "uint8", "int16", "int32") and "does not fit" in seen.error)
        or (bool(program.crashes) and "the members of the run have just changed" in seen.error)
        or (bool(program.crashes) and "under a configuration" in seen.error)
        or ("no longer kept" in seen.error and seen.called_at > 100.0)
    )


def _calm(program: Program, step: Step, seen: Sequence[Seen]) -> bool:
    """Whether nothing happens that could leave anybody out."""
    calls = [each.called_at for each in seen]
    quiet = not (program.crashes or step.cancels or step.huge) and step.odd < 0 > step.naught
    fits = step.op not in ("sum", "product") or step.dtype not in INTEGERS[:4]
    return (
        quiet
        and fits
        and step.kind != "average"
        and len(calls) == program.members
        and step.deadline_s >= CALM_S
        and max(calls) - min(calls) < (20.0 if step.everyone else TOGETHER_S)
    )


def _values(step: Step, seen: Seen, names: Sequence[int]) -> Iterator[str]:
    """What of a committed result differs from numpy."""
    if step.kind == "barrier":
        return
    called = as_called(step, names[0] if step.odd in names else -2)
    values = [given(step, member) for member in names]
    if step.naught in names and step.kind in ("reduce", "tree", "scatter"):
        yield f"p{step.naught}'s NaN is counted"
        return
    match step.kind:
        case "gather":
            for member, value in zip(names, values, strict=True):
                if bits(seen.result[member]) != bits(value):
                    yield f"not what p{member} gave"
        case "broadcast":
            if bits(seen.result[0]) != bits(given(step, step.root)):
                yield "not what the root gave"
        case "check":
            roots = {bits(value) for value in values}
            if len(set(seen.result.roots.values())) != len(roots):
                yield f"{seen.result.roots}"
        case "scatter":
            start, part = seen.result
            if seen.counted != bool(part.numel()) and len(names) <= values[0].numel():
                yield f"a share of {part.numel()}, counted {seen.counted}"
            whole = expected(called, names, values).flatten()
            yield from _near(called, part, whole[start : start + part.numel()], values)
        case _:
            pieces = [values]
            if step.kind == "tree":
                parts = [tree(step, member) for member in names]
                pieces = [[part[name] for part in parts] for name in tree(step, seen.member)]
            for result, given_here in zip(seen.result, pieces, strict=True):
                yield from _near(called, result, expected(called, names, given_here), given_here)


def expected(step: Step, names: Sequence[int], values: Sequence[Tensor]) -> Tensor:
    """The right result, in float64 or in integers."""
    if step.kind == "modular" or step.dtype in INTEGERS:
        rows = [value.to(torch.int64).numpy() for value in values]
    else:
        rows = [value.to(torch.float64).numpy() for value in values]
    op = "sum" if step.kind == "modular" else step.op
    if op == "mean":
        weights = [step.weights[name] for name in names]
        shares = [weight / sum(weights) for weight in weights]  # a product by a weight may overflow
        mean = sum(row * share for row, share in zip(rows, shares, strict=True))
        return torch.from_numpy(np.asarray(mean))
    function = {"sum": np.add, "max": np.maximum, "min": np.minimum, "product": np.multiply}[op]
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.asarray(reduce(function, rows)))


def _near(step: Step, result: Tensor, right: Tensor, values: Sequence[Tensor]) -> Iterator[str]:
    if result.shape != right.shape:
        yield f"of shape {tuple(result.shape)}"
        return
    if not result.dtype.is_floating_point:
        if not torch.equal(result.to(torch.int64), right):
            yield f"{result.flatten()[:4].tolist()} instead of {right.flatten()[:4].tolist()}"
        return
    if not right.numel():
        return
    largest = max(value.to(torch.float64).abs().max().item() for value in values)
    scale = largest * (1 if step.op in ("max", "min", "mean") else len(values))
    if step.op == "product":
        scale = max(right.abs().max().item(), 1e-300)
    allowed = scale * (ROUNDING[step.dtype] + LOST.get(step.codec, 0.0) * (1 + len(values)))
    exact = step.op in ("max", "min")
    error = (result.to(torch.float64) - right).abs().max().item()
    if not error <= (0.0 if exact else allowed):
        yield f"off by {error:g}, where {0.0 if exact else allowed:g} is rounding"


def _averages(program: Program, step: Step, decided: Sequence[Seen]) -> Iterator[str]:
    """Means of means are within what was given; exact ones are the mean; groups hold one result."""
    if step.naught >= 0 or step.huge:
        return
    usual = [member for member in step.callers if member != step.odd]
    values = [given(step, member).to(torch.float64) for member in usual]
    for each in decided:
        if each.member == step.odd or not values:
            continue
        result = each.result[0].to(torch.float64)
        largest = max(value.abs().max().item() for value in values)
        slack = largest * (1e-5 + 4 * LOST.get(step.codec, 0.0))
        stack = torch.stack(values)
        if ((result < stack.amin(0) - slack) | (result > stack.amax(0) + slack)).any():
            yield f"p{each.member} holds what is no mean of what was given"
        if each.more["exact"]:
            if len(usual) < program.members and not program.crashes:
                yield f"p{each.member}: exact, and not everybody called"
            elif len(usual) == program.members and not program.crashes:
                error = (result - stack.mean(0)).abs().max().item()
                if error > slack:
                    yield f"p{each.member}: exact, and off by {error:g}"


def simulated(seed: int) -> tuple[list[str], Counter[str]]:
    """What is wrong with one program in virtual time, and how its calls ended."""
    try:
        program, seen = played(seed)
    except Exception as error:
        return [f"seed {seed}: {type(error).__name__}: {error}"], Counter()
    return judge(program, seen), Counter(f"{each.step.kind} {each.status}" for each in seen)


def played(seed: int) -> tuple[Program, list[Seen]]:
    """A program in virtual time, and what its members saw."""
    program, seen = draw(seed, lead_s=LEAD_S), list[Seen]()
    names = [f"p{index}" for index in range(program.members)]
    ended = set[int]()

    def script(member: Any) -> None:
        api.enter(member)
        while member.clock() < LEAD_S - 2 and len(member.members()) < program.members:
            member.sleep(0.1)
        member.sleep(max(0.0, LEAD_S - member.clock()))
        player = Player(
            program,
            member,
            member.index,
            names.index,
            clock=member.clock,
            sleep=member.sleep,
            threads=False,
            seen=seen,
        )
        player.play()
        ended.add(member.index)
        away = {index for index, _, back in program.crashes if back is None}
        until = member.clock() + 150.0
        while len(ended | away) < program.members and member.clock() < until:
            member.sleep(0.5)

    swarm = LocalSwarm(
        program.members,
        settings=RunSettings(),
        seed=seed,
        latency_s=(0.001, 0.02, 0.1)[seed % 3],
        jitter_s=(0.0, 0.02)[seed % 2],
    )
    for index, when, back in program.crashes:
        swarm.crash_at(index, when, back_after_s=back)
    swarm.run(script, limit_s=2000.0)
    return program, seen
