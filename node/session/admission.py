"""Whom a session hears, of those who may speak in its run: roles of invites, probation of
newcomers, and how many may enter an hour.

All that is held against a peer here is known at every member alike, or each sees for itself: a
convener lets in whom it has seen do good work. By what certificate a peer enters, and how many an
invite has let in, is in the entry, and every acceptor checks it (`collectives.round.entering`).
Probation and how many enter an hour are the convener's word (docs/threat-model.md).

**Probation.** Who is on probation takes the state and trains like a member, but is none: it owns no
part, has no vote, and what it contributes is not counted. Instead it is looked into. While a round
is open the newcomer says by hashes what it would contribute to it (Trial). Once the round is
decided, the entry's hash says which chunk of that is to be shown, so nobody could know before, and
to whom (Sample): its hash must be the one that was said, its values finite, not all zero, and not
longer than an honest contribution's can be beside the result. A round in which they are is one of
those it needs; one in which they are not begins the count anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from blake3 import blake3
from torch import Tensor

from ...collectives import messages as m
from ...collectives.codecs.codec import Chunking
from ...collectives.codecs.encoded import EncodedVector
from ...collectives.digest import chunk_hash
from ...collectives.errors import NotAdmittedError, RemoteProtocolError
from ...collectives.group import Certified, Entry, Member
from ...collectives.identifiers import HASH_BYTES, PeerId
from . import events as ev
from .serving import chunking_of
from .watches import Retention

if TYPE_CHECKING:
    from .session import Session

HOUR_S = 3600.0
WARDENS = 16  # to whom a sample is shown
MOST_TRIALS = 64  # newcomers that are looked into at a time
LONGER = 3.0  # than what noise alone makes of a contribution beside the mean of n: √n times as long


@dataclass(frozen=True)
class _Trial:
    """What somebody would contribute to a round. ``data``: its bytes, of the own one."""

    round: int
    cid: bytes
    hashes: bytes
    data: memoryview | None = None


class Admission:
    """Of one session. ``probation``: how many good rounds a newcomer needs; ``per_hour``: how many
    may enter; 0: no such bound.
    """

    def __init__(
        self, session: Session, retaining: Retention, probation: int, per_hour: int
    ) -> None:
        self.session, self.probation, self.per_hour = session, probation, per_hour
        self._retaining = retaining
        self.votes = session.modes.votes(session)
        self.good: dict[PeerId, int] = {}
        """Rounds in a row in which a newcomer's work was found to be in order."""
        # The round in which a member last said whose sum was wrong.
        self._heard: dict[PeerId, int] = {}
        self._known: set[PeerId] = set()  # who has been a member since this session began
        self._entered: deque[float] = deque()
        self._trials: dict[PeerId, _Trial] = {}
        self._mine: _Trial | None = None

    # ---- who may what
    def uncounted(self, peer: PeerId) -> bool:
        """Whether ``peer`` comes by a limited invite and the log, as far as it is here, does not
        count it: then it is given nothing, since others may be given the last use of its invite.
        The first fragment's log counts for all.
        """
        session = self.session.sessions[0]
        if any(each.in_config(peer) for each in self.session.sessions):
            return False
        machine = session.machine
        return (
            machine is not None
            and session.doors.limited(peer)
            and not machine.journal.entries.tally.counts(peer)
        )

    def may_contribute(self) -> None:
        """Raise NotAdmittedError E206 where this member's invite is not one to train."""
        if (role := self._role(self.session.me)) != "train":
            raise NotAdmittedError(
                f"this node's invite is to {role}: it contributes nothing",
                code="E206",
                why="The organiser has made it for a member that does not train.",
                hint="Ask the organiser for another: atoll invite new",
            )

    @property
    def trains(self) -> bool:
        """Whether this member contributes."""
        return self._role(self.session.me) == "train"

    def may_enter(self) -> bool:
        """Whether this peer may ask to become a member."""
        return self._role(self.session.me) != "observe"

    def _role(self, peer: PeerId) -> str:
        return self.session.membership.roles.get(peer, "train")

    def bars(self, now: float, peer: PeerId, envelope: m.Envelope) -> bool:
        """Whether a message of the main log is not listened to (now). Raises RemoteProtocolError
        where its sender may never say it.
        """
        if peer == self.session.me:
            return False
        match envelope.body:
            case m.Ready() as ready:
                self._check(peer, [peer] if ready.cid is not None else [])
            case m.Promise(ready=m.Ready() as ready) | m.Pledge(ready=m.Ready() as ready):
                self._check(peer, [peer] if ready.cid is not None else [])
            case m.PlanMessage(plan) | m.PacedPlan(plan):
                self._check(peer, [contributor.member.peer for contributor in plan.contributors])
            case m.Accept(entry=entry) | m.Propose(entry=entry):
                self._check(peer, [contributor.member.peer for contributor in entry.contributors])
            case m.Accepted() as vote if (
                not self.session.settings.lying
            ):  # there the machine looks itself
                self.votes.heard(peer, envelope.round, vote)
            case m.Join(holds=holds):
                if holds and self._role(peer) == "observe":
                    raise RemoteProtocolError(
                        "its invite is to observe: it cannot become a member", peer=peer
                    )
            case m.Disputed(wrong=wrong) if wrong:
                self._on_dispute(peer, envelope.round, wrong)
            case m.Retained() as statement:
                self._retaining.heard(peer, envelope.round, statement)
                return True
            case m.Trial() as trial:
                self._on_trial(peer, envelope.round, trial)
                return True
            case m.Sample() as sample:
                self._on_sample(peer, envelope.round, sample)
                return True
            case _:
                pass
        return False

    def _on_dispute(self, owner: PeerId, round_: int, wrong: tuple[PeerId, ...]) -> None:
        """Tell the user, once a round of each member, whatever it says."""
        machine, members = self.session.machine, self.session.config_peers()
        if (
            machine is not None
            and machine.round == round_ > self._heard.get(owner, 0)
            and {owner, *wrong} <= {*members}
        ):
            self._heard[owner] = round_
            self.session.ports.emit(ev.SumDisputed(owner, wrong))

    def _check(self, sender: PeerId, contributors: list[PeerId]) -> None:
        for peer in contributors:
            if (role := self._role(peer)) != "train":
                raise RemoteProtocolError(
                    f"a contribution of {peer[-8:]}, whose invite is to {role}", peer=sender
                )

    def let_in(self, now: float, joiners: Sequence[Member]) -> list[Member]:
        """Who of those that ask, and are not banned, may become a member now: who was one, whom the
        organiser trusts, and of the others who has shown good work, as many as there is room for in
        this hour."""
        while self._entered and now - self._entered[0] > HOUR_S:
            self._entered.popleft()
        room = self.per_hour - len(self._entered) if self.per_hour else len(joiners)
        found = list[Member]()
        for joiner in joiners:
            if joiner.peer in self.session.membership.banned:
                continue
            if not self._free(joiner.peer):
                if room <= 0 or self.good.get(joiner.peer, 0) < self.probation:
                    continue
                room -= 1
            found.append(joiner)
        return found

    def _free(self, peer: PeerId) -> bool:
        session = self.session
        return (
            peer in self._known or peer == session.organiser or peer in session.membership.trusted
        )

    def decided(self, now: float, certified: Certified) -> None:
        """An entry of the log, in its order."""
        entry, machine = certified.entry, self.session.machine
        assert machine is not None
        config = {
            member.peer for member in machine.journal.entries[entry.round - 1].entry.next_config
        }
        before = self._known | config
        after = {member.peer for member in entry.next_config}
        self._known, new = before, after - before
        if entry.admitted:
            self.session.ports.emit(ev.LetIn(entry.admitted))
        # What was decided before this member came is no news.
        if self.per_hour and self.session.me in config:
            self._entered.extend(now for peer in new if not self._free(peer))
        self._known |= after
        for peer in new:
            self.good.pop(peer, None)
            self._trials.pop(peer, None)
        self._trials = {
            peer: trial for peer, trial in self._trials.items() if trial.round >= entry.round
        }
        mine, self._mine = self._mine, None
        if (
            mine is not None
            and mine.data is not None
            and mine.round == entry.round
            and entry.contributors
        ):
            self._show(entry, mine, mine.data)

    # ---- the newcomer
    def offered(self, cid: bytes, vector: Tensor | EncodedVector) -> None:
        """The own contribution is frozen for the open round; where this is no member, the members
        are told what it is.
        """
        session, machine = self.session, self.session.machine
        if (
            not self.probation
            or machine is None
            or machine.is_member
            or self._mine is not None
            or not self.may_enter()
        ):
            return
        round_, shape = machine.round, machine.shape

        def encode() -> tuple[memoryview, bytes] | None:
            chunking = Chunking(shape.codec, shape.numel, shape.chunk_elements)
            room = (
                vector
                if isinstance(vector, EncodedVector)
                else EncodedVector(chunking, memoryview(bytearray(chunking.nbytes)))
            )
            if isinstance(vector, Tensor) and not room.encode(vector):
                return None
            return memoryview(bytes(room.data)), b"".join(
                map(chunk_hash, chunking.views(room.data))
            )

        def encoded(now: float, found: tuple[memoryview, bytes] | None) -> None:
            if found is None or machine.round != round_ or len(found[1]) > m.MAX_HASHES:
                return
            self._mine = _Trial(round_, cid, found[1], found[0])
            for peer in session.config_peers():
                session.actions.tell(peer, round_, m.Trial(cid, found[1]))

        session.ports.offload(encode, encoded)

    def _show(self, entry: Entry, trial: _Trial, data: memoryview) -> None:
        session = self.session
        chunk, wardens = draw_chunk(entry, session.me)
        start, stop = Chunking(entry.codec, entry.numel, entry.chunk_elements).span(chunk)
        if stop - start <= m.MAX_SAMPLE_BYTES:
            for peer in wardens:
                session.actions.tell(
                    peer, entry.round, m.Sample(trial.cid, chunk, bytes(data[start:stop]))
                )

    # ---- the members
    def _on_trial(self, peer: PeerId, round_: int, trial: m.Trial) -> None:
        machine = self.session.machine
        if (
            machine is None
            or round_ != machine.round
            or machine.open.decided is not None
            or self.session.in_config(peer)
        ):
            return  # after the decision anybody knows which chunk is chosen
        if peer in self._trials or len(self._trials) < MOST_TRIALS:
            self._trials[peer] = _Trial(round_, trial.cid, trial.hashes)

    def _on_sample(self, peer: PeerId, round_: int, sample: m.Sample) -> None:
        session, machine, trial = self.session, self.session.machine, self._trials.get(peer)
        if (
            machine is None
            or trial is None
            or (trial.round, trial.cid) != (round_, sample.cid)
            or round_ >= machine.round
        ):
            return
        del self._trials[peer]
        entry = machine.journal.entries[round_].entry
        result = session.ports.storage.results.kept(entry)
        if result is None:
            return

        def judged(_: float, fault: str) -> None:
            self.good[peer] = 0 if fault else self.good.get(peer, 0) + 1
            session.ports.emit(ev.WorkJudged(peer, round_, self.good[peer], fault))

        session.ports.serve(
            lambda: judge_sample(entry, peer, trial.hashes, sample.chunk, sample.data, result),
            judged,
        )


