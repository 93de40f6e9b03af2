"""Collectives for scripts: sums, gathers and their like over the members of a run, with or without
an optimizer.

    from atoll.collectives import all_gather, all_reduce, enter
    from atoll.node import join

    swarm = join("atoll2:…")
    enter(swarm)
    outcome = all_reduce(swarm, tensor, op_id="loss 17", op="mean").wait()

Each call is one decision of the swarm: "committed", with the same bits at every member and the
contributors by name, or "open". Calls return at once with a handle: `wait` blocks, `done` looks,
`cancel` gives up. What they take and give is documented in docs/collectives.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import operator
import re
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import msgspec
from blake3 import blake3

from .awaiting import awaited, warn_of_dropped
from .codec_names import CODECS, unknown_codec
from .errors import AtollError, LocalProtocolError, NotEnoughPeersError, RemoteProtocolError
from .foreign import WORDS, quoted
from .given import RULES, Reduction, Rule, check_reduction, given_of
from .identifiers import HASH_BYTES, PeerId
from .layout import make_layout
from .outcomes import Outcome
from .plain import (
    DEVICES,
    LONGEST_WAIT_S,
    agreed,
    bytes_of,
    check_plain,
    check_swarm,
    flat_of,
    kind_of,
    operate,
    patience,
    plainly,
    read_words,
    seconds,
    tag_of,
    texts,
    tree_kind,
    whole,
    words_of,
)
from .script_swarm import MAX_OP_ID, Call, Operating, Swarm
from .series import NumberedName, series_tag
from .target import Target

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
U = TypeVar("U")
WIDTHS = (8, 16, 32, 64)
ROWS_BYTES = 8  # before the rows of a gather of unequal lengths
MOST_OBJECT_BYTES = 1 << 20
LOOK_S = 0.2  # between two looks at who is there
EXACT = ("", "fp32", "bits")
MOST_DEADLINE_S = 1e9
USUALLY_LOST = {"bf16": 0.0, "int8": 0.05, "int8_dither": 0.05, "int4": 0.3}
"""The share of values that a codec makes 0 of a gradient, about (of normal values int8 loses 0.9 %,
int4 14 %). The codecs of fewer bits lose most values of any vector.
"""
log = logging.getLogger("atoll")
_told = set[str]()  # codecs of which this process has been told that they lose too much


class Handle(Generic[T]):
    """A result that will come (a Pending[T]). Any thread may call any of its methods; ``await`` it
    under asyncio or trio. One that is dropped before its result was taken, or cancelled, warns
    (RuntimeWarning): its tensors keep what they held, while others get what it gave.
    """

    _missed = False  # nobody has taken the result yet

    def __init__(self, operating: Operating, finish: Callable[[Outcome], T]) -> None:
        self._operating, self._finish = operating, finish
        self._result: list[T] = []
        self._finishing = threading.RLock()  # of what is done once; a signal handler may look, too
        self._missed = True

    def done(self) -> bool:
        """Whether the final result is here, and in the caller's tensors; or `wait` would raise."""
        if not self._result and self._operating.done():
            with contextlib.suppress(AtollError):
                self._conclude()
            return True
        return bool(self._result)

    def wait(self, timeout_s: float | None = None) -> T:
        """The result; one that says "open" after ``timeout_s`` seconds or at the operation's own
        deadline. May be called again.

        What is written into the caller's tensors is written by the first `wait` or `done` that sees
        "committed". Raises what the call was refused with. Ctrl-C leaves the operation under way.
        """
        self._missed = False
        if not self._result:
            self._operating.wait(patience(timeout_s))
            return self._conclude()
        return self._result[0]

    def _conclude(self) -> T:
        with self._finishing, plainly():
            if self._result:
                return self._result[0]
            # Asked first: what is decided between is not called open for ever.
            final = self._operating.done()
            result = self._finish(agreed(self._operating.wait(0.0)))
            if final:
                self._result.append(result)
                self._operating.release()
                self._missed = False
            return result

    def then(self, finish: Callable[[T], U]) -> Handle[U]:
        """A handle in place of this one, whose result ``finish`` has gone over."""
        self._missed = False
        return Handle(self._operating, lambda outcome: finish(self._finish(outcome)))

    def cancel(self) -> None:
        """Give up: `wait` says "open", in whatever thread, unless it is decided already. The
        contribution is taken back where no plan names it yet.
        """
        self._missed = False
        self._operating.cancel()

    def __await__(self) -> Generator[Any, Any, T]:
        """The result. Other tasks of the loop run meanwhile. Cancelling the task leaves the
        operation under way.
        """
        return awaited(self).__await__()

    def __del__(self) -> None:
        if self._missed and not sys.is_finalizing():
            warn_of_dropped(self._operating.op_id)


