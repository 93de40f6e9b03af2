"""One run at one member: membership, the log, the data plane and the state, tied together. Sans
I/O.

Inputs carry ``now`` in seconds; outputs go through `SessionPorts`. The node drives it with sockets
and threads, the simulator in virtual time; the code is the same. A member is in one of four phases:
"seeking" (no genesis known), "fetching" (entries known, state on its way), "running", and "left".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from random import Random
from typing import Any, Literal, get_args

from torch import Tensor

from ...collectives import exchange as x
from ...collectives import messages as m
from ...collectives.codecs.codec import chunk_elements
from ...collectives.codecs.encoded import why_refused
from ...collectives.digest import merkle_root
from ...collectives.errors import (
    BadSignatureError,
    LocalProtocolError,
    OutOfDateError,
    RemoteProtocolError,
)
from ...collectives.group import NO_READING, Certified, Entry, Member, Plan, Reading
from ...collectives.identifiers import PeerId
from ...collectives.layout import Layout
from ...collectives.outcomes import Tally
from ...collectives.round import (
    MOST_SAMPLES,
    RoundMachine,
    check_genesis,
    everybody,
    gone,
    rounds_in,
    samples_in,
)
from ...collectives.round.log import RECENT
from ...optim.outer.reported import median_lag
from ..run.membership import Membership
from ..run.membership import MembershipTiming as MembershipTiming
from . import events as ev
from .actions import LogActions, main_log
from .admission import Admission
from .beginning import check_model, make_genesis, replay
from .budgets import PeerUsage
from .checkpoints import Checkpoints
from .contribution_queue import ContributionQueue
from .installing import Installing
from .other_logs import is_operation
from .peer_selection import PeerSelection
from .ports import SessionPorts
from .pre_round import NO_SPENDING, NO_WORK, PreRound, ScriptWork, Spending
from .prior_contributions import PriorContributions
from .replica import ModelReplica
from .serving import Serving
from .shapes import shape_of, witnesses_of
from .tallies import newest_readings, shares_of, tallies
from .terms import SessionTerms
from .transfer import Transfer

MEMBERSHIP, ROUND = b"M", b"R"
MAX_CONTACTS = 256
UNCOUNTED_SAY = m.Fetch, m.Join, m.Catch, m.Offer, m.Gone
"""What is listened to of a peer that no entry counts yet: it gives it nothing but the log."""
# What a message is in its sender's budget.
KINDS: dict[type, str] = {kind: str(kind.__struct_config__.tag) for kind in get_args(m.Body)}
GET = KINDS[m.Get]
OF_SPANS = frozenset(KINDS[kind] for kind in (m.Get, m.Need, m.Missing))
"""Messages that cost what they are long."""
CHUNKLESS = m.outline(m.encode(m.Envelope("", 0, 0, m.Get(bytes(32), ()))), PeerId("")).nbytes
"""Bytes of a Get that asks for hashes."""
RESTING_PULLS = 4  # a member that rests looks once in so many pulls
Phase = Literal["seeking", "fetching", "running", "left"]


class Session:
    """State machine of one run at one member."""

    def __init__(
        self,
        terms: SessionTerms,
        *,
        ports: SessionPorts,
        rng: Random,
        now: float,
        log: str = "",
        membership: Membership | None = None,
        budgets: PeerUsage | None = None,
    ) -> None:
        """``log`` and ``membership``: of a fragment, whose run has others, with the same one.
        ``budgets``: of the run's peers; fragments have the same. Raises LocalProtocolError for a
        run that asks for a mode that is not among its own.
        """
        self.terms = terms
        settings, modes = terms.settings, terms.modes
        self.run, self.me, self.organiser = terms.run, terms.me, terms.organiser
        self.settings = settings
        self.ports = ports
        self.rng = rng
        self.log = log or main_log(self.run)
        self.doors = terms.doors
        # Members that may lie, and masked rounds, go by others' votes: each must hear them all.
        goes_by_votes = bool(settings.lying) or modes.pre_round is not None
        told = everybody if goes_by_votes else modes.log.dissemination
        self.modes = replace(modes, log=replace(modes.log, dissemination=told))
        self.timing, self.seeding = terms.timing, terms.seeding
        self.membership = membership or self._make_membership()
        self._unix_offset_s = terms.unix_offset_s
        self._follows = membership is not None  # another session speaks for the peer
        self.budgets = budgets or PeerUsage()
        self.sessions = [self]  # of a run in fragments there are several
        self.machine: RoundMachine | None = None
        self.replica: ModelReplica | None = None
        self.actions = LogActions(self, modes.proofs(self))
        self.transfer = Transfer(
            self.actions, self.organiser, self.timing, rng, settings.lying, modes.race
        )
        self.serving = Serving(self)
        self.operations = modes.operations(self)
        self.prior = PriorContributions(self)
        self.retaining = modes.retention(self)
        self.checkpoints = Checkpoints(self, terms.checkpoint_every)
        self.admission = Admission(self, self.retaining, terms.probation, terms.per_hour)
        self.others = PeerSelection(self, self.admission)
        self.measures = modes.measures(settings.reducer)
        self._unrecorded: Entry | None = None  # applied, but the disk was full
        self.left = self.doubled = False
        self.began_at = now
        self.script: Layout | None = None  # layout of the attached script, if any
        self.loop: deque[m.Envelope] = deque()  # messages to oneself
        self.queue = ContributionQueue(self)
        self.contacts: list[PeerId] = []
        self._config_of: Certified | None = None
        self._config_peers = dict[PeerId, int]()  # incarnations by peer
        self._draining = False
        self._asked_at = self._ticked_at = -1e9
        self._now = now
        self.installing = Installing(self)
        self.histories = modes.histories(self)
        self.recertifying = modes.recertifying(self)
        self.waits = modes.waits(self, now)
        modes.check(settings)
        make = modes.pre_round
        self.pre_round: PreRound | None = make(self) if make else None

    def _make_membership(self) -> Membership:
        watch = MembershipTiming(
            beat_s=self.timing.heartbeat_s,
            detect_s=self.timing.detect_s,
            sparse_above=self.timing.sparse_above,
        )
        return Membership(
            self.me,
            self.run,
            sign=self.ports.sign,
            verify=self.ports.verify,
            rng=self.rng,
            timing=watch,
            unix_offset_s=self.terms.unix_offset_s,
        )

    # ---- views
    @property
    def phase(self) -> Phase:
        """Where this member stands."""
        if self.left:
            return "left"
        if self.machine is None:
            return "seeking"
        return "fetching" if self.machine.stateless else "running"

    @property
    def round(self) -> int:
        """Number of applied entries after the genesis: the entry whose anchor is current; -1 before
        there is a state.
        """
        return self.machine.round - 1 if self.machine and not self.machine.stateless else -1

    def rounds(self, entry: int) -> int:
        """How many rounds are in the state after log entry ``entry``: entries with contributors;
        the others only change the configuration.

        Scripts and people count rounds, the log its entries; a run ends by rounds.
        """
        if self.machine is None:
            return 0
        ahead = map(rounds_in, self._ahead(self.machine, entry))
        return self.machine.journal.entries.rounds(entry) + sum(ahead)

    def samples(self, entry: int) -> int:
        """How many samples were contributed to the state after log entry ``entry``."""
        if self.machine is None:
            return 0
        ahead = map(samples_in, self._ahead(self.machine, entry))
        return min(MOST_SAMPLES, self.machine.journal.entries.samples(entry) + sum(ahead))

    @staticmethod
    def _ahead(machine: RoundMachine, entry: int) -> list[Entry]:
        applied, frontier = len(machine.journal.entries), machine.frontier
        return [each.entry for each in frontier if applied <= each.entry.round <= entry]

    @property
    def completed(self) -> int:
        """Rounds in the current anchor; -1 before there is a state."""
        return self.rounds(self.round) if self.round >= 0 else -1

    @property
    def removed(self) -> bool:
        """Whether this member's present life was removed from the run."""
        return self.machine is not None and gone(self.machine.me, self.machine.removed)

    @property
    def installs(self) -> bool:
        """Whether a fetched state is being installed: nothing may be applied meanwhile."""
        return self.installing.under_way

    def find(self, name: bytes) -> tuple[Entry, memoryview] | None:
        """An entry of any log here by its hash, with its result bytes, if both are here."""
        if self.machine is None:
            return None
        return self.serving.find(name) or self.operations.find(name)

    @property
    def spending(self) -> Spending:
        return NO_SPENDING if self.pre_round is None else self.pre_round.spending

    @property
    def work(self) -> ScriptWork:
        return NO_WORK if self.pre_round is None else self.pre_round.work

    # ---- what the log says to scripts
    def tallies(self, first: int) -> list[Tally]:
        """Who was counted in the applied entries from number ``first`` on, as many as are told at
        once. Raises StorageError.
        """
        return [] if self.machine is None else tallies(self.machine.journal.entries, first)

    def readings(self, entry: int) -> list[Reading]:
        """What contributors say of the newest round in the state after log entry ``entry``."""
        machine = self.machine
        if machine is None:
            return []
        return newest_readings(machine.journal.entries, machine.frontier, entry)

    def lag(self, entry: int) -> float:
        """How many inner steps that round took to be decided: the median of what its contributors
        say, 0 where none does.
        """
        return median_lag(self.readings(entry))

    @property
    def steps(self) -> int:
        """How many inner steps this member's script makes now, where each member has its number
        (`AnchorView.steps`).
        """
        return 0 if self.machine is None else self.machine.steps

    @property
    def over(self) -> str:
        """Why the run is finished here before its last round; "" where it is not."""
        rounds = self.settings.rounds
        whole = rounds is not None and self.completed >= rounds  # the last may use up a budget
        return "" if whole else self.spending.over

    def at_work(self, now: float) -> list[PeerId]:
        """Whom the open round of a run of sites still waits for: their work is not done, or they
        are not heard."""
        machine = self.machine
        if not self.settings.by_work or machine is None or machine.stateless:
            return []
        if self.pre_round is not None:
            return list(self.pre_round.look(now).at_work)
        return [who.peer for who in machine.at_work(now)] if machine.open.plan is None else []

    def clock(self) -> float:
        """The time of the input being handled."""
        return self._now

    def config_peers(self) -> list[PeerId]:
        """The members of the newest configuration known."""
        return list(self._newest_config())

    def in_config(self, peer: PeerId) -> bool:
        """Whether a peer is a member of the newest configuration known."""
        return peer in self._newest_config()

    def _newest_config(self) -> Mapping[PeerId, int]:
        if self.machine is None:
            return {}
        newest = self.machine.tail
        if self._config_of is not newest:  # asked for with every message
            self._config_of = newest
            self._config_peers = {
                member.peer: member.incarnation for member in newest.entry.next_config
            }
        return self._config_peers

    # ---- life
    def start(self, now: float) -> None:
        """Take up what storage holds. A run never entered begins empty. Raises StorageError."""
        self._now = now
        self._restore(now)

    def _restore(self, now: float) -> None:
        """The journal, the checkpoint and the results since; where something of it is missing, the
        state is sought among the others.

        Raises StorageError where storage says that nobody else can have it.
        """
        storage = self.ports.storage
        journal, layout = storage.journal(), storage.states.layout()
        if not journal.entries:
            return None
        newest = journal.entries.since(max(0, len(journal.entries) - RECENT))
        admitted = tuple(each for certified in newest for each in certified.entry.admitted)
        if admitted:  # a power cut may have taken what was written of them beside the journal
            self.ports.emit(ev.LetIn(admitted))
        replica = storage.states.replica(layout, restore=True) if layout is not None else None
        if replica is None or not 0 <= replica.generation < len(
            journal.entries
        ):  # or killed between a fetched state and its entries
            self.make_machine(now, journal.entries[0])
            return self.transfer.seek_state()
        if not replay(storage, replica, journal.entries):
            storage.lacks_results()
            self.make_machine(now, journal.entries[0])
            return self.installing.replay(now, replica)
        self.replica = replica
        self.make_machine(now, journal.entries[0])
        replica.publish(self.round)
        self.hash_state(self.round + 1)
        self.opened(now)
        return self.ports.emit(ev.StateReady(self.completed))

    def found(self, now: float, layout: Layout, initial: Tensor) -> None:
        """Found the run with these parameters (float32, (numel,)): only its organiser may, once.
        Raises StorageError, ConfigError.
        """
        self._now = now
        storage = self.ports.storage
        if self.machine is not None or self.me != self.organiser or storage.journal().entries:
            raise LocalProtocolError(
                "only the organiser founds a run, and only one that has no state"
            )
        settings, journal = self.settings, storage.journal()
        replica = storage.states.replica(layout, restore=False)
        replica.initialise(initial)
        replica.publish(0)
        certified = make_genesis(
            run=self.run,
            log=self.log,
            me=Member(self.me, journal.incarnation),
            replica=replica,
            chunk_elements=self.terms.chunk_elements
            or chunk_elements(settings.codec, layout.numel),
            codec=settings.codec_of(layout),
            reducer=settings.reducer,
            sign=self.ports.sign,
        )
        # Before anybody hears of the run: nobody else could restore it.
        storage.found(replica, certified)
        self.replica = replica
        self.make_machine(now, certified, root=certified.entry.base_state)
        self.opened(now)
        self.ports.emit(ev.StateReady(0))
        self._drain(now)

    def make_machine(
        self, now: float, genesis: Certified, root: bytes | None = None
    ) -> RoundMachine:
        """Take part in the log that begins with ``genesis``, from where the journal ends. ``root``:
        Merkle root of the state there, where it is known.
        """
        journal = self.ports.storage.journal()
        entry, settings = genesis.entry, self.settings
        restarted = journal.restarted  # a copy from before the first entry is one, too
        if not journal.entries:
            journal.append(genesis)
        find = self.modes.reducers
        shape = shape_of(
            entry.numel, entry.chunk_elements, entry.codec, entry.reducer, settings.plan, find
        )
        self.machine = RoundMachine(
            run=self.run,
            log=self.log,
            me=Member(self.me, journal.incarnation),
            organiser=self.organiser,
            journal=journal,
            shape=replace(
                shape,
                kin=self.pre_round is not None,
                single=settings.coordinator,
                sample=settings.sample,
                # masked vectors meet before the log is given anything: they wait there
                whole=settings.by_work and self.pre_round is None,
                spare=settings.spare,
                witnesses=witnesses_of(settings.lying, shape, find)
                if self.pre_round is None
                else 0,
            ),
            timing=self.timing,
            actions=self.actions,
            rng=self.rng,
            now=now,
            site=self.terms.site,
            modes=replace(self.modes.log, sites=self.spending.names),
            unix_offset_s=self._unix_offset_s,
            doors=self.doors,
            root=root,
            stateless=self.replica is None,
            idle=self.script is None or not self.admission.trains,
        )
        if restarted:
            self.machine.recovery.ask_first(now)
        return self.machine

    def drop(self) -> None:
        """The end of this session: the data plane lets go of what it holds for it."""
        for part in (self.transfer, self.serving, self.operations, self.pre_round):
            if part is not None:
                part.drop_all()
        machine = self.machine
        if machine is not None:
            self.ports.exchange.close_round(self.log, machine.round)
            if machine.contribution is not None:
                self.ports.exchange.release(machine.contribution[0])

    def leave(self, now: float) -> None:
        """Leave the configuration with the next entry; keep answering until then and afterwards."""
        self._now = now
        if self.machine:
            self.machine.leave()
        self._drain(now)

    # ---- the script
    def attach(self, now: float, layout: Layout) -> bool:
        """A script with this model attaches. False: nobody has the state yet and this member may
        found the run.

        Raises ModelMismatchError naming the tensors.
        """
        self._now = now
        known = self.replica.layout if self.replica else None
        if known is not None:
            check_model(layout, known)
        self.script = layout
        if self.machine:
            self.machine.set_idle(now, not self.admission.trains)
        self._drain(now)
        return known is not None

    def detach(self, now: float) -> None:
        """The script is gone: nothing will be contributed; a frozen contribution stays until its
        round is decided.
        """
        self._now = now
        self.script = None
        self.operations.detach(now)
        self.prior.forget(now)
        self.queue.forget()
        if self.machine:
            self.machine.set_idle(now, True)
        self._drain(now)

    def contribute(
        self,
        now: float,
        cid: bytes,
        samples: int,
        vector: Tensor,
        base: int | None = None,
        reading: Reading = NO_READING,
        hold_s: float = 0.0,
    ) -> None:
        """Offer ``vector`` (float32, (numel,), untouched until RoundCommitted) to the open round,
        or to the next one.

        With ``base``, the rounds in the anchor it was made on, it is refused (ContributionRefused)
        once that anchor is no longer current. ``hold_s``: as of `Swarm.contribute`. Of no samples
        it waits for the end of a round that this member was not sampled for.
        """
        self._now = now
        self.admission.may_contribute()
        if self.machine is None or self.machine.stateless:
            raise OutOfDateError("the run's state is not here yet")
        if vector.numel() != self.machine.shape.numel:
            raise LocalProtocolError(
                f"contribution of {vector.numel()} elements to a run of {self.machine.shape.numel}"
            )
        self.queue.put((cid, samples, vector, reading), base, now, hold_s)
        if not hold_s:
            self.machine.set_idle(now, not self.admission.trains)
        self.offer(now)
        self._drain(now)

    def offer(self, now: float) -> None:
        """Freeze the script's first contribution for the open round, if nothing is."""
        machine, offering = self.machine, self.queue
        if machine is not None and not machine.takes_part:
            offering.first(now)
            machine.set_waiting(offering.waits)
        if self.pre_round is not None:
            return self.pre_round.offer(now)
        if (
            machine
            and machine.contribution is None
            and not machine.open.applying
            and (given := offering.first(now)) is not None
        ):
            cid, samples, vector, reading = given
            self.ports.exchange.freeze(self.log, machine.round, cid, vector)
            self.admission.offered(cid, vector)
            self.retaining.offered(cid, vector)
            machine.contribute(now, cid, samples, self.measures.with_radius(reading))
        return None

    def _refuse(self, now: float, event: x.NonFinite) -> None:
        """The data plane found NaN, infinity, or what its codec cannot hold, in a contribution: it
        is in no round. Why is told once known.
        """
        machine, replica = self.machine, self.replica
        flat: Tensor | None = None
        cid = event.cid
        if machine and machine.contribution and machine.contribution[0] == cid:
            machine.withdraw()
            _, _, flat, _ = self.queue.take()
        if flat is not None and machine and replica:
            self.ports.offload(
                lambda: why_refused(flat, replica.layout, machine.shape.codec),
                lambda _, why: self.ports.emit(ev.ContributionRefused(cid, why, unfit=True)),
            )
        else:
            why = "it holds NaN or infinity, or a value too large for its codec"
            self.ports.emit(ev.ContributionRefused(cid, why, unfit=True))
        self.operations.on_exchange(now, event)
        self.ports.exchange.release(cid)

    def tell(self, event: ev.OperationDone | ev.OperationRefused) -> None:
        """What became of a free-standing operation: of a secure round's own, or of the script's."""
        if self.pre_round is None or not self.pre_round.takes(self._now, event):
            self.ports.emit(event)

    def settle(self, now: float) -> None:
        """After a command to `operations`: deliver what it said to ourselves."""
        self._now = now
        self._drain(now)

    # ---- inputs
    def follow_clock(self, now: float, unix_offset_s: float) -> None:
        """The wall clock minus ``now`` is this: it may have been corrected since the start."""
        self._unix_offset_s = unix_offset_s
        self.membership.follow_clock(now, unix_offset_s)
        if self.machine is not None:
            self.machine.set_clock(unix_offset_s)

    def add_contacts(self, now: float, peers: Iterable[PeerId]) -> None:
        """The peers that discovery says take part in the run now. Who is not named any more is no
        contact any more; of too many, those stay that have been heard, and of the others some that
        are chosen anew each time."""
        self._now = now
        before = set(self.contacts)
        named = [peer for peer in dict.fromkeys(peers) if peer != self.me]
        if len(named) > MAX_CONTACTS:
            self.rng.shuffle(named)
            named.sort(key=lambda peer: not self.membership.live(now, peer))
        self.contacts = named[:MAX_CONTACTS]
        if not before.issuperset(self.contacts):
            self._asked_at = -1e9
        self._drain(now)

    def on_link(self, now: float, peer: PeerId, up: bool) -> None:
        """The connection to a peer came or went."""
        self._now = now
        self.membership.link(now, peer, up)
        self._drain(now)

    def on_gone(self, now: float, peer: PeerId) -> None:
        """The process behind a connection that ended is no more: what waits for it is looked at
        now, not at the next `tick` that is due.
        """
        self.membership.gone(peer)
        self._ticked_at = -1e9
        self.tick(now)

    def on_message(self, now: float, peer: PeerId, data: bytes) -> None:
        """A control message of an authenticated peer. Breaches are reported, never raised; what
        exceeds the peer's budget is dropped.
        """
        self._now = now
        self.membership.heard(now, peer)
        if not self.budgets.message(now, peer, len(data), member=self.in_config(peer)):
            return
        try:
            if data[:1] == MEMBERSHIP:
                if self.budgets.request(now, peer, "membership"):
                    self.membership.on_message(now, peer, data[1:])
            elif data[:1] == ROUND:
                if self._affordable(now, peer, m.outline(data[1:], peer)):
                    self._on_envelope(now, peer, m.decode(data[1:], peer))
            elif self.pre_round is not None and data[:1] == self.pre_round.prefix:
                if not self.admission.uncounted(peer):
                    self.pre_round.on_message(now, peer, data[1:])
            else:
                raise RemoteProtocolError("unknown kind of control message", peer=peer)
        except (RemoteProtocolError, BadSignatureError) as error:
            self.misbehaved(now, peer, error.message)
        self._drain(now)

    def misbehaved(self, now: float, peer: PeerId, reason: str) -> None:
        """A message of a peer broke a rule: after some of those it is ignored for a while."""
        self.budgets.breach(now, peer)
        self.ports.emit(ev.PeerMisbehaved(peer, reason))

    def _affordable(self, now: float, peer: PeerId, what: m.Outline) -> bool:
        """Asked before decoding: thousands of spans cost more to decode than to send."""
        nbytes = what.nbytes if what.tag in OF_SPANS else 0
        if is_operation(what.log):
            return self.budgets.operation(now, peer, nbytes)
        chunks = what.tag == GET and nbytes > CHUNKLESS
        return self.budgets.request(now, peer, "get_chunks" if chunks else what.tag, nbytes)

    def _on_envelope(self, now: float, peer: PeerId, envelope: m.Envelope) -> None:
        body = envelope.body
        if envelope.log == self.log:
            self.others.note(peer, envelope)
        if self.membership.is_doubled:
            return  # another process may vote under this key: this one takes no part
        if not isinstance(body, UNCOUNTED_SAY) and self.admission.uncounted(peer):
            return  # it asks again, and is counted meanwhile
        if envelope.log != self.log:
            self.operations.on_message(now, peer, envelope)
        elif self.histories.ignores(peer, envelope) or self.admission.bars(now, peer, envelope):
            pass
        elif isinstance(body, m.AskState):
            self.serving.on_ask_state(now, peer, body)
        elif isinstance(body, m.Get):
            self.serving.on_get(now, peer, body)
        elif isinstance(body, m.Offer):
            self.transfer.on_offer(now, peer, envelope.round, body)
        elif isinstance(body, m.Gone):
            self.transfer.on_gone(now, peer, body.name)
        elif isinstance(body, m.Seal) and self.installing.under_way:
            # a seal forgets entries that the state being installed may be of; the organiser repeats
            # it
            pass
        elif self.machine is not None:
            self.actions.timeline(envelope.round).heard(now, peer, body)
            self.machine.on_message(now, peer, envelope.incarnation, envelope.round, body)
            if (
                isinstance(body, m.Catch)
                and self.machine.open.decided
                and self.machine.round < body.results_from
            ):
                self.transfer.seek_state()
        elif (
            isinstance(body, m.Catch)
            and body.entries
            and (body.entries[0].entry.round, body.entries[0].entry.log) == (0, self.log)
        ):
            check_genesis(
                body.entries[0],
                run=self.run,
                organiser=self.organiser,
                verify=self.ports.verify,
                peer=peer,
            )
            machine = self.make_machine(now, body.entries[0])
            self.transfer.seek_state()
            machine.on_message(now, peer, envelope.incarnation, 1, body)

    def reminded(self, now: float, peer: PeerId, recalled: bytes) -> None:
        """What ``peer`` recalls of our own membership record when we greet it."""
        self._now = now
        self.membership.reminded(now, peer, recalled)
        self._drain(now)

    def on_exchange(self, now: float, event: Any) -> None:
        """An event of the data plane."""
        self._now = now
        machine = self.machine
        match event:
            case x.ResultComplete():
                if not self.operations.on_exchange(now, event):
                    self.actions.on_result(now, event)
            case x.PartReduced():
                if machine is not None and machine.tolerated:
                    machine.on_part(now, event.plan_id, event.part, event.digest, event.inputs)
            case x.PartGiven():
                if machine is not None and machine.tolerated:
                    machine.on_given(now, event.plan_id, event.part, event.root)
            case x.ReductionReport():
                if not self.operations.on_exchange(now, event) and machine:
                    machine.on_report(
                        now,
                        event.plan_id,
                        event.missing,
                        event.lacking,
                        event.resumed,
                        event.disputed,
                    )
            case x.BlobProgress():
                if self.pre_round is None or not self.pre_round.takes(now, event):
                    self.transfer.on_blob(now, event.name, event.have, event.missing, event.source)
            case x.BlobComplete():
                pass  # told by the last BlobProgress
            case x.BadChunk():
                self.transfer.on_bad_chunk(event.peer, event.name)
                self.ports.emit(
                    ev.PeerMisbehaved(event.peer, f"chunk {event.chunk} fails its hash")
                )
            case x.PeerFault():
                self.ports.emit(ev.PeerMisbehaved(event.peer, event.reason))
            case x.NonFinite():
                self._refuse(now, event)
            case _:
                pass
        self._drain(now)

    def tick(self, now: float) -> None:
        """Call at `next_due`."""
        self._now = now
        self.membership.silences = self.ports.pace().silences
        self.membership.tick(now)
        if self.membership.is_doubled:
            return self._stand_aside(now)
        if now - self._ticked_at >= self.timing.pull_s * 0.99:
            self._ticked_at = now
            self._retry(now)
            knocks = now - self._asked_at >= self.timing.fetch_s
            peers = self.config_peers()  # known before there is a machine
            few = not self.modes.log.dissemination(self.me, len(peers), lambda: peers).is_large
            # whom to ask is chosen anew each time; of many, only where somebody is to be asked
            targets = self.others.targets(now) if few or self.transfer.asks else []
            self.transfer.tick(now, targets)
            self.serving.tick(now)
            self.operations.tick(now)
            if self.machine:
                self.machine.tick(now)
                if self.machine.take_renewed():
                    self.ports.emit(ev.Renewed(self.machine.me.incarnation))
                self.recertifying.tick(now)
            if self.pre_round is not None:
                self.pre_round.tick(now)
            self.waits.tick(now)
            if knocks:
                self._asked_at = now
                self.others.knock(now, lambda: targets or self.others.targets(now))
                if self.machine and not self.left:
                    self.histories.compare(now, lambda: targets or self.others.targets(now))
        self._drain(now)

    def _stand_aside(self, now: float) -> None:
        """Another process lives under this key: neither votes any more, and both say so."""
        if not self.doubled:
            self.doubled = True
            self.ports.emit(ev.Doubled())
        self._ticked_at = now
        self.waits.tick(now)
        self._drain(now)

    def next_due(self) -> float:
        """When to call `tick` next; after any input perhaps earlier than before."""
        beat, soon = self.membership.next_due(), self._ticked_at + self.timing.pull_s
        return beat if beat <= soon else min(beat, self._ticked_at + self.look_s)

    @property
    def look_s(self) -> float:
        """Seconds between two looks at what may need repair: training takes minutes, and a look
        twenty times a second for nothing takes from it.
        """
        return self.timing.pull_s * (RESTING_PULLS if self._rests else 1)

    @property
    def _rests(self) -> bool:
        """Whether nothing is under way as far as this member knows, no round, no operation and no
        transfer, and it waits for nobody.
        """
        machine, transfer = self.machine, self.transfer
        # The likeliest, asked for every message.
        if machine is None or machine.contribution is not None or self.operations.under_way:
            return False
        if self.pre_round is not None and self.pre_round.active:
            return False
        if (
            machine.open.first_ready_at is not None
            or machine.voted >= machine.round
            or self._unrecorded is not None
        ):
            return False
        if machine.stateless or machine.engaged or machine.leaving or not machine.may_act:
            return False
        if machine.entrance.asked:
            return False
        if self.recertifying.view() is not None:
            return False
        return not (self.installing.busy or transfer.fetching or transfer.seeking_state)

    # ---- progress
    def adopt(self, now: float, round_: int, root: bytes) -> None:
        """A fetched state is in the replica: take over the entries up to it. Raises StorageError,
        and may be called again then.
        """
        self._now = now
        machine = self.machine
        assert machine is not None
        machine.adopt_snapshot(
            now, [c for c in machine.frontier if machine.round <= c.entry.round <= round_], root
        )

    def installed(self, now: float, replica: ModelReplica) -> None:
        """A fetched state and its entries are in place: the next round opens."""
        machine = self.machine
        assert machine is not None
        self.replica = replica
        self.checkpoints.installed()
        self.actions.clear()
        self.opened(now)
        self.resume(now, machine)
        self.ports.emit(ev.StateReady(self.completed))
        self._drain(now)

    def resume(self, now: float, machine: RoundMachine) -> None:
        """Its round is open: take up what came early."""
        for error in machine.resume(now):
            self.ports.emit(ev.PeerMisbehaved(PeerId(error.peer), error.message))

    def applied(self, now: float, entry: Entry) -> None:
        """The outer step of the decided entry is done: the next round opens."""
        self._now = now
        self._applied(now, entry)  # where it cannot be recorded, `tick` tries again
        self._retry(now)
        self._drain(now)

    def _applied(self, now: float, entry: Entry) -> None:
        """Record it, hash and save its state beside, and open the next round. Raises StorageError:
        then `_retry` comes back to it.
        """
        machine, replica = self.machine, self.replica
        assert machine is not None
        assert replica is not None
        replica.publish(entry.round)
        self.ports.exchange.close_round(self.log, entry.round)
        decided, self._unrecorded = machine.open.decided, entry
        machine.on_applied(now)
        self._unrecorded = None
        self.transfer.drop(machine.round)
        self.transfer.seeking_state = False  # replay goes on; a Catch says if it cannot
        self.actions.clear()
        self.hash_state(machine.round)
        if decided is not None:
            self.checkpoints.decided(decided)
        self.checkpoints.forget_results()
        self.opened(now)
        self.resume(now, machine)

    def hash_state(self, round_: int) -> None:
        """Compute the Merkle root of the state before ``round_``, beside."""
        replica = self.replica
        assert replica is not None

        def hashed(now: float, hashes: list[bytes]) -> None:
            self.hashed(now, round_, merkle_root(hashes))

        self.ports.offload(replica.hashes, hashed)

    def diverged(self, entry: Entry, mine: bytes) -> None:
        """Our state is not the decided one: it must never happen; fetch the state anew."""
        if not self.transfer.seeking_state:
            self.ports.emit(ev.StateDiverged(entry.round, mine, entry.base_state))
            self.transfer.seek_state()

    def stored(self, now: float, bound: Plan | Entry, digests: tuple[bytes, ...]) -> None:
        """Result bytes of the open round are on the medium."""
        self._now = now
        if self.machine is not None:
            self.machine.on_result(now, bound, digests)
        self._drain(now)

    def hear_own(self, now: float, envelope: m.Envelope) -> None:
        """A message to oneself that had to wait for the medium."""
        self._now = now
        self.loop.append(envelope)
        self._drain(now)

    def _retry(self, now: float) -> None:
        """What had to wait for another job, or for room on the disk."""
        self.actions.retry(now)
        if self._unrecorded is not None:
            self.applied(now, self._unrecorded)
        self.installing.retry(now)
        self.checkpoints.retry(now)

    def hashed(self, now: float, round_: int, root: bytes) -> None:
        """The Merkle root of the state before ``round_`` is known."""
        self._now = now
        if self.machine:
            self.machine.on_root(now, round_, root)
            self.ports.emit(ev.StateRoot(round_ - 1, root))
        self._drain(now)

    def decided(self, now: float, certified: Certified, counted: bool, cid: bytes | None) -> None:
        """Tell the script what the entry counts, and take back its contribution."""
        entry, machine = certified.entry, self.machine
        assert machine is not None
        if self.pre_round is not None:
            cid, counted = self.pre_round.decided(entry)
        elif (
            cid is not None
        ):  # one that was handed over while this entry was being applied stays, for the next round
            self.queue.take()
            self.ports.exchange.release(cid)
        before = {
            member.peer for member in machine.journal.entries[entry.round - 1].entry.next_config
        }
        after = tuple(member.peer for member in entry.next_config)
        shares = shares_of(entry.contributors, self.actions.weights.get(entry.part_digests, ()))
        gone = before - set(after)
        left = gone & {member.peer for member in machine.leavers}
        left |= gone & {self.me} if machine.leaving else set()
        elapsed = machine.round_s or 0.0
        round_, evaluations = self.rounds(entry.round), self.settings.evaluations
        losses = tuple(
            (each.member.peer, each.reading.loss)
            for each in entry.contributors
            if each.reading.loss is not None
        )
        self.ports.emit(
            ev.RoundCommitted(
                round_,
                entry.round,
                shares,
                after,
                tuple(sorted(gone - left)),
                tuple(sorted(left)),
                cid,
                counted,
                entry.hash(),
                elapsed,
                entry.parts,
                losses,
                tuple(each.reading for each in entry.contributors) if evaluations else (),
                self.replica.plain_since if self.replica is not None else 0,
                evaluations,
                self.settings.lying,
            )
        )
        self.prior.decided(entry)
        self.admission.decided(now, certified)
        self.retaining.decided(entry)
        self.measures.decided(entry)
        self.recertifying.decided(certified)

    def opened(self, now: float) -> None:
        """A round opened: accept its parts, watch its configuration, offer what waits."""
        machine = self.machine
        assert machine is not None
        if machine.stateless:
            return
        peers = [member.peer for member in machine.config]
        shape = machine.shape
        self.ports.exchange.open_round(
            self.log,
            machine.round,
            peers,
            shape.numel,
            shape.chunk_elements,
            shape.codec,
            most=shape.most,
            witnesses=shape.witnesses,
        )
        self.membership.watch(now, peers, self.log)
        if not self._follows:
            self.membership.announce(now, round=self.completed + 1)
        self.serving.recall(machine)
        contribution = machine.contribution
        if contribution is not None and machine.takes_part:
            # what was offered to the round before, where that had no contributors, stands: it is
            # signed anew, for this one
            vector = self.queue.head(contribution[0])
            if vector is not None:
                self.retaining.offered(contribution[0], vector)
        self.offer(now)

    def _stand_by(self, now: float) -> None:
        """Of a member that is slow: offer what it has once another has ended the round; and have
        nobody wait for it while it has nothing.
        """
        machine = self.machine
        if machine is None or not self.queue.aside or machine.stateless:
            return
        if self.queue.waits:
            self.offer(now)
        idle = machine.contribution is None and not self.queue.waits
        if idle != machine.idle and self.script is not None and self.admission.trains:
            machine.set_idle(now, idle)

    def _drain(self, now: float) -> None:
        """Deliver messages to oneself and send what membership has to say."""
        if self._draining:
            return
        self._draining = True
        try:
            while self.loop:
                envelope = self.loop.popleft()
                try:
                    self._on_envelope(now, self.me, envelope)
                except RemoteProtocolError as error:
                    raise LocalProtocolError(
                        f"a message to oneself broke a rule: {error.message}"
                    ) from error
                self._stand_by(now)
            self._stand_by(now)
            for peer, data in self.membership.drain():
                self.ports.send(peer, MEMBERSHIP + data)
        finally:
            self._draining = False
