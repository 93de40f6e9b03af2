"""RoundView: what the roles of a round (acceptor, convener, sealing) and its session's parts see of
the machine that owns the round, and the few things that they ask of it.

The roles own state of their own and stand below `machine.RoundMachine`, which creates them anew for
every round. They import this protocol, never the machine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from typing import Protocol

from .. import messages as m
from ..group import Admitted, Certified, Config, Contributor, Entry, Member, Plan
from ..identifiers import PeerId
from .blame import Blame
from .journal import Journal
from .routes import Disputes
from .sampling import Draw
from .state import OpenRound, RoundActions, Shape
from .timing import Timing


class RoundView(Protocol):
    """The open round of one log at one member. Attributes are for reading, unless said otherwise;
    the objects behind `open`, `journal`, `disputes` and `blamed` are changed by their own methods.
    """

    # ---- what the log is
    @property
    def run(self) -> str:
        """Id of the run."""
        ...

    @property
    def log(self) -> str:
        """Name of the log."""
        ...

    @property
    def me(self) -> Member:
        """This member, in its present life."""
        ...

    @property
    def organiser(self) -> PeerId | None:
        """The run's organiser; None: the log has none."""
        ...

    @property
    def shape(self) -> Shape:
        """What plans of this log have in common."""
        ...

    @property
    def timing(self) -> Timing:
        """How long things may take."""
        ...

    @property
    def actions(self) -> RoundActions:
        """What the machine asks of its surroundings."""
        ...

    @property
    def journal(self) -> Journal:
        """What must outlive the process."""
        ...

    @property
    def lying(self) -> int:
        """How many members may be Byzantine; 0: members crash, and nothing worse."""
        ...

    @property
    def merges(self) -> bool:
        """Whether an entry of this log may adopt a branch."""
        ...

    @property
    def unix_offset_s(self) -> float:
        """Wall clock minus ``now``, in seconds."""
        ...

    # ---- where the round stands
    @property
    def round(self) -> int:
        """Number of the open round: of the entry that is to be decided."""
        ...

    @property
    def base(self) -> bytes:
        """Hash of the entry before the open round's."""
        ...

    @property
    def slot(self) -> tuple[str, str, int, bytes]:
        """What signatures of the open round are bound to: run, log, round, base."""
        ...

    @property
    def root(self) -> bytes | None:
        """Merkle root of the state before the open round; None while it is being hashed."""
        ...

    @property
    def config(self) -> Config:
        """The acceptors of the open round."""
        ...

    @property
    def others(self) -> list[PeerId]:
        """The other members of the configuration."""
        ...

    @property
    def removed(self) -> Set[Member]:
        """Members that the organiser has removed: they never vote again."""
        ...

    @property
    def ballot(self) -> int:
        """The ballot that this member is in."""
        ...

    @property
    def open(self) -> OpenRound:
        """All that is volatile of the open round."""
        ...

    @property
    def draw(self) -> Draw:
        """Who was drawn to contribute."""
        ...

    @property
    def contribution(self) -> tuple[bytes, int, m.Reading] | None:
        """What is offered here: cid, weight and reading; None: nothing."""
        ...

    @property
    def leaving(self) -> bool:
        """Whether this member is about to leave."""
        ...

    def heard_leave(self, who: Member, leaves: bool) -> None:
        """A member has announced that it leaves, or that it does not."""
        ...

    @property
    def round_s(self) -> float | None:
        """How long rounds took of late, in seconds; None: not known yet."""
        ...

    @property
    def caught(self) -> Set[PeerId]:
        """Peers that are proved to be Byzantine."""
        ...

    @property
    def blamed(self) -> Blame:
        """Who held reductions up, over rounds."""
        ...

    @property
    def disputes(self) -> Disputes:
        """Peers that disagreed on a partial sum."""
        ...

    @property
    def stateless(self) -> bool:
        """Whether the state before the open round is lacking."""
        ...

    @property
    def is_member(self) -> bool:
        """Whether this member is in the configuration."""
        ...

    @property
    def may_act(self) -> bool:
        """Whether it may speak in the open round: it has asked what it may have forgotten."""
        ...

    @property
    def sealed(self) -> bool:
        """Whether the open round is sealed here: this member votes no more in it."""
        ...

    @property
    def takes_part(self) -> bool:
        """Whether this member is drawn to contribute."""
        ...

    @property
    def unasked(self) -> Set[PeerId]:
        """Peers whose answer this member waits for before it decides alone."""
        ...

    @property
    def tail(self) -> Certified:
        """The newest entry known, applied or not."""
        ...

    @property
    def engaged(self) -> bool:
        """Whether the open round is under way as far as this member knows."""
        ...

    @property
    def large(self) -> bool:
        """Whether the configuration is one with relays (`relays`)."""
        ...

    def is_far(self, ballot: int) -> bool:
        """Whether no honest member can have come to this ballot."""
        ...

    def next_conveners(self, rounds: int) -> list[PeerId]:
        """Who writes the entries of so many rounds from the open one on, if all goes well."""
        ...

    @property
    def relayed(self) -> bool:
        """Whether the round's news goes over relays (`relays`), as far as this member knows."""
        ...

    @property
    def hopeless(self) -> bool:
        """Whether too few of the drawn members can still contribute in time."""
        ...

    @property
    def gathering(self) -> bool:
        """Whether the round still waits for the contributions that its arrival policy wants."""
        ...

    # ---- what the machine judges
    def convener_of(self, ballot: int) -> Member:
        """Who owns a ballot of the open round."""
        ...

    def quorum(self, voters: Sequence[Member]) -> bool:
        """Whether these acceptors decide the open round."""
        ...

    def silent(self, member: Member) -> bool:
        """Whether nobody here need wait for a member: it is `lost`, or not listened to for now."""
        ...

    def lost(self, member: Member) -> bool:
        """Whether a member is not to be counted on: suspected, Byzantine, or it lives on anew."""
        ...

    def ended(self, member: Member) -> bool:
        """Whether its peer has spoken as a later incarnation: this one never votes again."""
        ...

    def heard(self, member: Member) -> bool:
        """Whether it spoke as this member, not only its peer."""
        ...

    def has_bytes(self, entry: Entry) -> bool:
        """Whether all result bytes of an entry are here."""
        ...

    def holds(self, now: float, entry: Entry, holders: Sequence[PeerId]) -> bool:
        """Whether an entry's bytes and the state before it are here; ``holders`` are asked."""
        ...

    def entry_fits(self, entry: Entry) -> bool:
        """Whether an entry continues the log in its open round."""
        ...

    def may_end(self, ballot: int, entry: Entry) -> bool:
        """Whether to vote for an entry that perhaps does nothing but end the round."""
        ...

    def may_vote(self, ballot: int, entry: Entry) -> bool:
        """Whether the session lets this member vote for an entry."""
        ...

    def offers(self) -> list[Contributor]:
        """Contributions that can be planned."""
        ...

    def offered(self) -> list[Contributor]:
        """Contributions that are there for the round, or for a later one."""
        ...

    def enough(self, offers: Sequence[Contributor]) -> bool:
        """Whether a plan of these may be made."""
        ...

    def my_ready(self) -> m.Ready | None:
        """What this member says of its contribution; None: nothing."""
        ...

    def ready_fits(self, ready: m.Ready) -> bool:
        """Whether a Ready belongs to the open round."""
        ...

    def joiners_to_admit(self, now: float) -> list[Member]:
        """Peers that ask this member to be let in, and that an entry may let in now."""
        ...

    def welcome(self, joiners: Sequence[Member]) -> list[Member]:
        """Those of ``joiners`` that an entry of this member's could let in."""
        ...

    def entering(self, config: Config) -> tuple[tuple[Admitted, ...], bytes]:
        """The certificates of newcomers to a configuration, and the hash of the tally after
        them.
        """
        ...

    def adoption(self, tip: m.Tip, config: Config) -> Entry:
        """The entry that adopts a branch."""
        ...

    def objection(self, entry: Entry) -> str:
        """What this member has against the new members of an entry; "": nothing."""
        ...

    def elapsed_s(self, now: float) -> float | None:
        """Seconds since the entry before; None where the log needs no time."""
        ...

    def stuck_s(self) -> float:
        """A reduction is stuck when no new chunk came for so long, in seconds."""
        ...

    def silent_s(self, pulls: float) -> float:
        """A source that sent nothing for so long is asked again, in seconds."""
        ...

    def silence_s(self, peers: Collection[PeerId]) -> float:
        """How long these peers may be silent though they live, in seconds."""
        ...

    def transfer_s(self, plan: Plan) -> float:
        """How long the transfers of a plan take, in seconds."""
        ...

    # ---- what roles ask of the machine
    def look(self, now: float) -> None:
        """Note whether the open round has the contributions that it waits for."""
        ...

    def progress(self, now: float) -> None:
        """Note that the round has come on."""
        ...

    def tell(self, peer: PeerId, body: m.Body) -> None:
        """Send within the open round."""
        ...

    def broadcast(self, body: m.Body) -> None:
        """Send to all of the configuration, this member last."""
        ...

    def fetch(self, now: float, peer: PeerId) -> None:
        """Ask a peer that seems to be ahead for what follows the newest entry known."""
        ...

    def enter(self, now: float, ballot: int, *, aside: bool = False) -> None:
        """Be in this ballot from now on."""
        ...

    def next_ballot(self, now: float, *, aside: bool = False) -> None:
        """Move on to the next ballot whose owner is not suspected."""
        ...

    def convene(self, now: float) -> None:
        """Let the convener go on: something that it waits for may have come."""
        ...

    def note_ready(self, who: Member, ready: m.Ready) -> None:
        """What a member contributes, as its Promise or Pledge tells."""
        ...

    def remember(self, entry: Entry) -> None:
        """An entry that the open round may decide: votes name it by its hash."""
        ...

    def await_bytes(self, now: float, ballot: int, entry: Entry, sender: PeerId) -> None:
        """The convener of a ballot proposes an entry: vote for it once its bytes are here."""
        ...

    def drop_reduced(self) -> None:
        """Nobody would vote for an entry that proposes the newest result."""
        ...

    def void_votes(self) -> None:
        """The open round is sealed: what those who are removed voted for, decides nothing."""
        ...

    def convict(self, who: Member) -> bool:
        """A member is proved to be Byzantine. Whether that is news, and of another."""
        ...

    def on_acceptor_message(self, now: float, who: Member, body: m.Body) -> None:
        """Prepare, Promise, Accept or Accepted, as acceptors that only crash take them."""
        ...

    def vote_pending(self, now: float) -> None:
        """Cast what is pending, if its bytes and the state before it are here."""
        ...

    def cast_vote(self, ballot: int, entry: Entry) -> None:
        """Persist a vote and send it; all bytes are here."""
        ...

    def send_vote(self, ballot: int, entry: Entry) -> None:
        """Send a vote that the journal has."""
        ...

    def repeat_votes(self, now: float) -> None:
        """Repair loss of votes, own and others'."""
        ...

    def count_vote(self, now: float, who: Member, body: m.Accepted) -> None:
        """A vote of an acceptor; a quorum of them under one ballot decides."""
        ...

    def learn(self, now: float, certified: Certified) -> None:
        """Take a verified certificate of the open round."""
        ...

    def drop_ahead(self, from_round: int) -> None:
        """Forget verified entries that are not applied, from this round on."""
        ...
