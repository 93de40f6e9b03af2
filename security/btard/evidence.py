"""Evidence: signed messages of one attempt from which anybody can see, offline, that a peer was
rightly removed.

Some faults prove themselves: two messages for one slot, a share that is not the one committed to,
signed bytes that are no message. All others are certificates: more than half of the attempt's
peers, each of which has looked for itself, signed that something was withheld, or that somebody is
guilty. Fewer than half lie, so one of them is honest; that is the assumption of the whole protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from ...collectives.errors import SecurityError
from ...collectives.identifiers import PeerId, RunId
from .draw import share_commitment
from .messages import (
    SLOTTED,
    Body,
    Bundle,
    Context,
    Fault,
    Judgement,
    Kind,
    Lacking,
    Result,
    Reveal,
    Slotted,
    Verify,
    decode,
    fits,
    is_signed,
)

_KINDS: dict[type[msgspec.Struct], Kind] = dict(zip(Slotted.__args__, SLOTTED, strict=True))


def kind_of(body: Body) -> Kind | None:
    """Which slot a message takes; None: none, there may be many of its kind."""
    return _KINDS.get(type(body))


def verify_evidence(bundle: Bundle, verify: Verify) -> PeerId:
    """Who was removed by this evidence. Raises SecurityError E203 where it proves nothing.

    It says nothing of the roster in it: `verify_removals` does.
    """
    roster, whom = bundle.context.roster, bundle.whom
    if len(set(roster)) != len(roster) or whom >= len(roster):
        raise _unproven(bundle, "its roster is none")
    if len(bundle.messages) > max(2, len(roster)):
        raise _unproven(bundle, "it has more messages than anybody needs for it")
    if not all(is_signed(bundle.context, each, verify) for each in bundle.messages):
        raise _unproven(bundle, "a message in it is not signed by its sender for this attempt")
    if not _PROOFS[Fault(bundle.fault)](bundle):
        raise _unproven(bundle, f"its messages do not show {Fault(bundle.fault).name.lower()}")
    return roster[whom]


def verify_removals(
    run: RunId, roster: Sequence[PeerId], bundles: Iterable[Bundle], verify: Verify
) -> dict[PeerId, Fault]:
    """All removals of a run that began with ``roster``: each was in an attempt from which nobody
    was missing but who had been removed before it.

    Raises SecurityError E203 at the first that was not proven.
    """
    removed: dict[PeerId, Fault] = {}
    for bundle in bundles:
        if not belongs(bundle.context, run, roster, removed):
            raise _unproven(bundle, "its attempt is none of this run")
        removed.setdefault(verify_evidence(bundle, verify), Fault(bundle.fault))
    return removed


def belongs(
    context: Context, run: RunId, roster: Iterable[PeerId], removed: Iterable[PeerId]
) -> bool:
    """Whether an attempt of this run can have these peers: all that the run began with, but for
    some of those that were removed.
    """
    there, first = set(context.roster), set(roster)
    return context.run == run and there <= first and first - there <= set(removed)


def _two_for_one_slot(bundle: Bundle) -> bool:
    if len(bundle.messages) != 2:
        return False
    first, second = bundle.messages
    bodies = [decode(each.body) for each in bundle.messages]
    kinds = {None if body is None else kind_of(body) for body in bodies}
    return (
        first.sender == second.sender == bundle.whom
        and first.body != second.body
        and len(kinds) == 1
        and None not in kinds
    )


def _no_message(bundle: Bundle) -> bool:
    message = bundle.messages[0]
    body = decode(message.body)
    return message.sender == bundle.whom and (
        body is None or not fits(body, len(bundle.context.roster))
    )


def _other_share(bundle: Bundle) -> bool:
    bodies = [decode(each.body) for each in bundle.messages]
    match bodies:
        case [Result() as result, Reveal() as reveal]:
            committed = share_commitment(
                bundle.context, bundle.context.roster[bundle.whom], reveal.share
            )
            return {each.sender for each in bundle.messages} == {
                bundle.whom
            } and result.share != committed
        case _:
            return False


def _withheld(bundle: Bundle) -> bool:
    item = bundle.item
    return (
        item is not None
        and item[1] == bundle.whom
        and _most(bundle, lambda body: isinstance(body, Lacking) and item in body.items)
    )


def _judged(bundle: Bundle) -> bool:
    wanted = (bundle.whom, bundle.fault)
    return _most(
        bundle,
        lambda body: (
            isinstance(body, Judgement)
            and any((each.whom, each.fault) == wanted for each in body.verdicts)
        ),
    )


def _most(bundle: Bundle, says: Callable[[Body], bool]) -> bool:
    """Whether more than half of the attempt's peers say so."""
    witnesses: set[int] = set()
    for each in bundle.messages:
        body = decode(each.body)
        if body is not None and says(body):
            witnesses.add(each.sender)
    return 2 * len(witnesses) > len(bundle.context.roster)


_PROOFS: dict[Fault, Callable[[Bundle], bool]] = {
    Fault.EQUIVOCATION: _two_for_one_slot,
    Fault.NONSENSE: _no_message,
    Fault.REVEAL: _other_share,
    Fault.WITHHELD: _withheld,
    Fault.RESIDUAL: _judged,
    Fault.AGGREGATE: _judged,
    Fault.GRADIENT: _judged,
    Fault.ACCUSATION: _judged,
}


def _unproven(bundle: Bundle, why: str) -> SecurityError:
    return SecurityError(
        (
            f"evidence of step {bundle.context.step} against peer number {bundle.whom} "
            f"proves nothing: {why}"
        ),
        code="E203",
    )