def draw_chunk(entry: Entry, peer: PeerId) -> tuple[int, list[PeerId]]:
    """Which chunk a newcomer is to show once the entry is decided, and to whom."""
    chunks = -(-entry.numel // entry.chunk_elements)
    rng = blake3(b"atoll/trial/1" + entry.hash() + peer.encode())
    wardens = sorted(
        (member.peer for member in entry.next_config),
        key=lambda other: blake3(rng.digest() + other.encode()).digest(),
    )
    return int.from_bytes(rng.digest(8), "big") % chunks, wardens[:WARDENS]


def judge_sample(
    entry: Entry, peer: PeerId, hashes: bytes, chunk: int, data: bytes, result: memoryview
) -> str:
    """What is wrong with a newcomer's chunk beside the round's result; "" for nothing.

    With n contributions that are one vector and independent noise each, one of them is at most √n
    times as long as their mean; thrice that is allowed.
    """
    chunking = Chunking(entry.codec, entry.numel, entry.chunk_elements)
    if (
        len(hashes) != HASH_BYTES * chunking.chunks
        or chunk != draw_chunk(entry, peer)[0]
        or len(data) != chunking.wire_bytes(chunk)
    ):
        return "it shows another chunk than the one that was chosen"
    if chunk_hash(memoryview(data)) != hashes[HASH_BYTES * chunk : HASH_BYTES * (chunk + 1)]:
        return "it shows other values than it has said before"
    values, mean = torch.empty(chunking.elements(chunk)), torch.empty(chunking.elements(chunk))
    chunking.codec(chunk).decode(chunking.wire(memoryview(bytearray(data)), chunk), values)
    results = chunking_of(entry)
    start, stop = results.span(chunk)
    results.codec(chunk).decode(
        results.wire(memoryview(bytearray(result[start:stop])), chunk), mean
    )
    length = float(values.double().norm())
    bound = LONGER * len(entry.contributors) ** 0.5 * float(mean.double().norm())
    if not length < float("inf"):
        return "its values are not finite"
    if bound and not 0 < length <= bound:
        return (
            "its values are "
            f"{'all zero' if length == 0 else f'{length / bound:.3g} times as long as they may be'}"
        )
    return ""