@dataclass(frozen=True, slots=True)
class Gathered:
    """``tensors``: what each contributor of the outcome gave, in order; empty unless committed."""

    outcome: Outcome
    tensors: dict[PeerId, Tensor]


@dataclass(frozen=True, slots=True)
class Objects:
    """``values``: what each contributor of the outcome gave, in order; empty unless committed."""

    outcome: Outcome
    values: dict[PeerId, Any]


@dataclass(frozen=True, slots=True)
class Scattered:
    """``values``: elements [start, start + values.numel()) of the flat reduction; None unless
    committed, empty for who was not counted.
    """

    outcome: Outcome
    start: int
    values: Tensor | None


@dataclass(frozen=True, slots=True)
class StateCheck:
    """Digests of everybody's tensors. Unless committed, only the outcome is set."""

    outcome: Outcome
    roots: dict[PeerId, str]
    """blake3 over the digests of all tensors, by contributor: who shows the same has the same
    state.
    """
    reference: str
    """The root that most show (of two that as many show, the one of the first contributor)."""
    holders: tuple[PeerId, ...]
    """Who shows it."""
    differing: dict[PeerId, tuple[str, ...]]
    """The others, and which of their tensors differ from the reference."""

    @property
    def agreed(self) -> bool:
        """Whether all contributors hold the same bytes."""
        return self.outcome.status == "committed" and not self.differing


def enter(swarm: Swarm, *, start_with: int = 1, timeout_s: float | None = None) -> None:
    """Open a run that has no model, only collectives: with placeholders of one element. Call it
    once, after `join`.

    ``start_with``: return once so many members live, this one among them: whoever founds a run is
    alone in it for a while, and what it calls then is decided by it alone. Raises
    NotEnoughPeersError after ``timeout_s`` seconds without them, and at once in a swarm of one.
    """
    check_swarm(swarm)
    if whole(start_with, "start_with") < 1:
        raise LocalProtocolError(f"start_with={start_with}; at least 1")
    timeout_s = patience(timeout_s)
    layout = make_layout(
        [(f"placeholder {number}", (1,)) for number in range(swarm.settings.fragments)]
    )
    swarm.open(layout, lambda initial: None).release()
    sleep: Callable[[float], None] = getattr(swarm, "sleep", time.sleep)  # of virtual seconds
    waited, there = 0.0, 0
    while (now := sum(view.live for view in swarm.members())) < start_with:
        if now != there:
            log.info("waiting for %d members; %d are there", start_with, now)
        there = now
        if waited >= (LONGEST_WAIT_S if timeout_s is None else timeout_s) or _is_solo(swarm):
            raise NotEnoughPeersError(f"{there} of {start_with} members are there", retryable=True)
        sleep(LOOK_S)
        waited += LOOK_S


def _is_solo(swarm: Swarm) -> bool:
    """Whether nobody can ever come."""
    return bool(getattr(swarm, "alone", False))


