"""Without a quorum: forks, the branch this member is on, and what becomes of it once entry r+1 is
certified.

All members in sight agree unanimously on a fork; its log (`branch.py`) goes on from the certified
state of entry r, or from the tip of the branch that whoever proposes it is on. The certified log
stays untouched: its state is put aside, its votes and promises hold, and the contribution frozen
for it stays frozen and is offered in both, for only one of the two can be certified. Once entry r+1
is certified, all branches of entry r end: what it names is counted, what this member gave to other
branches is lost, and said to be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from torch import Tensor

from ...collectives import exchange as x
from ...collectives import messages as m
from ...collectives.errors import RemoteProtocolError, StorageError
from ...collectives.group import Certified, Config, Contributor, Entry, Member, Vote, is_quorum
from ...collectives.identifiers import PeerId
from ...collectives.round import BRANCH, adopts, branch_log, tip_entry, vote_payload
from . import events as ev
from .branch import Branch
from .contribution_queue import Given
from .record import BranchRecord
from .serving import Serving, matches
from .tallies import shares_of

if TYPE_CHECKING:
    from .session import Session

KEPT_TIPS = 3  # states of the branch that another member may just be fetching


class _Proposal(msgspec.Struct):
    genesis: Entry
    path: m.Tip | None
    at: float
    votes: dict[Member, bytes]


class Branching:
    """Forks and branches of one run at one member. ``after_s``: how long no quorum may be in sight;
    None: the run pauses.
    """

    def __init__(self, session: Session, serving: Serving, after_s: float | None) -> None:
        self.session, self.serving, self.after_s = session, serving, after_s
        self.branch: Branch | None = None
        self.record = BranchRecord()
        self.base_state: memoryview | None = (
            None  # the certified state, while the replica is on a branch
        )
        self.frozen: Given | None = (
            None  # for the open certified round; the script may have been told of it already
        )
        self.given: Given | None = None  # what the script waits for
        self.moving = False  # the replica is being brought to where a fork begins
        self._tips: dict[bytes, tuple[Entry, memoryview]] = {}  # by digest, oldest first
        self._quorum_at = session.clock()
        self._proposal: _Proposal | None = None
        self._consent: tuple[bytes, float] | None = None
        self.promised_at = (
            -1e9
        )  # when the tip was last reported: it stays for a while, so that it can be adopted
        # digest of the tip that the replica is at; b"": the certified state. Changed by jobs only
        self.at = b""
        self._unsaved = False

    # ---- views
    @property
    def tip(self) -> m.Tip | None:
        """Where the branch stands."""
        machine, tip = self.session.machine, self.record.tip
        return tip if tip is not None and machine is not None and tip.base == machine.base else None

    @property
    def rounds(self) -> int:
        """Uncertified rounds in the state that scripts see."""
        return tip.length if (tip := self.reached) is not None else 0

    @property
    def reached(self) -> m.Tip | None:
        """The tip whose state it is."""
        return self.branch.tip_now if self.branch is not None else None

    @property
    def active(self) -> bool:
        """Whether contributions go to a branch, or will."""
        return self.branch is not None or self.moving

    def state_of(self, digest: bytes) -> memoryview | None:
        """The bytes of a tip that this member holds."""
        found = self._tips.get(digest)
        return found[1] if found else None

    def find(self, name: bytes) -> tuple[Entry, memoryview] | None:
        """Bytes of a branch by the hash of an entry: tips, and results of its last rounds."""
        for entry, state in self._tips.values():
            if entry.hash() == name:
                return entry, state
        if self.branch is None:
            return None
        known = self.branch.machine.open.known.get(name)
        if known is not None and known.part_digests in self.branch.results:
            return known, self.branch.results[known.part_digests]
        return self.branch.kept.get(name)

    # ---- life
    def restore(self) -> None:
        """What the last life left: the branch's tip, if its bytes are here; its members fork again
        from there.
        """
        session, machine = self.session, self.session.machine
        self.record = session.ports.storage.branch() or self.record
        tip = self.record.tip
        if machine is None or not self.record.base:
            return
        if self.record.base != machine.base:
            after = next(
                (
                    c.entry
                    for c in reversed(machine.journal.entries)
                    if c.entry.base == self.record.base
                ),
                None,
            )
            return self._settle(after) if after is not None else None
        if tip is not None:
            named = tip_entry(machine.log, machine.round, tip, machine.shape)
            state = session.ports.storage.kept(named)
            if state is not None and matches(named, state):
                self._tips[tip.digest] = (named, state)
                self._quorum_at = session.clock() - (self.after_s or 0.0)
            else:  # what this member did there counts only if another brings it
                self._write(msgspec.structs.replace(self.record, tip=None, left=self._own()))

    def _own(self) -> tuple[Contributor, ...]:
        """This member's contributions to the branches of the open round."""
        there = self.record.tip.contributors if self.record.tip else ()
        mine = {c.cid: c for c in (*self.record.left, *there) if c.member.peer == self.session.me}
        return tuple(mine.values())

    def _write(self, record: BranchRecord) -> None:
        self.session.ports.storage.keep_branch(record)
        self.record, self._unsaved = record, False

    # ---- forking
    def visible(self) -> Config:
        """Members of the open round that can be reached, this one included; sorted."""
        machine = self.session.machine
        assert machine is not None
        return tuple(
            sorted(
                who
                for who in machine.config
                if who == machine.me or not self.session.actions.suspected(who.peer)
            )
        )

    def _progressing(self, now: float, visible: Config) -> bool:
        """Whether the branch goes on: it has its own quorum in sight, and is not stuck."""
        branch = self.branch
        if self.moving:
            return True
        if branch is None or self.after_s is None:
            return False
        there = is_quorum(branch.machine.config, set(visible), self.session.organiser)
        return there and not (branch.machine.engaged and now - branch.moved_at > self.after_s)

    def tick(self, now: float) -> None:
        """Look whether a quorum is in sight; repair loss in the branch."""
        session, machine = self.session, self.session.machine
        if (
            self.after_s is None
            or machine is None
            or machine.stateless
            or not machine.is_member
            or session.left
        ):
            return
        visible = self.visible()
        if (
            machine.quorum(visible)
            or machine.open.decided is not None
            or session.installs
            or machine.sealing.active
        ):
            self._quorum_at, self._proposal = now, None
        elif (
            now - self._quorum_at > self.after_s
            and visible[0] == machine.me
            and not self._progressing(now, visible)
        ):
            self._propose(now, visible)
        if self._unsaved:
            self._write(self.record)
        if self.branch is not None and not self.branch.over and not self._held(now):
            self._tend(now, self.branch)

    def _held(self, now: float) -> bool:
        """Whether the branch stands still: its tip was just reported to somebody who may adopt it,
        and a quorum is in sight.
        """
        machine = self.session.machine
        assert machine is not None
        promised = now - self.promised_at < 8 * self.session.timing.takeover_s and machine.quorum(
            self.visible()
        )
        return promised or machine.sealing.active

    def _tend(self, now: float, branch: Branch) -> None:
        branch.retry(now)
        for member in branch.genesis.entry.next_config:
            if member.peer not in branch.seen:
                self.session.actions.tell(
                    member.peer, self._round(), m.Begin(branch.genesis, branch.path)
                )
        if branch.machine.idle != (self.session.script is None):
            branch.machine.set_idle(now, self.session.script is None)
        branch.machine.tick(now)
        self.offer(now)

    def _round(self) -> int:
        machine = self.session.machine
        assert machine is not None
        return machine.round

    def _propose(self, now: float, visible: Config) -> None:
        machine, tip = self.session.machine, self.tip
        assert machine is not None
        if tip is None and machine.root is None:
            return
        last = self._proposal
        if (
            last is None
            or last.genesis.next_config != visible
            or last.path != tip
            or now - last.at > self._patience
        ):
            genesis = Entry(
                branch_log(self.session.rng.randbytes(16)),
                0,
                machine.base,
                tip.digest if tip else machine.root or b"",
                (),
                (),
                (),
                machine.shape.numel,
                machine.shape.chunk_elements,
                machine.shape.codec,
                machine.shape.reducer,
                visible,
            )
            last = self._proposal = _Proposal(genesis, tip, now, {})
        for who in visible:
            if who not in last.votes:
                self.session.actions.tell(who.peer, machine.round, m.Fork(last.genesis, last.path))

    @property
    def _patience(self) -> float:
        return self.session.timing.takeover_s

    # ---- inputs
    def on_message(self, now: float, peer: PeerId, envelope: m.Envelope) -> bool:
        """A message about forks, on the main log; False when it is none."""
        machine, body = self.session.machine, envelope.body
        if (
            not isinstance(body, m.Fork | m.Consent | m.Begin)
            or machine is None
            or envelope.round != machine.round
        ):
            return False
        who = Member(peer, envelope.incarnation)
        if (
            self.after_s is None
            or who not in machine.config
            or not machine.is_member
            or machine.stateless
            or machine.sealing.active
        ):
            return True
        match body:
            case m.Fork():
                self._on_fork(now, who, body)
            case m.Consent():
                self._on_consent(now, who, body)
            case m.Begin():
                self._on_begin(now, who, body)
        return True

    def on_branch_message(self, now: float, peer: PeerId, envelope: m.Envelope) -> None:
        """A message in a branch's own log."""
        branch = self.branch
        if (
            branch is not None
            and branch.log == envelope.log
            and not branch.over
            and not self.moving
        ):
            branch.seen.add(peer)
            if isinstance(envelope.body, m.Join) or self._held(now):
                return
            branch.machine.on_message(
                now, peer, envelope.incarnation, envelope.round, envelope.body
            )

    def _fits(self, who: Member, genesis: Entry, path: m.Tip | None) -> bool:
        """Whether a fork is one of the open round, for this member. Raises RemoteProtocolError
        where it contradicts itself.
        """
        machine = self.session.machine
        assert machine is not None
        shape, members = machine.shape, genesis.next_config
        if genesis.base != machine.base or machine.me not in members or who not in members:
            return False
        formed = (
            genesis.log.startswith(BRANCH)
            and genesis.round == 0
            and not genesis.contributors
            and shape.fits(genesis)
        )
        if (
            not formed
            or not set(members) <= set(machine.config)
            or len(set(members)) != len(members)
        ):
            raise RemoteProtocolError("malformed fork", peer=who.peer)
        if path is not None:
            named = tip_entry(machine.log, machine.round, path, shape)
            if (
                path.base != machine.base
                or genesis.base_state != path.digest
                or not adopts(named, shape)
            ):
                raise RemoteProtocolError("a fork's path is not of this round", peer=who.peer)
        return True

    def _on_fork(self, now: float, who: Member, body: m.Fork) -> None:
        machine, digest = self.session.machine, body.genesis.hash()
        assert machine is not None
        assert self.after_s is not None
        if not self._fits(who, body.genesis, body.path):
            return
        lone = now - self._quorum_at > 0.7 * self.after_s and machine.open.decided is None
        other = (
            self._consent is not None
            and self._consent[0] != digest
            and now - self._consent[1] < self._patience
        )
        if not lone or other or self._progressing(now, self.visible()):
            return
        path = body.path
        if path is None and machine.root != body.genesis.base_state:
            return
        if (
            path is not None and path.digest not in self._tips
        ):  # consent says: I hold where it begins
            named = tip_entry(machine.log, machine.round, path, machine.shape)
            return self.session.transfer.fetch_result(now, named, [who.peer])
        self._consent = (digest, now)
        signature = self.session.ports.sign(
            vote_payload(self.session.run, body.genesis.log, 0, machine.base, 0, digest)
        )
        return self.session.actions.tell(who.peer, machine.round, m.Consent(digest, signature))

    def _on_consent(self, now: float, who: Member, body: m.Consent) -> None:
        last = self._proposal
        if (
            last is None
            or body.genesis != last.genesis.hash()
            or who not in last.genesis.next_config
        ):
            return
        if not self._signed(last.genesis, who, body.signature):
            raise RemoteProtocolError(
                "consent to a fork is not signed by its sender", peer=who.peer
            )
        last.votes[who] = body.signature
        if len(last.votes) == len(last.genesis.next_config):
            votes = tuple(
                Vote(member, 0, last.votes[member]) for member in last.genesis.next_config
            )
            self._proposal = None
            self._begin(now, Certified(last.genesis, votes), last.path)

    def _on_begin(self, now: float, who: Member, body: m.Begin) -> None:
        genesis, consent, branch = body.genesis.entry, self._consent, self.branch
        if branch is not None and branch.log == genesis.log:
            return self.session.actions.send(
                who.peer, branch.log, branch.machine.round, m.Fetch()
            )  # here I am
        if (
            consent is None
            or consent[0] != genesis.hash()
            or not self._fits(who, genesis, body.path)
        ):
            return
        signed = {
            vote.member
            for vote in body.genesis.votes
            if vote.ballot == 0 and self._signed(genesis, vote.member, vote.signature)
        }
        if signed != set(genesis.next_config):
            raise RemoteProtocolError("a fork begins without everyone's consent", peer=who.peer)
        self._begin(now, body.genesis, body.path)

    def _signed(self, genesis: Entry, who: Member, signature: bytes) -> bool:
        payload = vote_payload(self.session.run, genesis.log, 0, genesis.base, 0, genesis.hash())
        return self.session.ports.verify(who.peer, payload, signature)

    def tip_arrived(self, entry: Entry, state: memoryview) -> None:
        """Verified bytes of an entry; kept if they are a tip's."""
        machine = self.session.machine
        if (
            machine is not None
            and not entry.next_config
            and adopts(entry, machine.shape)
            and entry.base == machine.base
        ):
            self._keep_tip(entry, state)

    def _keep_tip(self, entry: Entry, state: memoryview) -> None:
        self._tips[entry.part_digests[0]] = (entry, state)
        present = self.tip.digest if self.tip else b""
        for digest in [digest for digest in self._tips if digest != present][
            : max(0, len(self._tips) - KEPT_TIPS)
        ]:
            self.serving.withdraw(self._tips.pop(digest)[0].hash())

    # ---- on the branch
    def _begin(self, now: float, genesis: Certified, path: m.Tip | None) -> None:
        session, machine, replica = self.session, self.session.machine, self.session.replica
        assert machine is not None
        assert replica is not None
        if (
            self.moving
            or machine.open.applying
            or machine.open.decided
            or machine.sealing.active
            or session.installs
        ):
            return
        at, state = machine.round, self.state_of(path.digest) if path is not None else None
        if path is not None and state is None:
            return
        machine.skip_ballot_0()
        if self.branch is not None:
            self.branch.end()
        self.moving = True

        def move() -> bool:
            if self.base_state is None:
                self.base_state = replica.snapshot()
            goal = path.digest if path is not None else b""
            changed, self.at = self.at != goal, goal
            if changed:
                replica.install(state if state is not None else self.base_state, at - 1)
            return changed

        session.ports.offload(
            move, lambda later, changed: self._moved(later, genesis, path, at, changed)
        )

    def _moved(
        self, now: float, genesis: Certified, path: m.Tip | None, at: int, changed: bool
    ) -> None:
        session, machine, replica = self.session, self.session.machine, self.session.replica
        assert machine is not None
        assert replica is not None
        self.moving = False
        if machine.round != at or machine.open.applying or session.installs:
            return
        left = self.record.left if path == self.tip else self._own()
        self._write(
            BranchRecord(machine.base, path, left, self.record.lost, self.record.lost_samples)
        )
        self.branch = Branch(self, genesis, path, now)
        if changed:
            replica.generation = -1
            replica.publish(at - 1 + self.rounds)
        self._take_frozen()
        session.ports.emit(
            ev.BranchBegun(
                genesis.entry.log,
                tuple(who.peer for who in genesis.entry.next_config),
                session.completed,
                changed,
            )
        )
        self.offer(now)
        session.settle(now)

    def _take_frozen(self) -> None:
        """What is frozen for the certified round stays so in memory of our own: the script may soon
        write its next contribution.
        """
        session, machine, branch = self.session, self.session.machine, self.branch
        assert machine is not None
        assert branch is not None
        if self.frozen is None and machine.contribution is not None:
            cid, samples, vector, reading = session.queue.take()
            vector = vector.clone()
            session.ports.exchange.freeze(session.log, machine.round, cid, vector)
            self.frozen = self.given = (cid, samples, vector, reading)
        tip = branch.tip_now
        if (
            self.given is not None
            and tip is not None
            and any(c.cid == self.given[0] for c in tip.contributors)
        ):
            self._tell(tip.contributors, self.given[0], True)

    def offer(self, now: float) -> None:
        """Give the branch's open round what the script has frozen."""
        session, branch = self.session, self.branch
        if branch is None or branch.over or self.moving or self._held(now) or branch.full:
            return
        if branch.machine.contribution or branch.machine.open.applying:
            return
        if self.given is None:
            self.given = session.queue.take_fresh()
        if self.given is not None:
            cid, samples, vector, reading = self.given
            session.ports.exchange.freeze(branch.log, branch.machine.round, cid, vector)
            branch.machine.contribute(now, cid, samples, reading)

    def advance(self, tip: m.Tip, state: memoryview) -> None:
        """A round of the branch is applied: keep its state, then say so. Raises StorageError."""
        session, machine, replica = self.session, self.session.machine, self.session.replica
        assert machine is not None
        assert replica is not None
        named, before = tip_entry(machine.log, machine.round, tip, machine.shape), self.tip
        session.ports.storage.keep_result(named, state)
        self._write(msgspec.structs.replace(self.record, tip=tip))
        self._keep_tip(named, state)
        if before is not None:
            session.ports.storage.drop_result(
                tip_entry(machine.log, machine.round, before, machine.shape)
            )
        replica.publish(machine.round - 1 + tip.length)

    def decided(self, entry: Entry, counted: bool) -> None:
        """A round of the branch is decided and applied: tell the script. What is frozen for the
        certified round may yet be counted there.
        """
        if self.given is None or not entry.contributors:
            return
        if counted or self.frozen is None or self.given[0] != self.frozen[0]:
            self._tell(entry.contributors, self.given[0], counted)

    def _tell(self, contributors: tuple[Contributor, ...], cid: bytes, counted: bool) -> None:
        session, self.given = self.session, None
        if self.frozen is None or cid != self.frozen[0]:
            session.ports.exchange.release(cid)
        shares = shares_of(contributors)
        session.ports.emit(ev.BranchAdvanced(session.completed, shares, cid, counted))

    def on_result(self, now: float, event: x.ResultComplete) -> bool:
        """Result bytes of a plan; False when it is none of the branch's."""
        return self.branch is not None and self.branch.on_result(now, event)

    def on_report(self, now: float, event: x.ReductionReport) -> bool:
        """What the data plane waits for; False when it is none of ours."""
        branch = self.branch
        if (
            branch is None
            or branch.machine.open.plan is None
            or branch.machine.open.plan.plan_id != event.plan_id
        ):
            return False
        branch.machine.on_report(
            now, event.plan_id, event.missing, event.lacking, event.resumed, event.disputed
        )
        return True

    def result_arrived(self, now: float, entry: Entry, data: memoryview) -> None:
        """Fetched result bytes of a round of the branch."""
        branch = self.branch
        if (
            branch is not None
            and branch.log == entry.log
            and entry.round == branch.machine.round
            and not branch.over
        ):
            branch.results[entry.part_digests] = data
            branch.machine.on_result(now, entry, entry.part_digests)

    # ---- the end
    def drop_all(self) -> None:
        """The end of this session: the data plane lets go of what it holds for a branch. The tip
        stays on the disk.
        """
        self.halt()
        for held in (self.frozen, self.given):
            if held is not None:
                self.session.ports.exchange.release(held[0])

    def halt(self) -> None:
        """An entry of the certified log is being applied, or a state after it installed: the branch
        goes no further.
        """
        if self.branch is not None:
            self.branch.end()

    def come_back(self) -> None:
        """Put the certified state into the replica again. Runs beside the control loop, before the
        step that needs it.
        """
        replica, machine = self.session.replica, self.session.machine
        if self.base_state is not None and replica is not None and machine is not None:
            replica.install(self.base_state, machine.round - 1)
            self.abandon()
            replica.generation = -1

    def abandon(self) -> None:
        """Another state comes into the replica."""
        self.base_state, self.at = None, b""

    def refuse(self, cid: bytes) -> Tensor | None:
        """A contribution cannot be sent: its vector, if it was given to the branch."""
        if self.given is None or self.given[0] != cid:
            return None
        (_, _, vector, _), self.given = self.given, None
        if self.branch is not None:
            self.branch.machine.withdraw()
        if self.frozen is not None and self.frozen[0] == cid and self.session.machine is not None:
            self.frozen = None
            self.session.machine.withdraw()
        return vector

    def settled(self, entry: Entry) -> tuple[bytes | None, bool] | None:
        """A certified entry is applied, and every branch of the one before is over.

        What the script waits for and whether it is counted, where that was given to a branch.
        """
        session, machine, branch = self.session, self.session.machine, self.branch
        assert machine is not None
        self._quorum_at, self._proposal, self._consent = session.clock(), None, None
        if self.record.base == entry.base:
            self._settle(entry)
        for named, _ in self._tips.values():
            self.serving.withdraw(named.hash())
            session.ports.storage.drop_result(named)
        self._tips.clear()
        if branch is None:
            return None
        branch.end()
        waits = self.given[0] if self.given is not None else None
        for held in (self.frozen, self.given):
            if held is not None:
                session.ports.exchange.release(held[0])
        self.branch = self.frozen = self.given = None
        machine.withdraw()
        return waits, any(c.cid == waits for c in entry.contributors)

    def _settle(self, entry: Entry | None) -> None:
        """Count what was lost; ``entry``: the one that followed the branches' base."""
        cids = {c.cid for c in entry.contributors} if entry is not None else set[bytes]()
        lost = tuple(c for c in self._own() if c.cid not in cids)
        before = self.record
        adopted = (
            before.tip is not None
            and entry is not None
            and entry.part_digests == (before.tip.digest,)
        )
        samples = sum(c.weight for c in lost)
        self.record = BranchRecord(
            lost=before.lost + len(lost), lost_samples=before.lost_samples + samples
        )
        try:
            self._write(self.record)
        except StorageError:
            self._unsaved = True  # found again at the next start, or written by the next tick
        self.session.ports.emit(ev.BranchEnded(adopted, tuple(c.cid for c in lost), samples))
