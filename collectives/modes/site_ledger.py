"""Which names the sites of a run with noise have, under which keys, and what each may have spent:
by the log alone, so the same at every member. Sans I/O.

**Names.** What a site has spent of its privacy is bound to its name, which the organiser's invite
says (`Doors.name`); the name of a member that needs no invite is its peer id. A name has one key at
a time: the entry that lets in another key under it leaves the one before out, and that never comes
back. A key has one name for ever. So no sum holds a site's data twice.

**What a lost disk cost.** A site hands over one masked vector an entry at most
(`node.modes.secure`). So the entries decided while a life of a name was asked to contribute bound
how many it gave. Its next life begins at that number at least (`before`): under another key, with
another incarnation, or as a member anew, since nobody can tell then whether it has its disk. A key
that is not inside yet says so, too: also where the run is over, and it never will be.

**The end.** Who may spend no more says so, signed (`SpentWord`). Entries carry these words. Once
fewer sites than a sum needs are left that have not said it, the run is over (`over`): that follows
from the log, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..group import Admitted, Config, Entry, Member, SpentWord
from ..identifiers import PeerId
from ..round.sampling import draw_members
from ..round.site_names import SiteNames
from ..round_settings import SampleSettings

if TYPE_CHECKING:
    from ..round.log import Log

MOST_KEYS = 64
"""Of one name, one after another: then nobody enters under it any more."""
MOST_NAMES = 4096


@dataclass(frozen=True)
class SiteLife:
    """A name's newest life. ``entries``: decided while any life of the name was asked;
    ``before``: those before this life. ``keys``: all that the name has had. ``spent``: one has said
    that it may spend no more.
    """

    member: Member
    keys: tuple[PeerId, ...]
    before: int = 0
    entries: int = 0
    spent: bool = False


class SiteLedger(SiteNames):
    """Of one log. ``name(admitted)``: what a certificate says, "" for nothing. ``fewest``: how many
    sites a sum needs; 0: this run counts nothing, and everything here is empty. ``heard``: what
    members have said of themselves.
    """

    def __init__(
        self,
        entries: Log,
        *,
        run: str,
        fewest: int,
        sample: SampleSettings | None,
        name: Callable[[Admitted], str],
        heard: Callable[[], Sequence[SpentWord]] = tuple,
    ) -> None:
        self._log, self._run, self.fewest = entries, run, fewest
        self._sample, self._name, self._heard = sample, name, heard
        self._lives: dict[str, SiteLife] = {}
        self._names: dict[PeerId, str] = {}
        self._config: Config = ()
        self._read = 0
        self._over = ""

    # ---- views
    def heard(self) -> Sequence[SpentWord]:
        return self._heard()

    @property
    def lives(self) -> dict[str, SiteLife]:
        """By name, after the newest entry."""
        self._catch_up()
        return self._lives

    @property
    def over(self) -> str:
        """Why no more sums can be, as an entry has decided; "" while they can."""
        self._catch_up()
        return self._over

    def name_of(self, peer: PeerId) -> str:
        """What a member is or was called."""
        self._catch_up()
        return self._names.get(peer, str(peer))

    def before(self, member: Member, shown: bytes = b"") -> int:
        """How many vectors earlier lives of this member's name may have given. ``shown``: by what
        it would enter. Of one that is not inside yet it is as many as when it enters now.
        """
        lives, peer = self.lives, member.peer
        name = self._names.get(peer) or self._called(Admitted(peer, shown))
        if (life := lives.get(name)) is None:
            return 0
        return life.before if life.member == member else life.entries

    def retired(self, peer: PeerId) -> bool:
        """Whether another key has taken the name of this one."""
        life = self.lives.get(self.name_of(peer))
        return life is not None and life.member.peer != peer

    # ---- entering
    def clashes(self, admitted: Admitted, beside: Collection[Admitted] = ()) -> bool:
        """Whether a peer may not enter by this: its name is another's among those ``beside``, it
        has another name, or its key has been retired.
        """
        if not self.fewest:
            return False
        self._catch_up()
        name, peer = self._called(admitted), admitted.peer
        life = self._lives.get(name)
        return (
            self._names.get(peer, name) != name
            or any(self._called(each) == name for each in beside)
            or (life is not None and peer in life.keys[:-1])
            or (life is not None and peer not in life.keys and len(life.keys) >= MOST_KEYS)
            or (life is None and len(self._lives) >= MOST_NAMES)
        )

    def retires(self, admitted: Collection[Admitted]) -> set[PeerId]:
        """Whose names these take."""
        if not self.fewest:
            return set()
        lives = self.lives
        found = {each.peer: lives.get(self._called(each)) for each in admitted}
        return {
            life.member.peer
            for peer, life in found.items()
            if life is not None and life.member.peer != peer
        }

    def fits(self, entry: Entry) -> bool:
        """Whether nobody is in the next configuration under another's name, and the words in an
        entry are news of members; their signatures are looked at elsewhere.
        """
        if not self.fewest:
            return not entry.spent
        inside = {member.peer for member in entry.next_config}
        members = [each for each in entry.admitted if each.peer in inside]
        said = [word.peer for word in entry.spent]
        current = {member.peer for member in self._log.config}
        return (
            not any(self.clashes(each, members[:at]) for at, each in enumerate(members))
            and not self.retires(members) & inside
            and said == sorted({*said})
            and {*said} <= current
            and not any(self.lives[self.name_of(peer)].spent for peer in said)
        )

    # ---- the end
    def news(self, words: Sequence[SpentWord]) -> tuple[SpentWord, ...]:
        """Those of members that no entry has yet, in the order of an entry."""
        if not self.fewest:
            return ()
        current, lives = {member.peer for member in self._log.config}, self.lives
        found = {
            word.peer: word
            for word in words
            if word.peer in current and not lives[self.name_of(word.peer)].spent
        }
        return tuple(found[peer] for peer in sorted(found))

    def ends(self, words: Sequence[SpentWord]) -> bool:
        """Whether an entry with these would end the run."""
        news = {self.name_of(word.peer) for word in self.news(words)}
        if not news or self.over:
            return False
        left = [name for name, life in self.lives.items() if not life.spent and name not in news]
        return len(left) < self.fewest

    # ---- the log
    def _called(self, admitted: Admitted) -> str:
        return self._name(admitted) or str(admitted.peer)

    def _catch_up(self) -> None:
        if self.fewest and self._read < len(self._log):
            for certified in self._log.since(self._read):
                self._read += 1
                self._add(certified.entry)

    def _add(self, entry: Entry) -> None:
        lives = self._lives
        if entry.round:
            for member in draw_members(self._run, entry.base, self._config, self._sample):
                name = self._names[member.peer]
                lives[name] = replace(lives[name], entries=lives[name].entries + 1)
        for word in entry.spent:
            name = self._names[word.peer]
            lives[name] = replace(lives[name], spent=True)
        named = {each.peer: self._called(each) for each in entry.admitted}
        before = {member.peer for member in self._config}
        for member in entry.next_config:
            peer = member.peer
            name = self._names.setdefault(peer, named.get(peer, str(peer)))
            life = lives.get(name)
            if life is None:
                lives[name] = SiteLife(member, (peer,))
            elif life.member != member or peer not in before:
                keys = life.keys if peer in life.keys else (*life.keys, peer)
                lives[name] = replace(life, member=member, keys=keys, before=life.entries)
        self._config = entry.next_config
        spent = sum(life.spent for life in lives.values())
        if spent and len(lives) - spent < self.fewest and not self._over:
            self._over = (
                f"{spent} of {len(lives)} sites have spent the epsilon that they may, and a round "
                f"needs {self.fewest}"
            )