def all_reduce(
    swarm: Swarm,
    tensor: Tensor | Mapping[str, Tensor],
    *,
    op_id: str,
    op: Reduction | Rule = "mean",
    weight: int = 1,
    deadline_s: float = 60.0,
    codec: str = "",
    everyone: bool = False,
    f: int = 0,
    before: Sequence[str] = (),
) -> Handle[Outcome]:
    """Mean weighted by ``weight``, sum, maximum, minimum or product over all members that call it,
    in place when committed: float32, bfloat16 or float16, contiguous, on the CPU or a GPU, where it
    is then encoded and decoded; float64 or, but for means, integers on the CPU. Or, of floats of 32
    and 16 bits, a robust rule, of each element or of whole tensors: ``f`` of them may then be
    anything, and the result is "open" with fewer than 2 f + 1 (Krum's rules: 2 f + 3). ``before``:
    steps before the rule, as in a manifest: ``nnm``, ``arc``, ``bucketing2``, ``clipping10``. Named
    tensors are reduced as one, in the order of their names, whatever the order in which they are
    given.

    ``codec``: how values travel; "" keeps every bit. Maxima, minima, products, float64 and integers
    take no other. A tensor with NaN or infinity ends as "open" (float64: is refused). Raises what
    `Swarm.operate` raises; `wait` raises LocalProtocolError for a result that the tensor's type
    cannot hold.
    """
    check_swarm(swarm)
    check_reduction(op, weight, f)
    given = given_of(tensor, op)
    if isinstance(before, str):
        raise LocalProtocolError(
            f"before={before!r} is one text, not a sequence of steps", hint=f"before=({before!r},)"
        )
    if before and op not in RULES:
        raise LocalProtocolError(f"{op} with steps before it", why="They are for robust rules.")
    rule = "+".join([*map(str, before), f"{op}:{f}"]) if op in RULES else given.reducer
    call = call_of(op_id, rule, deadline_s, everyone, weight=weight, codec=codec, tag=given.kind)
    operating = operate(swarm, call, given.vector)
    vanished = lost_by(swarm, op_id, given.vector, codec)

    def finish(outcome: Outcome) -> Outcome:
        if outcome.status == "committed":
            given.take(operating)
        return dataclasses.replace(outcome, vanished=vanished)

    return Handle(operating, finish)


def modular_sum(
    swarm: Swarm,
    tensor: Tensor,
    *,
    op_id: str,
    bits: int = 64,
    deadline_s: float = 60.0,
    everyone: bool = False,
) -> Handle[Outcome]:
    """Sum of integers modulo 2^bits (1 to 64), exactly, in place when committed: int64, contiguous,
    CPU.

    Results lie in [0, 2^bits); for 64 bits in [-2^63, 2^63). Whatever is masked so that the masks
    cancel in the sum can be summed by it.
    """
    import torch

    target = Target(tensor, torch.int64)
    if not 1 <= (bits := whole(bits, "bits")) <= 64:
        raise LocalProtocolError(f"modular_sum of {bits} bits; 1 to 64")
    width = next(width for width in WIDTHS if width >= bits)
    narrow = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[width]
    operating = operate(
        swarm,
        call_of(op_id, f"wrap{width}", deadline_s, everyone, tag=f"b{bits}"),
        words_of(target.flat.to(narrow)),
    )

    def finish(outcome: Outcome) -> Outcome:
        if outcome.status == "committed":
            target.check()
            target.flat.copy_(read_words(operating, 0, narrow, target.flat.shape))
            if bits < 64:
                target.flat.bitwise_and_((1 << bits) - 1)
        return outcome

    return Handle(operating, finish)


def all_gather(
    swarm: Swarm,
    tensor: Tensor,
    *,
    op_id: str,
    deadline_s: float = 60.0,
    everyone: bool = False,
    most: int | None = None,
) -> Handle[Gathered]:
    """Everybody's tensor, bit for bit, by peer: any dtype and shape, equal at all, on the CPU.

    ``most``: of rows, each gives 0 to so many of them (the first dimension), and each costs what
    ``most`` rows cost; all callers say the same.
    """
    if most is not None:
        return _gather_rows(swarm, tensor, most, op_id, deadline_s, everyone)
    operating = operate(
        swarm, call_of(op_id, "gather", deadline_s, everyone, tag=kind_of(tensor)), words_of(tensor)
    )
    return Handle(operating, lambda outcome: Gathered(outcome, _slots(operating, outcome, tensor)))


