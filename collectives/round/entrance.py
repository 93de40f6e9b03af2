"""Who asks to enter a log, or to be counted in it, and whom the next entry may let in.

A convener states them in its entry, with what certificates say (`Doors`) and under which names
(`SiteNames`). Every acceptor judges that by the log before it votes (`Entrance.admits`), and by
what it knows beside (`Entrance.objection`). The whole life of this state is in this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..bounds import room_for
from ..group import Admitted, Config, Entry, Member, SpentWord
from ..identifiers import PeerId
from .entering import MOST_GUESTS, Doors, crowded
from .seals import gone
from .site_names import SiteNamesMaker, spent_payload

if TYPE_CHECKING:
    from .machine import RoundMachine

MAX_JOINERS = 1024  # remembered at a time: whoever is admitted to the run may ask


class Entrance:
    """Of one log at one member. ``doors``: what lets peers enter. ``names``: under which names
    their privacy is counted.
    """

    def __init__(self, view: RoundMachine, doors: Doors, names: SiteNamesMaker) -> None:
        self.view, self.doors = view, doors
        self.sites = names(view.journal.entries, doors.name)
        # Who asks to enter: at which round, when.
        self.joiners: dict[Member, tuple[int, float]] = {}
        self._guests: dict[PeerId, float] = {}  # who asks to be counted, and when it did last

    def open(self) -> None:
        """Another round opens: forget who is a member by now, or too far behind."""
        self.joiners = {
            who: seen
            for who, seen in self.joiners.items()
            if self._near(seen[0]) and who not in self.view.journal.entries.members
        }

    def tick(self, now: float) -> None:
        """Forget who asks no more to be counted."""
        if self._guests:
            self._guests = {
                peer: seen for peer, seen in self._guests.items() if self._asks(now, seen)
            }

    def _near(self, round_: int) -> bool:
        """Whether a joiner that holds the state before ``round_`` is close enough: results it lacks
        are still kept here.
        """
        return round_ >= self.view.round - self.view.timing.keep_rounds // 2

    def on_join(self, now: float, who: Member, round_: int, *, holds: bool) -> None:
        """A peer asks to be let in, under its newest incarnation: one that asked under many could
        keep others from being heard. One that has no state yet asks to be counted.
        """
        if not holds:
            if len(self._guests) < MAX_JOINERS and self._counts_one_more(who.peer):
                self._guests[who.peer] = now
            return
        lives = [other for other in self.joiners if other.peer == who.peer]
        if any(other.incarnation > who.incarnation for other in lives):
            return
        for other in lives:
            del self.joiners[other]
        if len(self.joiners) < MAX_JOINERS:
            self.joiners[who] = (round_, now)

    @property
    def asked(self) -> bool:
        """Whether somebody asks to be let in, and this member has something to do for it soon. In a
        large configuration that is the convener; others look whether it lives as often as ever.
        """
        large = self.view.dissemination.is_large
        if not (self.joiners or self._guests) or (
            large and self.view.convener_of(self.view.ballot) != self.view.me
        ):
            return False
        return bool(self._guests) or not self.view.journal.entries.members.issuperset(self.joiners)

    def to_admit(self, now: float) -> list[Member]:
        """Peers that ask this member to be let in, and that an entry may let in now."""
        asking = sorted(
            who
            for who, (round_, seen) in self.joiners.items()
            if self._near(round_)
            and self._asks(now, seen)
            and who not in self.view.journal.entries.members
            and not gone(who, self.view.removed)
        )
        return self.welcome(self.view.actions.let_in(asking)) if asking else []

    def welcome(self, joiners: Sequence[Member]) -> list[Member]:
        """Those of ``joiners`` that an entry of this member's could let in: their certificates are
        known here, their invites have a use left, and the run's plan and a message bear them. A new
        life of a member takes its place.
        """
        entries, found, new = self.view.journal.entries, list[Member](), self._new(joiners)
        inside, tally = {each.peer for each in self.view.config}, entries.tally
        by_one = dict[bytes, list[Admitted]]()  # by invite, of those that ask
        named = list[Admitted]()
        for joiner in joiners:
            if joiner.peer in new:
                warrant = self.doors.warrant(joiner.peer)
                if warrant is None:
                    continue
                same = [*by_one.get(warrant.invite, ()), warrant] if warrant.invite else []
                if same and crowded(entries.came, inside, same, self.view.shape.most):
                    continue
                after = tally.after([warrant])
                if after is None or self.sites.clashes(warrant, named):
                    continue
                named.append(warrant)
                tally, by_one[warrant.invite] = after, same
            found.append(joiner)
        fresh = [joiner for joiner in found if joiner.peer in new]
        late = set(fresh[room_for(self.view.config, fresh, self.view.shape.topology) :])
        return [joiner for joiner in found if joiner not in late]

    def guests(self, now: float, beside: Sequence[Admitted] = ()) -> list[Admitted]:
        """By what peers are counted that an entry does not make members, after those ``beside``
        them: they ask for it, and their invites have a use left.
        """
        found, tally = list[Admitted](), self.view.journal.entries.tally.after(beside)
        named = {each.peer for each in beside}
        for peer, seen in sorted(self._guests.items()):
            guest = self.doors.guest(peer) if self._asks(now, seen) else None
            if tally is None or guest is None or peer in named or len(found) == MOST_GUESTS:
                continue
            after = None if tally.counts(peer) else tally.after([guest])
            if after is not None:
                tally = after
                found.append(guest)
        return found

    def _counts_one_more(self, peer: PeerId) -> bool:
        guest, tally = self.doors.guest(peer), self.view.journal.entries.tally
        return guest is not None and not tally.counts(peer) and tally.after([guest]) is not None

    def _asks(self, now: float, seen: float) -> bool:
        """Whether who asked to be let in or counted at ``seen`` still does."""
        return now - seen < max(1.0, 4 * self.view.timing.fetch_s)

    def stated(self, now: float, config: Config) -> tuple[tuple[Admitted, ...], bytes]:
        """What an entry with this next configuration states of its new members and of those that
        are only counted, and the hash of the tally after it.
        """
        warrants = [self.doors.warrant(peer) for peer in sorted(self._new(config))]
        admitted = [each for each in warrants if each is not None and each.certificate]
        admitted += self.guests(now, admitted)
        admitted.sort(key=lambda each: each.peer)
        tally = self.view.journal.entries.tally
        return tuple(admitted), (tally.after(admitted) or tally).hash

    def retired_by(self, joiners: Sequence[Member]) -> set[PeerId]:
        """Whose names these have, who would enter."""
        warrants = [self.doors.warrant(peer) for peer in self._new(joiners)]
        return self.sites.retires([each for each in warrants if each is not None])

    def spent_words(self) -> tuple[SpentWord, ...]:
        """What an entry of this member's says of sites that may spend no more."""
        return self.sites.news([word for word in self.sites.heard() if self._said(word)])

    @property
    def ends_by_words(self) -> bool:
        """Whether an entry would end the run by what sites have said of themselves."""
        return self.sites.ends(self.spent_words())

    def _said(self, word: SpentWord) -> bool:
        payload = spent_payload(self.view.run, word.peer)
        return self.view.actions.verify(word.peer, payload, word.signature)

    def objection(self, entry: Entry) -> str:
        """What this member has against the new members of an entry and those that it counts, as far
        as it knows; others may know otherwise.
        """
        new = self._new(entry.next_config)
        return self.doors.objection(new, entry.admitted) if new or entry.admitted else ""

    def admits(self, entry: Entry) -> bool:
        """Whether an entry proves that its new members and guests may enter, and counts them: the
        same at every member.
        """
        new, before = self._new(entry.next_config), self.view.journal.entries.tally
        after = before.after(entry.admitted)
        named = [each.peer for each in entry.admitted]
        members = [each for each in entry.admitted if each.peer in new]
        return (
            after is not None
            and entry.tally == after.hash
            and named == sorted({*named})
            and len(named) <= len(members) + MOST_GUESTS
            and not any(before.counts(peer) for peer in {*named} - new)
            and not crowded(
                self.view.journal.entries.came,
                [each.peer for each in entry.next_config],
                members,
                self.view.shape.most,
            )
            and self.doors.valid(new, entry.admitted)
            and self.sites.fits(entry)
            and all(map(self._said, entry.spent))
        )

    def _new(self, config: Sequence[Member]) -> set[PeerId]:
        return {member.peer for member in config} - {member.peer for member in self.view.config}
