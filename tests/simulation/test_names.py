"""What a site has spent of its privacy is bound to its name, whatever keys and disks it has had.

In virtual time, by real masked sums; certificates are the toys of `doors_kit`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from doors_kit import read, toy, toy_doors
from secure_kit import SECURE
from session_table import LIMIT_S, Peer, Table

from atoll.collectives.errors import NotAdmittedError
from atoll.collectives.group import Admitted, Certified, Entry, Member, SpentWord
from atoll.collectives.identifiers import PeerId, RunId
from atoll.collectives.modes.site_ledger import SiteLedger
from atoll.collectives.round.journal import MemoryJournal
from atoll.collectives.round_settings import SampleSettings
from atoll.collectives.swarm import PrivacySettings
from atoll.node.run.banning import Bans
from atoll.node.run.capability import Role
from atoll.node.run.doors import right_of
from atoll.node.run.gate import Gate
from atoll.node.run.inner_doors import doors_of
from atoll.node.run.invite import make_invite
from atoll.node.session import events as ev
from atoll.node.session.memory_storage import MemoryStorage
from atoll.node.session.mode_events import PrivacySpent
from atoll.security.identity import Identity
from atoll.security.privacy.budget import most_rounds

TERMS = PrivacySettings(noise=3.0, clip=1.0, delta=1e-5, stop_at_epsilon=8.0)


class Clinics:
    """Four sites that train on, and others who hold an invite for the name of the second."""

    def __init__(self, others: int = 1, terms: PrivacySettings = TERMS) -> None:
        self.table = Table(4 + others, msgspec.structs.replace(SECURE, privacy=terms))
        names = [peer.name for peer in self.table.peers]
        called = {1: "b", 2: "c", 3: "d"} | {4 + index: "b" for index in range(others)}
        shown = {
            str(names[index]): toy(names[index], b"invite-%d" % index, name=name)
            for index, name in called.items()
        }
        self.table.place.doors = lambda peer: toy_doors(
            names[0], lambda: self.table.world.now, dict(shown), named=True
        )
        self.first = self.table.found()
        self.peers = self.table.peers
        self.offered = 0
        self.read: dict[tuple[PeerId, int], int] = {}
        for peer in self.peers[1:4]:
            peer.start().attach()
        self.table.until(lambda: len(self.first.session.config_peers()) == 4)
        for peer in self.peers[:4]:
            self.offer(peer)

    def offer(self, peer: Peer) -> None:
        self.offered += 1
        peer.contribute(f"{self.offered}", self.offered / 64)

    def step(self) -> None:
        """Each that is told what became of its vector offers another, as a script does."""
        for peer in self.peers:
            at = self.read.setdefault((peer.name, peer.lives), len(peer.heard))
            for event in peer.heard[at:]:
                over = isinstance(event, ev.ContributionRefused) and event.over
                again = isinstance(event, ev.RoundCommitted) and event.cid is not None
                refused = isinstance(event, ev.ContributionRefused) and not over
                fresh = isinstance(event, ev.StateReady)
                if peer.node is not None and (again or refused or fresh):
                    self.offer(peer)
            self.read[peer.name, peer.lives] = len(peer.heard)
        rosters = [
            [site.name_of(member.peer) for member in peer.machine.config]
            for peer in self.peers
            if peer.node is not None and peer.session.machine is not None
            for site in [peer.machine.entrance.sites]
        ]
        assert all(len(roster) == len({*roster}) for roster in rosters)

    def until(self, what: Callable[[], bool]) -> None:
        def look() -> bool:
            self.step()
            return what()

        world = self.table.world
        assert world.run(until=world.now + LIMIT_S, stop=look)

    def rounds(self, more: int) -> None:
        goal = self.first.session.completed + more
        self.until(lambda: self.first.session.completed >= goal)


def spent(peer: Peer) -> int:
    return peer.storage.spent.noisy()


def test_a_fresh_key_under_a_name_begins_where_the_old_ones_may_have_been() -> None:
    clinics = Clinics()
    clinics.rounds(3)
    old, new = clinics.peers[1], clinics.peers[4]
    old.kill()
    given = spent(old)
    assert given >= 3
    new.start().attach()
    clinics.until(lambda: new.inside)
    assert old.name not in clinics.first.session.config_peers()
    clinics.rounds(2)
    handed = sum(isinstance(event, PrivacySpent) for event in new.heard)
    assert handed >= 2
    assert spent(new) >= given + handed
    told = [event for event in new.heard if isinstance(event, PrivacySpent)]
    assert told[-1].steps == spent(new)
    clinics.table.end()


def test_the_old_key_never_comes_back_and_is_told_why() -> None:
    clinics = Clinics()
    clinics.rounds(1)
    old, new = clinics.peers[1], clinics.peers[4]
    new.start().attach()  # beside the old one, which is alive
    clinics.until(lambda: new.inside)
    clinics.rounds(2)
    assert old.name not in clinics.first.session.config_peers()
    clinics.until(
        lambda: any(
            isinstance(event, ev.ContributionRefused) and "another key has the name" in event.over
            for event in old.heard
        )
    )
    old.kill()
    old.start().attach()
    clinics.rounds(2)
    clinics.table.wait(20)
    assert old.name not in clinics.first.session.config_peers()
    assert new.name in clinics.first.session.config_peers()
    clinics.table.end()


def test_a_key_that_lost_its_disk_counts_all_that_it_may_have_given() -> None:
    clinics = Clinics()
    clinics.rounds(3)
    site = clinics.peers[1]
    given = spent(site)
    site.kill()
    site.storage = MemoryStorage(clinics.table.place.settings.outer, incarnation=1)
    assert spent(site) == 0
    site.start().attach()
    clinics.until(lambda: site.inside and site.machine.me.incarnation == 1)
    clinics.rounds(2)
    handed = sum(isinstance(event, PrivacySpent) for event in site.heard)
    assert spent(site) >= handed >= given + 2
    clinics.table.end()


def test_keys_that_come_one_after_another_do_not_outlive_the_budget_of_their_name() -> None:
    terms = msgspec.structs.replace(TERMS, stop_at_epsilon=4.0)
    allowed = most_rounds(terms)
    clinics = Clinics(others=3, terms=terms)
    lives = [clinics.peers[1], *clinics.peers[4:]]
    for before, after in pairwise(lives):
        clinics.rounds(1)
        before.kill()
        after.start().attach()
        clinics.until(lambda after=after: after.inside)
    clinics.until(
        lambda: any(
            isinstance(event, ev.ContributionRefused) and event.over for event in lives[-1].heard
        )
    )
    handed = sum(isinstance(event, PrivacySpent) for peer in lives for event in peer.heard)
    assert 3 <= handed <= allowed
    clinics.table.end()


# ---- the ledger by itself
A, B, C, D = (PeerId(name) for name in "abcd")


def admitted(peer: PeerId, name: str) -> Admitted:
    right = read(peer, toy(peer, name.encode(), name=name))
    assert right is not None
    return right.admitted


class Book:
    """A log written by hand."""

    def __init__(self, sample: SampleSettings | None = None) -> None:
        self.journal = MemoryJournal()
        self.sites = SiteLedger(
            self.journal.entries, run="r", fewest=3, sample=sample, name=self.name
        )

    @staticmethod
    def name(each: Admitted) -> str:
        right = read(each.peer, each.certificate)
        return right.name if right is not None else ""

    def entry(
        self, *members: Member, by: tuple[Admitted, ...] = (), spent: tuple[PeerId, ...] = ()
    ) -> Entry:
        words = tuple(SpentWord(peer, b"") for peer in spent)
        return Entry(
            *("log", len(self.journal.entries), bytes(32), bytes(32), (), (), ()),
            *(8, 8, "bits", "copy", tuple(sorted(members))),
            admitted=by,
            spent=words,
        )

    def add(self, entry: Entry) -> None:
        self.journal.append(Certified(entry, ()))


def test_a_name_is_in_no_roster_twice_and_a_key_has_one_name() -> None:
    book, a, b, c = Book(), Member(A, 0), Member(B, 0), Member(C, 0)
    book.add(book.entry(a))
    by_b = admitted(B, "clinic")
    book.add(book.entry(a, b, by=(by_b,)))
    taken = admitted(C, "clinic")
    assert not book.sites.fits(book.entry(a, b, c, by=(taken,)))  # both at once
    assert book.sites.fits(book.entry(a, c, by=(taken,)))
    two = (admitted(C, "other"), admitted(D, "other"))
    assert not book.sites.fits(book.entry(a, b, c, Member(D, 0), by=two))
    book.add(book.entry(a, c, by=(taken,)))
    assert book.sites.retired(B)
    assert book.sites.clashes(by_b)  # it does not come back
    assert book.sites.clashes(admitted(C, "another"))  # nor gets another name
    assert not book.sites.fits(book.entry(a, b, by=(by_b,)))


def test_the_log_bounds_what_each_name_may_have_given() -> None:
    book, a, b = Book(), Member(A, 0), Member(B, 0)
    book.add(book.entry(a))
    book.add(book.entry(a, b, by=(admitted(B, "clinic"),)))
    for _ in range(4):
        book.add(book.entry(a, b))
    assert book.sites.before(b) == 0
    comes = Member(C, 0)  # under the name, and not inside yet
    assert book.sites.before(comes, admitted(C, "clinic").certificate) == 4
    assert book.sites.before(comes, admitted(C, "another").certificate) == 0
    later = Member(B, 7)
    book.add(book.entry(a, later))
    assert book.sites.before(later) == 5
    for _ in range(2):
        book.add(book.entry(a, later))
    other = Member(C, 0)
    book.add(book.entry(a, other, by=(admitted(C, "clinic"),)))
    assert book.sites.before(other) == 8
    assert book.sites.before(a) == 0
    book.add(book.entry(a))
    book.add(book.entry(a, other, by=(admitted(C, "clinic"),)))  # with its disk, or without?
    assert book.sites.before(other) == 9


def test_of_a_sample_only_rounds_count_for_which_a_site_was_drawn() -> None:
    book, a, b = Book(SampleSettings(count=1)), Member(A, 0), Member(B, 0)
    book.add(book.entry(a))
    book.add(book.entry(a, b, by=(admitted(B, "clinic"),)))
    for _ in range(4):
        book.add(book.entry(a, b))
    drawn = {name: life.entries for name, life in book.sites.lives.items()}
    assert sum(drawn.values()) == 5
    assert sorted(drawn) == ["a", "clinic"]


@pytest.mark.parametrize("silent", [False, True])
def test_an_entry_ends_the_run_once_too_few_sites_are_left(silent: bool) -> None:
    """Who has left with budget counts as one that could come back."""
    book = Book()
    members = [Member(peer, 0) for peer in (A, B, C, D)]
    by = tuple(admitted(peer, peer * 2) for peer in (B, C, D))
    book.add(book.entry(members[0]))
    book.add(book.entry(*members, by=by))
    if silent:
        book.add(book.entry(*members[:3]))
    words = [SpentWord(A, b""), SpentWord(B, b"")]
    assert not book.sites.ends(words[:1])
    assert book.sites.ends(words)
    book.add(book.entry(*members[:3], spent=(A,)))
    assert not book.sites.over
    assert not book.sites.fits(book.entry(*members[:3], spent=(A,)))  # it is no news
    assert not book.sites.fits(book.entry(*members[:3], spent=(PeerId("z"),)))
    book.add(book.entry(*members[:3], spent=(B,)))
    assert book.sites.over.startswith("2 of 4 sites have spent the epsilon that they may")


# ---- the gate, by real certificates
def test_a_private_run_lets_nobody_in_by_an_invite_without_a_name(tmp_path: Path) -> None:
    run = RunId("abcdefghijklmnopqrstuvwxyz")
    organiser, site, helper = (Identity(letter * 32) for letter in (b"o", b"s", b"h"))
    bans = Bans(tmp_path, run, organiser.peer)
    gate = Gate(run, organiser.peer, bans, lambda: [organiser.peer])
    gate.policy, gate.named = "invite", True
    doors = doors_of(gate, lambda: 1000.0)
    assert doors.named

    def shown(who: Identity, name: str, role: Role = "train") -> bytes:
        made = make_invite(run, [], organiser, now_s=1000, role=role, name=name)
        return made.certify(who, 1000).encode()

    plain, named = shown(site, ""), shown(site, "clinic-a")
    with pytest.raises(NotAdmittedError, match="for no name"):
        gate.admit(site.peer, plain, 1000)
    doors.note(site.peer, plain)
    assert doors.warrant(site.peer) is None
    assert gate.admit(site.peer, named, 1000) is not None
    doors.note(site.peer, named)
    entering = doors.warrant(site.peer)
    assert entering is not None
    assert doors.name(entering) == "clinic-a"
    assert doors.valid([site.peer], [entering])
    without = right_of(gate.recognise(site.peer, plain)).admitted  # pyright: ignore[reportArgumentType]
    assert not doors.valid([site.peer], [without])  # whatever a convener says
    assert gate.admit(helper.peer, shown(helper, "", "observe"), 1000) is not None