def _gather_rows(
    swarm: Swarm, tensor: Tensor, most: int, op_id: str, deadline_s: float, everyone: bool
) -> Handle[Gathered]:
    """Slots of ``most`` rows behind their number, in 8 bytes."""
    import torch

    check_plain(tensor, empty=True)
    if not tensor.dim() or not 0 <= tensor.shape[0] <= whole(most, "most"):
        raise LocalProtocolError(
            f"a tensor of shape {tuple(tensor.shape)} to a gather of at most {most} rows"
        )
    with plainly():
        row = like = tensor.new_zeros((1, *tensor.shape[1:]))
        size = ROWS_BYTES + most * row.nbytes
        try:
            slot = torch.zeros(size, dtype=torch.uint8, device="cpu")
        except (RuntimeError, TypeError) as error:  # more than there is; more than torch counts
            raise LocalProtocolError(
                f"a gather of at most {most:,} rows: no memory for {size:,} bytes",
                hint="each member gives the bytes of most= rows, however few rows it has",
            ) from error
        slot[:ROWS_BYTES].view(torch.int64)[0] = tensor.shape[0]
        given = tensor.detach().contiguous().view(-1).view(torch.uint8)
        slot[ROWS_BYTES : ROWS_BYTES + given.numel()] = given
    kind = tag_of(f"rows<={most}:{kind_of(like)}")
    call = call_of(op_id, "gather", deadline_s, everyone, tag=kind)
    operating = operate(swarm, call, words_of(slot))

    def finish(outcome: Outcome) -> Gathered:
        tensors: dict[PeerId, Tensor] = {}
        for peer, found in _slots(operating, outcome, slot).items():
            rows = int(found[:ROWS_BYTES].view(torch.int64)[0])
            if not 0 <= rows <= most:
                raise RemoteProtocolError(f"{rows} rows, of at most {most}", peer=peer)
            data = found[ROWS_BYTES : ROWS_BYTES + rows * row.nbytes].clone()
            tensors[peer] = data.view(tensor.dtype).view((rows, *tensor.shape[1:]))
        return Gathered(outcome, tensors)

    return Handle(operating, finish)


def gather_objects(
    swarm: Swarm,
    value: Any,
    *,
    op_id: str,
    most: int = 4096,
    deadline_s: float = 60.0,
    everyone: bool = False,
) -> Handle[Objects]:
    """Everybody's ``value``, by peer: None, booleans, numbers, text, bytes, and lists and mappings
    of them, in at most ``most`` bytes of msgpack (up to MOST_OBJECT_BYTES), which each costs.
    Tuples arrive as lists. All callers say the same ``most``.
    """
    import torch

    if not 1 <= whole(most, "most") <= MOST_OBJECT_BYTES:
        raise LocalProtocolError(f"objects of at most {most} bytes; 1 to {MOST_OBJECT_BYTES:,}")
    try:
        data = msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise LocalProtocolError(f"the object cannot be sent: {error}") from None
    if len(data) > most:
        raise LocalProtocolError(
            f"an object of {len(data):,} bytes, where {most:,} are the most",
            hint="give most= alike at all callers; tensors travel by all_gather",
        )
    given = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    gathered = _gather_rows(swarm, given, most, op_id, deadline_s, everyone)

    def finish(found: Gathered) -> Objects:
        values = dict[PeerId, Any]()
        for peer, packed in found.tensors.items():
            try:
                values[peer] = msgspec.msgpack.decode(packed.numpy().tobytes())
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                raise RemoteProtocolError(f"no object: {quoted(error)}", peer=peer) from None
        return Objects(found.outcome, values)

    return gathered.then(finish)


def reduce_scatter(
    swarm: Swarm,
    tensor: Tensor,
    *,
    op_id: str,
    op: Reduction = "mean",
    weight: int = 1,
    deadline_s: float = 60.0,
    codec: str = "",
    everyone: bool = False,
) -> Handle[Scattered]:
    """This member's share of the reduction: equal shares in the order of the contributors, the
    first ones one element longer.

    It costs what an all-reduce costs: a result is only called committed when a quorum holds all of
    it.
    """
    import torch

    check_reduction(op, weight)
    flat = flat_of(tensor, torch.float32, devices=DEVICES)
    kind = kind_of(tensor, "scatter:", DEVICES)
    operating = operate(
        swarm,
        call_of(op_id, op, deadline_s, everyone, weight=weight, codec=codec, tag=kind),
        flat,
    )

    vanished = lost_by(swarm, op_id, flat, codec)

    def finish(outcome: Outcome) -> Scattered:
        outcome = dataclasses.replace(outcome, vanished=vanished)
        if outcome.status != "committed":
            return Scattered(outcome, 0, None)
        peers = [share.peer for share in outcome.contributors]
        size, more = divmod(flat.numel(), len(peers))
        index = peers.index(swarm.peer) if outcome.counted else len(peers)
        start = index * size + min(index, more)
        values = flat.new_empty((size + (index < more)) if outcome.counted else 0)
        operating.copy_into(values, start)
        return Scattered(outcome, start, values)

    return Handle(operating, finish)


