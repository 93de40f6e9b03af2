"""One run at a node: it drives the run's Session with the node's network, engine, files and
clock.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import trio

from ...collectives.errors import (
    AtollError,
    BadSignatureError,
    ConfigError,
    NotAdmittedError,
    RemoteProtocolError,
    StorageError,
    SwarmClosedError,
    VersionMismatchError,
)
from ...collectives.group import Plan
from ...collectives.identifiers import PeerId, RunId
from ...collectives.reach import Reach
from ..control.shared_memory import AnchorSlots
from ..home.paths import make_private
from ..run.capability import invite_of
from ..run.entrants import Entrants
from ..run.events import RunFailedEvent
from ..run.gate import Gate
from ..run.inner_doors import doors_of
from ..run.membership import Membership
from ..session import Session
from ..session import events as ev
from ..session.budgets import PeerUsage
from ..session.composing import log_settings_of
from ..session.durations import durations
from ..session.fragments import Whole, logs_of, whole_of
from ..session.terms import SessionTerms
from ..storage import RunFiles
from .asking import Asking
from .bans import MESSAGE, PROOF, Banning
from .context import NodeContext
from .facts import quorum
from .outside import ModelFiles, RunTerms, RunWatch, SignedRun
from .pausing import RunPause
from .ports import RunPorts
from .reactions import react_to
from .refusals import MEMBER, MOST_REFUSALS, NAMED, STRANGER, Refusal
from .starting import ScriptStart
from .troubles import Troubles, coded, removed_here

log = logging.getLogger("atoll")

ASK_MANIFEST, MANIFEST = b"?", b"C"
OWN_KINDS = {
    MESSAGE: "ban",
    PROOF: "ban",
    ASK_MANIFEST: "manifest",
    MANIFEST: "manifest",
}
"""What is no message of the session, in its sender's budget."""


@dataclass(frozen=True, slots=True)
class RunFailed:
    """For listeners: the run does not go on at this node."""

    error: AtollError


