"""Sums that are stated differently, where parts have witnesses: who is in dispute, and whose
statement is proved to be wrong. Pure functions.

A sum follows from what was contributed, bit for bit. So of two that state different sums of one
part, and the same inputs, one lies; and of ``lying`` + 1 that state the same sum of the same inputs
one is honest: whoever states another sum of these inputs is proved to lie. Who states other inputs
shows what their contributor has signed (`receipts`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import msgspec

from ... import messages as m
from ...digest import meaning
from ...group import Cid, Part, Plan
from ...identifiers import PeerId
from ...partition import is_fair
from ...round.faults import Voice
from .signed import receipts_digest


class SumStatement(NamedTuple):
    """What a member has stated of the parts of one meaning."""

    peer: PeerId
    meaning: bytes
    parts: m.PartDigests
    account: m.Account

    @property
    def voice(self) -> Voice:
        """What of it is kept as a proof."""
        digest = receipts_digest(self.account.receipts)
        return self.peer, self.parts, self.account.inputs, digest, self.account.signature


class SumDispute(NamedTuple):
    """Members of whom one lies; and contributions that differ from member to member."""

    members: set[PeerId]
    cids: set[Cid]


def disputed_parts(of: bytes, digests: Sequence[bytes], known: Iterable[SumStatement]) -> set[int]:
    """The parts of a meaning of which somebody states another sum than has come here
    (``digests``)."""
    return {
        index
        for each in known
        for index, digest in each.parts
        if each.meaning == of and index < len(digests) and digest != digests[index]
    }


def dispute(
    plan: Plan,
    digests: Sequence[bytes],
    known: Iterable[SumStatement],
    stated_by: Sequence[Sequence[PeerId]],
) -> SumDispute | None:
    """Who of those that state parts of a plan states others than have come here (``digests``), of
    inputs that their contributors have signed.

    An owner that states another sum than it has sent here is in dispute with nobody else.
    ``stated_by``: by part, its owner and witnesses.
    """
    of, found = meaning(plan), SumDispute(set(), set())
    stated: list[dict[PeerId, bytes]] = [{} for _ in digests]
    for each in known:
        for index, digest in each.parts:
            if each.meaning == of and index < len(stated) and each.peer in stated_by[index]:
                before = stated[index].get(each.peer)
                if before is None or before == digests[index]:
                    stated[index][each.peer] = digest
    for part, mine, said in zip(plan.parts, digests, stated, strict=True):
        others = {peer for peer, digest in said.items() if digest != mine}
        if part.owner in others:
            found.members.add(part.owner)
        elif others:
            found.members.update(others, {part.owner})
    return found if found.members else None


def owned_by_others(
    plan: Plan,
    without: Collection[PeerId],
    lying: int,
    slow: Collection[PeerId] = (),
    disputed: Collection[int] = (),
) -> tuple[Part, ...] | None:
    """The ranges of a plan, dealt anew so that members in dispute (``without``) own none of them:
    as long as the ranges stay, what was stated of them before proves something.

    Owners that are not ``slow`` come first, then the other contributors, then those that are slow.
    Only where that cannot be, since shares would not be fair, the ``disputed`` parts are exchanged
    for parts of others: whoever gets one states it, too. None where not even that can be.
    """
    owners = dict.fromkeys(part.owner for part in plan.parts)
    everybody = dict.fromkeys((*owners, *(c.member.peer for c in plan.contributors)))
    avoided = {*without, *slow}
    able = [peer for peer in owners if peer not in avoided]
    rests = [able] if len(able) > lying else []
    rests += [[peer for peer in everybody if peer not in out] for out in (avoided, {*without})]
    kept = [peer for peer in owners if peer not in without]
    for rest in rests:
        for moved in ({*owners} - {*rest}, {*owners}):
            parts = _dealt(plan, rest, moved) if rest else None
            if parts is not None and is_fair(msgspec.structs.replace(plan, parts=parts), lying):
                return parts
    return _exchanged(plan, kept, disputed, lying)


def _dealt(plan: Plan, rest: Sequence[PeerId], moved: Collection[PeerId]) -> tuple[Part, ...]:
    """Parts of those that are ``moved``, dealt to ``rest``: the largest first, each to who owns
    least so far, so that shares come out as even as the ranges let them.
    """
    owned, parts = Counter(dict.fromkeys(rest, 0)), list(plan.parts)
    for part in parts:
        if part.owner not in moved:
            owned[part.owner] += part.stop - part.first
    dealt = [at for at, part in enumerate(parts) if part.owner in moved]
    for at in sorted(dealt, key=lambda at: (parts[at].first - parts[at].stop, at)):
        owner = min(rest, key=lambda peer: (owned[peer], peer))
        owned[owner] += parts[at].stop - parts[at].first
        parts[at] = Part(owner, parts[at].first, parts[at].stop)
    return tuple(parts)


def _exchanged(
    plan: Plan, kept: Collection[PeerId], disputed: Collection[int], lying: int
) -> tuple[Part, ...] | None:
    """Each of the disputed parts for one of those that are ``kept``, of the nearest size."""
    parts = list(plan.parts)
    theirs = [at for at in sorted(disputed) if parts[at].owner not in kept]
    free = {at for at, part in enumerate(parts) if part.owner in kept and at not in disputed}
    size = [part.stop - part.first for part in parts]
    changed = False
    for at in sorted(theirs, key=lambda at: -size[at]):
        if free:
            other = min(free, key=lambda one: (abs(size[one] - size[at]), one))
            free.remove(other)
            mine, yours = parts[at], parts[other]
            parts[at] = Part(yours.owner, mine.first, mine.stop)
            parts[other] = Part(mine.owner, yours.first, yours.stop)
            changed = True
    fair = is_fair(msgspec.structs.replace(plan, parts=tuple(parts)), lying)
    return tuple(parts) if changed and fair else None


class Refuted(NamedTuple):
    """A statement that is proved to be wrong in one part, by what ``others`` state of it, who are
    one more than may lie.
    """

    wrong: SumStatement
    part: int
    others: tuple[SumStatement, ...]

    @property
    def proof(self) -> tuple[bytes, int, tuple[Voice, ...]]:
        """The meaning, the part, and what was stated of it, the wrong sum first."""
        voices = tuple(each.voice for each in (self.wrong, *self.others))
        return self.wrong.meaning, self.part, voices


def refuted(known: Iterable[SumStatement], lying: int) -> Refuted | None:
    """The first of these statements that others prove to be wrong."""
    found: dict[tuple[bytes, int, tuple[bytes, ...]], dict[bytes, dict[PeerId, SumStatement]]] = {}
    for each in known:
        for (index, digest), inputs in zip(each.parts, each.account.inputs, strict=True):
            alike = found.setdefault((each.meaning, index, inputs), {})
            alike.setdefault(digest, {})[each.peer] = each
    for (_, part, _), sums in found.items():
        for digest, voices in sums.items():
            for other, wrong in sums.items():
                for peer, statement in wrong.items():
                    rest = [each for who, each in voices.items() if who != peer]
                    if other != digest and len(rest) > lying:
                        return Refuted(statement, part, tuple(rest[: lying + 1]))
    return None