def broadcast(
    swarm: Swarm,
    tensor: Tensor,
    *,
    root: PeerId,
    op_id: str,
    deadline_s: float = 60.0,
    everyone: bool = False,
) -> Handle[Outcome]:
    """The tensor of ``root``, bit for bit, into everybody's, in place when committed: any dtype,
    contiguous, CPU.
    """
    return copy_from(
        swarm, tensor, roots=(root,), op_id=op_id, deadline_s=deadline_s, everyone=everyone
    )


def copy_from(
    swarm: Swarm,
    tensor: Tensor,
    *,
    roots: Sequence[PeerId],
    op_id: str,
    deadline_s: float = 60.0,
    everyone: bool = False,
) -> Handle[Outcome]:
    """A broadcast by several roots that hold the same bytes: each sends its part of them."""
    check_swarm(swarm)
    source = swarm.peer in roots
    target = Target(tensor, written=not source)
    named = ",".join(texts(roots, "a root is the id of a peer"))
    tag = tag_of(f"{kind_of(tensor)}<{named}")
    operating = operate(
        swarm,
        call_of(op_id, "copy", deadline_s, everyone, weight=int(source), tag=tag),
        words_of(tensor),
    )

    def finish(outcome: Outcome) -> Outcome:
        if outcome.status == "committed" and not source:
            target.check()
            target.flat.copy_(read_words(operating, 0, tensor.dtype, target.flat.shape))
        if (
            outcome.status == "open"
            and operating.members
            and not set(roots) & set(operating.members)
        ):
            strangers = (
                f"{', '.join(roots)} "
                f"{'is no member' if len(roots) == 1 else 'are no members'} of the run"
            )
            return dataclasses.replace(
                outcome, reason=f"{strangers}, so nobody could give the tensor ({outcome.reason})"
            )
        return outcome

    return Handle(operating, finish)


def barrier(swarm: Swarm, *, op_id: str, deadline_s: float = 60.0) -> Handle[Outcome]:
    """Committed once every live member with a script has called it; the contributors are who came.
    "open" at the deadline.
    """
    import torch

    nothing = torch.zeros(1, dtype=torch.float32, device="cpu")
    return Handle(
        operate(
            swarm, call_of(op_id, "max", deadline_s, True, codec="fp32", tag="barrier"), nothing
        ),
        lambda outcome: outcome,
    )


def check_state(
    swarm: Swarm,
    tensors: Mapping[str, Tensor],
    *,
    op_id: str,
    deadline_s: float = 60.0,
    everyone: bool = False,
) -> Handle[StateCheck]:
    """Compare named tensors (contiguous, CPU) with everybody's, by digests: 32 bytes a tensor
    travel.

    The run's own anchor needs no such check: every entry of its log names the state before it, and
    a member that differs fetches it anew.
    """
    import torch

    said = cast("object", tensors)  # of a script that no checker has seen
    if not isinstance(said, Mapping) or not tensors:
        raise LocalProtocolError(
            "check_state takes a mapping of names to tensors, at least one, such as "
            "model.state_dict()"
        )
    names = texts(tensors, "check_state takes tensors by name")
    digests = b"".join(blake3(bytes_of(tensors[name]).numpy().data).digest() for name in names)
    kind = tree_kind(tensors, "state:")
    mine = torch.frombuffer(bytearray(digests), dtype=torch.float32)
    operating = operate(swarm, call_of(op_id, "gather", deadline_s, everyone, tag=kind), mine)
    return Handle(
        operating, lambda outcome: _compare(outcome, names, _slots(operating, outcome, mine))
    )


def repair_state(
    swarm: Swarm,
    tensors: Mapping[str, Tensor],
    check: StateCheck,
    *,
    op_id: str,
    deadline_s: float = 60.0,
) -> Handle[Outcome]:
    """Copy the tensors that differ somewhere from all holders of the reference at once, in place.
    All members of ``check`` call it.
    """
    import torch

    said = cast("object", check)
    if not isinstance(said, StateCheck):
        raise LocalProtocolError(
            f"repair_state takes what check_state(...).wait() returned, not a {type(said).__name__}"
        )
    names = sorted({name for differing in check.differing.values() for name in differing})
    if not names:
        raise LocalProtocolError(
            "there is nothing to repair",
            why=f"the check is {check.outcome.status} and all of it agrees",
        )
    if lacking := [name for name in names if name not in tensors]:
        raise LocalProtocolError(
            f"the check found {', '.join(lacking)} to differ, and no such tensor is given"
        )
    packed = torch.cat([bytes_of(tensors[name]) for name in names])
    copied = copy_from(swarm, packed, roots=check.holders, op_id=op_id, deadline_s=deadline_s)

    def finish(outcome: Outcome) -> Outcome:
        if outcome.status == "committed" and swarm.peer not in check.holders:
            at = 0
            for name in names:
                target = bytes_of(tensors[name])
                target.copy_(packed[at : at + target.numel()])
                at += target.numel()
        return outcome

    return copied.then(finish)