class RunService:
    """One run. Owned by the node's service; everything happens in its trio thread."""

    def __init__(
        self,
        node: NodeContext,
        run_id: RunId,
        organiser: PeerId,
        signed: SignedRun | None,
        certificate: bytes,
        *,
        seeding: bool = True,
    ) -> None:
        """``certificate``: what lets this node in; not used at the organiser's, who needs none and
        may have joined by an invite of its own. ``seeding``: take part also while no script is
        attached.
        """
        self.node, self.run_id, self.organiser, self.seeding = node, run_id, organiser, seeding
        self.signed = signed
        self.certificate = b"" if organiser == node.identity.peer else certificate
        self.entrants = Entrants(node.paths.run_dir(run_id))
        self.terms: RunTerms | None = None
        self.whole: Whole | None = None  # driven as one
        self.files: dict[str, RunFiles] = {}  # by log: of each fragment, or of the one session
        self.ports: RunPorts | None = None
        self.base: ModelFiles | None = None  # of a run of a pretrained model
        self.known = trio.Event()  # the manifest is known and the session runs
        self.error: AtollError | None = None
        self.listeners: list[Callable[[object], None]] = []
        self.metrics: dict[str, float] = {}
        self.budgets = PeerUsage()  # of what peers may send and ask for, and whom we listen to
        self.refusals: dict[PeerId, Refusal] = {}
        self.banning = Banning(self)
        self.gate = Gate(run_id, organiser, self.banning.lists, self._members)
        self.doors = doors_of(self.gate, time.time)
        own = self.gate.recognise(node.identity.peer, self.certificate)
        self.doors.note(node.identity.peer, self.certificate)
        if own is not None and own.capability.role != "train":
            self.roles[node.identity.peer] = own.capability.role
        self.troubles = Troubles(run_id, node.publish)
        self.start = ScriptStart(self)
        self.pause = RunPause(run_id, node.paths.run_dir(run_id), node.hours, node.publish)
        # the session is let go of, and its files are about to be closed: nothing reaches it any
        # more
        self.over = False
        self.ended = trio.Event()  # `run` has returned, and everything of the run is closed
        self._asking = Asking(random.Random(node.rng.random()))
        self._slots: dict[int, AnchorSlots] = {}  # by fragment
        self._wake = trio.Event()
        self._due = 0.0  # when the session is looked at next, unless something wakes us
        self._news = True  # of members, from discovery
        self._scope = trio.CancelScope()
        self._traffic_before = self._node_traffic()
        self._hide_manifest: Callable[[], None] = lambda: None
        self.watch: RunWatch = node.parts.watch(self)

    # ---- life
    async def run(self) -> None:
        """Take part in the run until `stop`. Whatever fails ends this run only, never the node:
        `error` says why.
        """
        try:
            with self._scope:
                try:
                    await self._take_part()
                except* Exception as group:
                    self.fail(group)
        finally:
            await self._close()
            self.watch.close()
            self.ended.set()

    async def _take_part(self) -> None:
        self._load_entrants()
        self.banning.load()
        self.node.network.on_message(
            self.run_id,
            self._on_message,
            self._greet,
            self._admit,
            self._accept,
            self._recall,
            self._reminded,
        )
        self.node.network.announce_run(
            self.run_id, self.organiser, self.certificate, self._hears_of, free=None
        )
        if self.signed is None:
            await self._fetch_manifest()
        self._begin()
        assert self.ports is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.ports.worker)
            await self._drive()

    async def _close(self) -> None:
        self.over = True  # network and engine go on: what they still tell is for nobody
        if self.base is not None:
            self.base.drop_all()
        network = self.node.network
        self.node.lanes.left(self.run_id)
        self._hide_manifest()
        network.withdraw_run(self.run_id)
        with trio.move_on_after(1) as scope:
            scope.shield = True
            await network.close_topic(self.run_id)
        try:
            if self.whole is not None:
                self.whole.drop()
            for files in self.files.values():
                files.close()
        except (
            Exception
        ) as error:  # a full disk, most likely: the next life finds what was written before
            self.troubles.tell(coded(error, f"closing run {self.run_id}"))
        for slots in self._slots.values():
            slots.close()

    @property
    def session(self) -> Session | None:
        """The session, of a run in fragments that of the first: membership and free-standing
        operations are the same for all.
        """
        return self.whole.sessions[0] if self.whole is not None else None

    @property
    def membership(self) -> Membership | None:
        """Records and liveness of the run's peers; None before the run has begun here."""
        return self.session.membership if self.session is not None else None

    @property
    def foreign(self) -> set[PeerId]:
        """Peers that are on another history of this run."""
        return self.session.membership.foreign if self.session is not None else set()

    @property
    def splits(self) -> dict[PeerId, ev.HistorySplit]:
        """Where the logs of those part from ours that begin as ours."""
        sessions = self.whole.sessions if self.whole is not None else []
        return {peer: split for each in sessions for peer, split in each.histories.splits.items()}

    def take_proof(self, evidence: bytes) -> None:
        """This node has found evidence against a peer."""
        self.banning.take_proof(self.node.identity.peer, evidence)

    @property
    def driven(self) -> Whole:
        """What a script's command is given to. Raises the error the run failed of, SwarmClosedError
        once it is over.
        """
        if self.error is not None:
            raise self.error
        if self.over:
            raise SwarmClosedError(
                f"the node has ended its part in run {self.run_id}", hint="join again"
            )
        assert self.whole is not None
        return self.whole

    @property
    def lost(self) -> list[RunFiles]:
        """What was founded here, or held here, and is without a genesis now."""
        sessions = self.whole.sessions if self.whole is not None else []
        return [
            files
            for files in (self.files[s.log] for s in sessions if s.phase == "seeking")
            if files.was_founded
        ]

    @property
    def undecided(self) -> bool:
        """Whether a contribution is frozen in an open round that can be decided."""
        sessions = self.whole.sessions if self.whole and self.error is None else []
        return (
            any(session.machine and session.machine.contribution for session in sessions)
            and self.decidable
        )

    @property
    def name(self) -> str:
        """Of the run; "" before its manifest is known."""
        return self.terms.name if self.terms is not None else ""

    @property
    def reach(self) -> Reach | None:
        """How many members are reachable, and how many a decision needs; None where this node
        cannot tell.
        """
        return quorum(self)

    @property
    def decidable(self) -> bool:
        """Whether waiting for a decision makes sense: the run goes on here, and it is not known
        that too few members are there.
        """
        if self.error is not None or self.over:
            return False
        there = self.reach
        return there is None or there.quorum

    def stop(self, why: AtollError | None = None) -> None:
        """End this run at this node; its script is told ``why``."""
        if why is not None:
            self.error = why
            self.known.set()
            for listener in list(self.listeners):
                listener(RunFailed(why))
        self._scope.cancel()

    def fail(self, error: BaseException) -> None:
        """This run cannot go on at this node. Its script is told and may enter it again; the node
        lives on.
        """
        if self.error is not None:
            return
        self.error = coded(error, f"run {self.run_id}")
        self.troubles.tell(self.error)
        self.node.publish(RunFailedEvent.of(self.error, self.run_id))
        self.stop(self.error)

    def guard(self, act: Callable[[], object]) -> None:
        """Do something with the session: what the disk refuses is trouble and will be tried again;
        anything else ends this run.

        Every input goes through here but the script's commands (`driven`): after the end of the run
        nothing is done.
        """
        if self.error is not None or self.over:
            return
        try:
            act()
        except StorageError as error:
            self.troubles.tell(error)
        except Exception as error:
            self.fail(error)

    async def _fetch_manifest(self) -> None:
        while self.signed is None:
            wake = self._wake = trio.Event()
            known = [peer for peer, _ in self.node.network.members(self.run_id)]
            for peer in self._asking.whom(trio.current_time(), known):
                self.node.network.send(self.run_id, peer, ASK_MANIFEST)
            with trio.move_on_at(self._asking.again_at):
                await wake.wait()

    def _begin(self) -> None:
        assert self.signed is not None
        terms = self.terms = self.node.manifests.terms(self.signed)
        self.banning.begin(terms)
        self.gate.policy, self.gate.allow = terms.policy, terms.allow
        self.doors.policy, self.doors.allow = self.gate.policy, self.gate.allow
        self.gate.named = self.doors.named = terms.names_sites
        self.node.network.settle_run(self.run_id, self.gate.policy != "invite")
        if terms.encrypts:
            # made for other runs: encrypted ones take their place
            self.node.engine.drop_plain_lanes()
        self.node.lanes_per_peer = max(self.node.lanes_per_peer, terms.lanes)
        self.node.manifests.save(self.signed)
        now = trio.current_time()
        whole = self.whole = self._make(terms, now)
        assert self.ports is not None
        self.base = self.node.parts.model_files(self.signed, self.ports)
        membership = whole.sessions[0].membership
        membership.banned, membership.trusted = self.banning.lists.peers, self.banning.lists.trusted
        membership.roles = self.roles
        membership.certificate, membership.believes = self.certificate, self.gate.believes
        membership.shows = self.doors.note
        membership.invite_of = invite_of
        self.announce(now)
        whole.start(now)
        self.banning.follow()
        for session in whole.sessions:
            if session.machine is not None and session.phase != "running":
                self.files[session.log].check()
            if session.removed:
                raise removed_here()
        self._hide_manifest = self.node.parts.show_manifest(self.run_id, self._show)
        self.watch.begin()
        self.known.set()

    def announce(self, now: float) -> None:
        """Tell the members at which addresses this node can be reached now."""
        if self.session is not None:
            self.session.membership.announce(
                now,
                addresses=tuple(
                    address.removesuffix(f"/p2p/{self.node.identity.peer}")
                    for address in self.node.peers.addresses()
                ),
            )

    def _make(self, terms: RunTerms, now: float) -> Whole:
        settings, identity = terms.settings, self.node.identity
        for number, log in enumerate(logs_of(self.run_id, settings.fragments)):
            self.files[log] = self._open_files(terms, number)
        storages = list(self.files.values())
        self.ports = RunPorts(self, storages)
        session = SessionTerms(
            run=self.run_id,
            me=identity.peer,
            organiser=self.organiser,
            settings=log_settings_of(settings),
            timing=durations(settings),
            unix_offset_s=time.time() - now,
            checkpoint_every=terms.checkpoint_every,
            seeding=self.seeding,
            site=self.node.site,
            probation=terms.probation,
            per_hour=terms.per_hour,
            doors=self.doors,
            modes=self.node.parts.modes(settings, identity),
        )
        return whole_of(
            session,
            ports=self.ports,
            storages=storages if settings.fragments > 1 else (),
            rng=random.Random(self.node.rng.random()),
            now=now,
            budgets=self.budgets,
        )

    def _open_files(self, terms: RunTerms, number: int) -> RunFiles:
        settings, paths = terms.settings, self.node.paths
        folder = paths.state_dirs(self.run_id, settings.fragments)[number]
        make_private(folder)
        return RunFiles(
            folder,
            run_id=self.run_id,
            outer=settings.effective_outer,
            slots=lambda numel: self.slots(numel, number),
            trouble=self.troubles.tell,
            me=self.node.identity.peer,
            organiser=self.organiser,
            founded=paths.founded_file(self.run_id, number if settings.fragments > 1 else None),
            first_life=int(time.time()),
            keep_contributions=terms.keep_contributions,
        )

    async def _drive(self) -> None:
        session = self.whole
        assert session is not None
        while True:
            wake = self._wake = trio.Event()
            self._tend_lanes()
            now = trio.current_time()
            due = session.next_due() if self.base is None else self.base.next_due(now)
            self._due = max(min(session.next_due(), due), now + 0.001)
            with trio.move_on_at(self._due):
                await wake.wait()
            self.guard(self._look)

    def _look(self) -> None:
        session, now = self.whole, trio.current_time()
        assert session is not None
        if self._news:
            self._news = False
            session.add_contacts(now, [peer for peer, _ in self.node.network.members(self.run_id)])
        for peer, addresses in (
            session.sessions[0].membership.moved().items()
        ):  # so that members find one another without any bootstrap
            self.node.peers.add_addresses(peer, addresses)
        for part in session.sessions:
            part.follow_clock(now, time.time() - now)
        self.watch.look()
        self.pause.look()
        if self.base is not None:
            self.base.tick(now, list(filter(self.node.peers.connected, self._near())))
        if now >= session.next_due():
            session.tick(now)

    def _near(self) -> set[PeerId]:
        """Members, and who is known to take part, but this node and who is banned."""
        known = {peer for peer, _ in self.node.network.members(self.run_id)}
        return known.union(self._members()) - {self.node.identity.peer} - self.banning.lists.peers

    def wake(self) -> None:
        """Look at the session's timers again."""
        self._wake.set()

    def on_member(self) -> None:
        """Discovery has found a member, or where it is now."""
        self._news = True
        self._wake.set()

    def _tend_lanes(self) -> None:
        """Keep a lane to every member of a small configuration; drop lanes nobody has used."""
        assert self.whole is not None
        now, me = trio.current_time(), self.node.identity.peer
        self.node.lanes.members(
            now, self.run_id, frozenset(self.whole.config_peers()) - {me} - self.banning.lists.peers
        )
        self.node.lanes.tend(now)

    # ---- network
    def _greet(self, peer: PeerId) -> bytes:
        return self.certificate

    def _show(self, who: PeerId, certificate: bytes) -> bytes:
        """The manifest, for somebody who thinks about joining: nothing is kept of it. Raises
        NotAdmittedError for whom it is not.
        """
        assert self.signed is not None
        self.gate.shows(who, certificate, time.time())
        return self.signed.data

    def _admit(self, peer: PeerId, shown: bytes) -> bool:
        shown = shown or self.doors.shown(peer)
        found = self.gate.admit(peer, shown, time.time())
        if found is None:
            return True
        self.doors.note(peer, shown)
        try:
            if self.gate.policy in (None, "invite") and peer not in self._members():
                self.entrants.enter(peer, found.capability)
            elif self.gate.in_force(found, time.time()):
                self.entrants.note(peer, found.capability)
            else:  # it may have run out since the peer entered by it
                self.entrants.recall(peer, found.capability)
        except StorageError as error:
            self.troubles.tell(error)
        return True

    def _let_in(self, event: ev.LetIn) -> None:
        """A member need not have shown its certificate to this node: the log has it, and so what
        its invite is for.
        """
        for each in event.admitted:
            if (found := self.gate.recognise(each.peer, each.certificate)) is not None:
                self.doors.note(each.peer, each.certificate)
                try:
                    self.entrants.recall(each.peer, found.capability)
                except (NotAdmittedError, StorageError) as error:
                    self.troubles.tell(error)
        self._shut_out({each.invite for each in event.admitted if each.uses})

    def _shut_out(self, limited: Collection[bytes]) -> None:
        """Two members may let in two keys by an invite for one, before the log knows of either: who
        is not the one in the log is let go of.
        """
        session = self.session
        if session is None or session.machine is None:
            return
        tally = session.machine.journal.entries.tally
        over = [
            peer
            for peer, came in self.entrants.known.items()
            if came.nonce in limited and tally.bars(came.nonce, peer)
        ]
        try:
            self.entrants.forget(over)
        except StorageError as error:
            self.troubles.tell(error)
        for peer in over:
            self.node.nursery.start_soon(self.node.network.close_topic, self.run_id, peer)

    def _accept(self, peer: PeerId, shown: bytes) -> bool:
        self.gate.accept(peer, shown or self.doors.shown(peer), time.time())
        self.doors.note(peer, shown)
        return True

    def _recall(self, peer: PeerId) -> bytes:
        session = self.session
        return session.membership.recall(peer) if session is not None else b""

    def _reminded(self, peer: PeerId, recalled: bytes) -> None:
        session, now = self.session, trio.current_time()
        if session is not None:
            self.guard(lambda: session.reminded(now, peer, recalled))
            self.wake()

    def _hears_of(self, peer: PeerId, shown: bytes) -> bool:
        return self.gate.hears_of(peer, shown, time.time())

    def _members(self) -> list[PeerId]:
        """The newest configuration that this node knows."""
        return self.whole.config_peers() if self.whole is not None else []

    @property
    def members(self) -> list[PeerId]:
        return self._members()

    def _load_entrants(self) -> None:
        try:
            self.entrants.load()
        except StorageError as error:
            self.troubles.tell(error)

    @property
    def roles(self) -> dict[PeerId, str]:
        """By the invites that peers have shown; who is not in it trains."""
        return self.entrants.roles

    def on_refused(self, peer: PeerId, code: str, reason: str) -> None:
        """A peer does not let us in. What a member says of us is a verdict; what a stranger says is
        told as a stranger's words.
        """
        self.refusals.pop(peer, None)
        while len(self.refusals) >= MOST_REFUSALS:
            del self.refusals[next(iter(self.refusals))]
        self.refusals[peer] = Refusal(
            code, reason, self._standing(peer), self.node.peers.address_of(peer)
        )
        if code == "E205" and (error := self.refusals[peer].verdict(peer)) is not None:
            self.troubles.tell(error)
        known = {member for member, _ in self.node.network.members(self.run_id)}
        if (
            self.signed is None
            and known <= self.refusals.keys()
            and (error := self.refusal()) is not None
        ):
            self.fail(error)
        self._asking.refused(peer)
        self.wake()

    def refusal(self) -> AtollError | None:
        """Why members do not let us in, as an error."""
        verdicts = (refusal.verdict(peer) for peer, refusal in self.refusals.items())
        return next((error for error in verdicts if error is not None), None)

    def hearsay(self) -> str:
        """What strangers said when they refused us, as theirs; "" where none did."""
        refusals = [
            refusal.text(peer)
            for peer, refusal in self.refusals.items()
            if refusal.standing == STRANGER
        ]
        return "; ".join(refusals[:3])

    def _standing(self, peer: PeerId) -> str:
        """Whose words a peer's are: its own only, unless it is the organiser, a member, or named by
        our invite or settings.
        """
        members = self._members()
        if peer == self.organiser or peer in members:
            return MEMBER
        return NAMED if not members and self.node.peers.named(peer) else STRANGER

    def _on_message(self, peer: PeerId, data: bytes) -> float:
        """Returns for how long the peer's stream is not to be read, in seconds."""
        if peer in self.banning.lists.peers:
            return 0.0
        try:
            self._take_message(peer, data)
        except (RemoteProtocolError, BadSignatureError):
            # the network shuts out who goes on with this, and rounds must not wait for it
            self.budgets.breach(trio.current_time(), peer)
            raise
        return self.budgets.pause_s()

    def _take_message(self, peer: PeerId, data: bytes) -> None:
        kind, now = data[:1], trio.current_time()
        of_files = kind == self.node.parts.files_kind
        own = "files" if of_files else OWN_KINDS.get(kind)
        if own is not None and not (
            self.budgets.message(
                now,
                peer,
                len(data),
                member=self.whole is not None and self.whole.in_config(peer),
            )
            and self.budgets.request(now, peer, own)
        ):
            return
        if kind == MESSAGE:
            self.banning.take(peer, data[1:])
        elif kind == PROOF:
            self.banning.take_proof(peer, data[1:])
        elif kind == ASK_MANIFEST:
            if self.signed is not None:
                self.node.network.send(self.run_id, peer, MANIFEST + self.signed.data)
        elif kind == MANIFEST:
            if self.signed is None:
                self._take_manifest(data[1:])
        elif of_files:
            if self.base is not None:
                self.base.take(now, peer, data)
        elif self.session is not None:
            self._input(lambda session, now: session.on_message(now, peer, data))

    def _take_manifest(self, data: bytes) -> None:
        try:
            signed = self.node.manifests.decode(data)
            if signed.run_id != self.run_id or signed.organiser != self.organiser:
                raise ConfigError("not the manifest of this run")
            self.node.manifests.terms(signed)
        except (
            VersionMismatchError
        ) as error:  # it is the run's own: told at once, since no other will come
            self.fail(error)
            return
        except AtollError as error:
            self.troubles.tell(error)
            return
        self.signed = signed
        self.wake()

    def on_link(self, peer: PeerId, up: bool) -> None:
        """A connection came or went."""
        if up and not self.over:
            self.banning.met(peer)
        if self.session is not None:
            self._input(lambda session, now: session.on_link(now, peer, up))

    def on_gone(self, peer: PeerId) -> None:
        """The process behind a connection that ended is no more."""
        if self.session is not None:
            self._input(lambda session, now: session.on_gone(now, peer))

    def on_exchange(self, event: object) -> None:
        """An event of the engine (of any run: the session knows its own)."""
        self.watch.on_exchange(event)
        if (base := self.base) is not None:
            self.guard(lambda: base.on_exchange(trio.current_time(), event))
        self._input(lambda session, now: session.on_exchange(now, event))

    def _input(self, handle: Callable[[Whole, float], None]) -> None:
        session = self.whole
        if session is not None:
            self.guard(lambda: handle(session, trio.current_time()))
            if (
                session.next_due() < self._due
            ):  # else one more step of the loop for each message, for nothing
                self.wake()

    # ---- memory
    def slots(self, numel: int, fragment: int = 0) -> AnchorSlots:
        """A fragment's anchor slots, made once there is a state; before, for the script that would
        found the run.
        """
        slots = self._slots.get(fragment)
        if slots is not None and slots.current is None and slots.numel != numel:
            slots.close()  # an earlier script would have founded it with another model
            slots = None
        if slots is None:
            slots = self._slots[fragment] = AnchorSlots(
                numel, folder=self.node.paths.run_dir(self.run_id)
            )
        return slots

    def result_buffer(self, plan: Plan, nbytes: int) -> memoryview:
        """Where a plan's result is received (called in the engine thread)."""
        files = self.files.get(plan.log)
        if files is not None:
            try:
                return files.results.allocate(nbytes)
            except (
                StorageError
            ) as error:  # reduce for the others; this member votes once the bytes can be kept
                self.troubles.tell(error)
        return memoryview(bytearray(nbytes))

    # ---- traffic
    def traffic(self) -> tuple[int, int]:
        """Bytes (sent, received) since this run was entered: lanes with their encryption, and
        control messages. Lanes belong to the node: where it is in several runs, each shows the
        traffic of all."""
        sent, received = self._node_traffic()
        return sent - self._traffic_before[0], received - self._traffic_before[1]

    def _node_traffic(self) -> tuple[int, int]:
        lanes, control = self.node.engine.totals(), self.node.peers.traffic()
        return lanes[0] + control[0], lanes[1] + control[1]

    # ---- events
    def on_event(self, event: object) -> None:
        """An event of a session."""
        fragment, inner = (
            (event.fragment, event.event) if isinstance(event, ev.InFragment) else (0, event)
        )
        react_to(self, inner)
        if isinstance(inner, ev.LetIn):
            self._let_in(inner)
        if isinstance(inner, ev.RoundCommitted):
            self.banning.follow()
        self.watch.note(fragment, inner)
        for listener in list(self.listeners):
            listener(event)
