"""What the log of a run counts, however much its members claim."""

from __future__ import annotations

from atoll.collectives.group import Certified, Contributor, Entry, Member
from atoll.collectives.identifiers import PeerId
from atoll.collectives.round import MOST_SAMPLES, SPAN, Log

CLAIM = 1 << 48  # the most that a contribution can claim
MEMBERS = 512


def test_samples_that_members_claim_never_overflow_the_count() -> None:
    members = tuple(Member(PeerId(f"peer-{number:03}"), 0) for number in range(MEMBERS))
    all_of_them = tuple(Contributor(member, bytes(16), CLAIM) for member in members)
    kept = list[Certified]()
    log = Log(lambda first, stop: kept[first:stop])
    for number in range(3 * SPAN):
        contributors = all_of_them if number else ()
        zeros = bytes(32)
        entry = Entry(
            *("main", number, zeros, zeros, contributors, (), (), 4, 4, "fp32", "sum", members),
            elapsed_s=1.0,
        )
        kept.append(Certified(entry, ()))
        log.append(kept[-1])
    counted = [log.samples(number) for number in range(3 * SPAN)]
    assert counted == [min(MOST_SAMPLES, number * MEMBERS * CLAIM) for number in range(3 * SPAN)]
    assert MOST_SAMPLES < 3 * SPAN * MEMBERS * CLAIM