def _compare(
    outcome: Outcome, names: Sequence[str], gathered: Mapping[PeerId, Tensor]
) -> StateCheck:
    digests = {peer: bytes(bytes_of(words).numpy()) for peer, words in gathered.items()}
    roots = {peer: blake3(found).hexdigest() for peer, found in digests.items()}
    shown = list(roots.values())
    reference = max(shown, key=lambda root: (shown.count(root), -shown.index(root)), default="")
    holders = tuple(peer for peer, root in roots.items() if root == reference)
    differing = dict[PeerId, tuple[str, ...]]()
    for peer, found in digests.items():
        if roots[peer] != reference:
            good = digests[holders[0]]
            parts = (
                (name, slice(HASH_BYTES * index, HASH_BYTES * (index + 1)))
                for index, name in enumerate(names)
            )
            differing[peer] = tuple(name for name, part in parts if found[part] != good[part])
    return StateCheck(outcome, roots, reference, holders, differing)


def _slots(operating: Operating, outcome: Outcome, like: Tensor) -> dict[PeerId, Tensor]:
    if outcome.status != "committed":
        return {}
    size = operating.numel // len(operating.members)
    place = {peer: index * size for index, peer in enumerate(operating.members)}
    return {
        share.peer: read_words(operating, place[share.peer], like.dtype, like.shape)
        for share in outcome.contributors
    }


def lost_by(swarm: Swarm, op_id: str, flat: Tensor, codec: str) -> float:
    """Which share of the values of ``flat`` that are not 0 a codec that was asked for makes 0; a
    log line, once a codec, where they are more than a gradient has.
    """
    if codec in EXACT:
        return 0.0
    with plainly():
        share = swarm.vanished(flat, codec)
    if share > USUALLY_LOST.get(codec, 1.0) and codec not in _told:
        _told.add(codec)
        log.warning(
            "operation %r: codec %s makes %.0f %% of this member's values 0, which are small "
            "beside others of their block. Outcomes have the share (`vanished`); without codec= "
            "nothing is lost.",
            op_id,
            codec,
            100 * share,
        )
    return share


def call_of(
    op_id: str,
    reducer: str,
    deadline_s: float,
    everyone: bool,
    *,
    weight: int = 1,
    codec: str = "",
    tag: str = "",
    group: str = "",
) -> Call:
    """A checked Call. Raises LocalProtocolError."""
    if not isinstance(op_id, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise LocalProtocolError(
            f"op_id is a str, not {op_id!r}", hint=f"op_id={str(op_id)!r}, alike at all members"
        )
    if not 0 < len(op_id) <= MAX_OP_ID or not re.search(WORDS, op_id):
        raise LocalProtocolError(
            f"op_id is of 1 to {MAX_OP_ID} characters that can be seen, not {op_id[:40]!r}"
            + (f"... ({len(op_id):,} characters)" if len(op_id) > MAX_OP_ID else "")
        )
    deadline_s = seconds(deadline_s, "deadline_s")
    if not 0 <= deadline_s <= MOST_DEADLINE_S:
        raise LocalProtocolError(
            f"deadline_s is {deadline_s:g}, at most {MOST_DEADLINE_S:g} and at least 0",
            why="Others wait for whoever has called, so a call ends at some time.",
        )
    said = cast("object", codec)
    if isinstance(said, str) and said not in (*EXACT, *CODECS):
        raise unknown_codec(codec, place=f"operation {op_id!r}: ")
    try:
        str.encode(op_id)  # not every str can be
        if isinstance(op_id, NumberedName):
            tag = series_tag(tag, op_id.series, op_id.number)
        call = Call(
            str(op_id),
            reducer,
            codec,
            operator.index(weight),
            float(deadline_s),
            everyone,
            tag,
            group,
        )
        return msgspec.convert(msgspec.to_builtins(call), Call)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise LocalProtocolError(f"operation {op_id!r} cannot be called: {error}") from None
