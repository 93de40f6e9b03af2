"""Adopting a branch: the certified entry that takes over what was done without a quorum. Pure
functions.

A branch of entry r is a log of its own, ``branch/...``; its tip is a state (anchor, momentum) and
the contributions of all its rounds. The entry r+1 that adopts it is an ordinary entry: its result
is the tip's state itself, 2 numel float32 values in one part, and its reducer names branch and
length. Whoever votes for it holds these bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from .. import messages as m
from ..group import Admitted, Config, Entry, Part
from ..identifiers import HASH_BYTES, PeerId
from .state import Shape

BRANCH = "branch/"
_ADOPTS = re.compile(r"branch/[0-9a-f]{32}/([1-9][0-9]{0,3})")


def branch_log(nonce: bytes) -> str:
    """The name of a branch's log; ``nonce`` has 16 bytes."""
    return BRANCH + nonce.hex()


def adopted_rounds(entry: Entry) -> int:
    """How many rounds of a branch an entry takes over; 0 where it adopts none."""
    found = _ADOPTS.fullmatch(entry.reducer)
    return int(found[1]) if found else 0


def rounds_in(entry: Entry) -> int:
    """How many rounds are in an entry: those of a branch that it adopts, else one, or none where
    nothing was contributed.
    """
    return adopted_rounds(entry) or int(bool(entry.contributors))


def samples_in(entry: Entry) -> int:
    """How many samples are in an entry: those of its contributions, of all rounds of a branch that
    it adopts.
    """
    return sum(contributor.weight for contributor in entry.contributors)


def adopts(entry: Entry, shape: Shape) -> bool:
    """Whether an entry adopts a branch of a log of this shape."""
    grid = (entry.numel, entry.chunk_elements, entry.codec) == (
        2 * shape.numel,
        shape.chunk_elements,
        "fp32",
    )
    chunks = -(-entry.numel // shape.chunk_elements)
    whole = [(part.first, part.stop) for part in entry.parts] == [(0, chunks)]
    cids = {c.cid for c in entry.contributors}
    return 0 < adopted_rounds(entry) <= len(cids) == len(entry.contributors) and grid and whole


def tip_entry(
    log: str,
    round_: int,
    tip: m.Tip,
    shape: Shape,
    *,
    base_state: bytes = bytes(HASH_BYTES),
    owner: PeerId | None = None,
    config: Config = (),
    admitted: tuple[Admitted, ...] = (),
    tally: bytes = b"",
) -> Entry:
    """An entry whose result is the tip's state. Without the last five it is no proposal: it only
    names the bytes.
    """
    chunks = -(-2 * shape.numel // shape.chunk_elements)
    part = Part(owner or PeerId("tip"), 0, chunks)
    return Entry(
        log,
        round_,
        tip.base,
        base_state,
        tip.contributors,
        (part,),
        (tip.digest,),
        2 * shape.numel,
        shape.chunk_elements,
        "fp32",
        f"{tip.log}/{tip.length}",
        config,
        admitted=admitted,
        tally=tally,
    )


def unproposed(entry: Entry) -> Entry:
    """The name that members of a branch have for the bytes of an entry that adopts it: `tip_entry`
    of its tip.
    """
    part = msgspec.structs.replace(entry.parts[0], owner=PeerId("tip"))
    return msgspec.structs.replace(
        entry,
        base_state=bytes(HASH_BYTES),
        parts=(part,),
        next_config=(),
        admitted=(),
        tally=b"",
    )


def best_tip(promises: Iterable[m.Promise | m.Sealed], base: bytes) -> m.Tip | None:
    """Of the branches whose base is the last certified entry itself, that with most samples; ties
    by name.
    """
    tips = [p.tip for p in promises if p.tip is not None and p.tip.base == base]
    return max(
        tips,
        key=lambda tip: (sum(c.weight for c in tip.contributors), tip.log, tip.length, tip.digest),
        default=None,
    )
