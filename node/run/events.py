"""What happened in a run at one node, in one tagged union: published to subscribers, kept in the
event file (`diary`), decoded by whoever reads either, and shown in words, by the same types.

Each event is one class, which says all that is true of its kind: its name, its fields with their
bounds, its line for people, whether it is for tools only, and whether it is kept. What a reader
does not know, or what does not fit, is an `OtherEvent`, which has the object as it came.

    event = PeerPathEvent(peer="12D3…", path="relay")
    document(event)                    # {"event": "peer.path", "peer": "12D3…", "path": "relay"}
    read_event(document(event)) == event
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec

from ...collectives.errors import AtollError
from ...collectives.foreign import escaped, quoted
from ...collectives.group import MAX_MEMBERS
from ...collectives.outcomes import Share
from ...collectives.reach import Reach
from ..home.short_words import short_peer, span_text

Text = Annotated[str, msgspec.Meta(max_length=4096)]
Id = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Name = Annotated[str, msgspec.Meta(max_length=128)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Ids = Annotated[tuple[Id, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
Metrics = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], float], msgspec.Meta(max_length=64)
]


class RunEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """What all kinds have. ``at``: seconds since 1970, 0 until it is published; ``run``: its id, ""
    where it is the node's; ``fragment``: of a model in fragments, which; ``missed``: events before
    it that were dropped; ``by``: whose it is, in a file of several nodes.
    """

    at: float = 0.0
    run: Name = ""
    fragment: Count = 0
    missed: Count = 0
    by: Name = ""

    quiet: ClassVar[bool] = False
    """For tools: several a round. Shown with --all, and always with --json."""
    kept: ClassVar[bool] = True
    """False: worth nothing a second later, so no file has it."""
    of_peers: ClassVar[bool] = False
    """Peers can cause it at will: it never pushes the rest out of the files."""

    @property
    def kind(self) -> str:
        """Such as "round.committed"."""
        return str(self.__struct_config__.tag)

    def words(self) -> str:
        """A line for people; by default all that it tells."""
        told = {key: value for key, value in document(self).items() if key not in _NOT_SAID}
        return escaped(f"{self.kind} {json.dumps(told, default=str)}", 2000)


_NOT_SAID = ("at", "event", "run")
_WHERE_ANY = ("run", "fragment", "missed", "by")  # the fields above, said where there is any


class OtherEvent(RunEvent, frozen=True):
    """Of a kind that this version does not know, or an event that does not fit its kind."""

    object: Mapping[str, Any] = {}

    @property
    def kind(self) -> str:
        """What it says itself."""
        return str(self.object.get("event"))


# ---- rounds


class WorthReading(msgspec.Struct, frozen=True):
    """What members found by evaluations (`optim.outer.worth.Worth`), and how many readings in a row
    have to speak against averaging.
    """

    anchor: float
    own: float
    behind: float | None
    worse: float | None
    members: int
    rounds: int


class EntryCommittedEvent(RunEvent, frozen=True, tag="entry.committed"):
    """An entry is decided, and applied. ``contributors``: samples by peer; ``weights``: what a
    robust rule of whole vectors gave to each; ``parts``: which share of the round each added up;
    ``losses``: what they say of theirs, in a run that records it; ``plain_since``: the entry from
    which on the governor takes the plain mean. ``left`` had announced that they go, ``lost`` had
    not. Bytes: of this node so far.
    """

    round: Count
    entry: Count = 0
    contributors: Annotated[dict[Id, Count], msgspec.Meta(max_length=MAX_MEMBERS)] = {}
    members: Ids = ()
    lost: Ids = ()
    left: Ids = ()
    counted: bool = False
    elapsed_s: Seconds = 0.0
    bytes_sent: Count = 0
    bytes_received: Count = 0
    weights: Annotated[dict[Id, float], msgspec.Meta(max_length=MAX_MEMBERS)] = {}
    parts: Annotated[dict[Id, float], msgspec.Meta(max_length=MAX_MEMBERS)] = {}
    losses: Annotated[dict[Id, float], msgspec.Meta(max_length=MAX_MEMBERS)] = {}
    worth: WorthReading | None = None
    plain_since: Count = 0
    reach: Reach | None = None
    state_root: Name = ""


class RoundCommittedEvent(EntryCommittedEvent, frozen=True, tag="round.committed"):
    """The same of an entry with contributors, which is a round."""


class RoundPartEvent(RunEvent, frozen=True, tag="round.part"):
    """Which share of the rounds this node adds up now: 0 where its link can carry none."""

    part: float


class RoundPhaseEvent(RunEvent, frozen=True, tag="round.phase"):
    """How far a reduction is at this node (`node.watching.phases`)."""

    log: Name
    round: Count
    phase: Name
    op_id: Text = ""
    ballot: Count = 0
    revision: Count = 0
    convener: Name = ""
    owners: Ids = ()
    contributors: Ids = ()
    elapsed_s: Seconds = 0.0

    quiet = True


class Slowest(msgspec.Struct, frozen=True):
    """Who was furthest behind the others' median in a reduction."""

    peer: Id
    phase: Annotated[str, msgspec.Meta(max_length=32)]
    behind_s: Seconds


class Traffic(msgspec.Struct, frozen=True):
    """Bytes on one lane during a reduction."""

    sent: Count = 0
    received: Count = 0


class ReductionTimedEvent(RunEvent, frozen=True, tag="reduction.timed"):
    """Where the time of a reduction went (`collectives.telemetry.ReductionTimed`). ``at``: when it
    began; seconds count from there. ``lanes``: bytes on each meanwhile.
    """

    peer: Id = ""
    log: Name = ""
    round: Count = 0
    op_id: Text = ""
    reducer: Text = ""
    codec: Name = ""
    numel: Count = 0
    contributors: Ids = ()
    ballot: Count = 0
    revision: Count = 0
    asked_again: Count = 0
    planned_s: Seconds = 0.0
    reduced_s: Seconds = 0.0
    decided_s: Seconds = 0.0
    elapsed_s: Seconds = 0.0
    phases: Annotated[dict[Id, dict[Id, float]], msgspec.Meta(max_length=16)] = {}
    slowest: Slowest | None = None
    lanes: Annotated[dict[Id, Traffic], msgspec.Meta(max_length=MAX_MEMBERS)] = {}

    quiet = True


def weights_of(shares: Sequence[Share]) -> dict[str, float]:
    """What a robust rule of whole vectors gave to each contributor; empty with others."""
    return {share.peer: share.weight for share in shares if share.weight is not None}


class OperationCommittedEvent(RunEvent, frozen=True, tag="operation.committed"):
    """A free-standing operation of the script is decided."""

    op_id: Text
    contributors: Annotated[dict[Id, Count], msgspec.Meta(max_length=MAX_MEMBERS)] = {}
    counted: bool = False
    weights: Annotated[dict[Id, float], msgspec.Meta(max_length=MAX_MEMBERS)] = {}
    elapsed_s: Seconds = 0.0
    reduce_s: float = 0.0
    decision_s: float = 0.0
    bytes_sent: Count = 0
    bytes_received: Count = 0

    def words(self) -> str:
        return (
            f"operation “{escaped(self.op_id, 60)}”: {len(self.contributors)} contributed, "
            f"{span_text(self.elapsed_s)}"
        )


class RoundUnmaskedEvent(RunEvent, frozen=True, tag="round.unmasked"):
    """The masks are off the sum of ``members``' vectors (``buckets``: whose were in each sum, where
    there are several). ``metrics``: the mean of each, by weight; ``next_clip``: the bound on the
    norms of the next vectors, if it moves.
    """

    entry: Count
    attempt: Count = 0
    members: Ids = ()
    weight: Count = 0
    metrics: Metrics = {}
    buckets: tuple[Ids, ...] = ()
    next_clip: float | None = None

    def words(self) -> str:
        buckets = f", in {len(self.buckets)} buckets" if self.buckets else ""
        means = "".join(
            f", mean {escaped(name, 64)} {value:.6g}" for name, value in self.metrics.items()
        )
        return f"the masks are off the sum of {len(self.members)} contributions{buckets}{means}"


class MaskingFailedEvent(RunEvent, frozen=True, tag="masking.failed"):
    """An attempt at a masked sum came to nothing."""

    entry: Count
    attempt: Count
    reason: Text

    def words(self) -> str:
        return f"a masked sum failed and is tried again: {escaped(self.reason)}"


class PrivacySpentEvent(RunEvent, frozen=True, tag="privacy.spent"):
    """So much is spent at this site, and ``left`` more contributions are allowed."""

    epsilon: float
    steps: Count
    left: int

    def words(self) -> str:
        more = "contribution is" if self.left == 1 else "contributions are"
        return f"epsilon {self.epsilon:.3g} is spent here; {self.left} more {more} allowed"


class EntryRecertifiedEvent(RunEvent, frozen=True, tag="entry.recertified"):
    """An entry is certified by the organiser's word: the ``removed`` never vote again."""

    entry: Count
    removed: Ids

    def words(self) -> str:
        return f"recertified without {len(self.removed)} members"


# ---- the state


class StateProgressEvent(RunEvent, frozen=True, tag="state.progress"):
    """The state is being fetched."""

    have: Count = 0
    total: Count = 0

    kept = False


class StateReadyEvent(RunEvent, frozen=True, tag="state.ready"):
    """The state of ``round`` is here."""

    round: Count

    def words(self) -> str:
        return f"the state of round {self.round} is here"


class StateRootEvent(RunEvent, frozen=True, tag="state.root"):
    """The Merkle root, in hex, of the state after ``entry``."""

    entry: Count
    root: Name

    quiet = True


class StateDivergedEvent(RunEvent, frozen=True, tag="state.diverged"):
    """A decided entry names another root for the state before it."""

    entry: Count


# ---- members and peers


class MemberRenewedEvent(RunEvent, frozen=True, tag="member.renewed"):
    """This node goes on as a new member, of this ``life``."""

    life: Count

    def words(self) -> str:
        return (
            "this home is an old copy: it goes on as a new member, after rounds that it had "
            "forgotten"
        )


class PeerMisbehavedEvent(RunEvent, frozen=True, tag="peer.misbehaved"):
    """A peer broke a rule of the protocol."""

    peer: Id
    reason: Text

    of_peers = True

    def words(self) -> str:
        return f"{short_peer(self.peer)} broke a rule: {escaped(self.reason)}"


class PeerConvictedEvent(RunEvent, frozen=True, tag="peer.convicted"):
    """A peer is banned here, by a proof."""

    peer: Id
    reason: Text


class PeerPathEvent(RunEvent, frozen=True, tag="peer.path"):
    """A peer is reached in another way than before; ``path`` "": no more."""

    peer: Id
    path: Annotated[str, msgspec.Meta(max_length=64)]

    def words(self) -> str:
        if not self.path:
            return f"{short_peer(self.peer)} is not reached"
        return f"{short_peer(self.peer)} is reached: {escaped(self.path)}"


class SumDisputedEvent(RunEvent, frozen=True, tag="sum.disputed"):
    """The owner of a part says that the ``wrong`` stated another sum of their site than its members
    contributed.
    """

    owner: Id
    wrong: Ids

    of_peers = True


class SumsDifferEvent(RunEvent, frozen=True, tag="sums.differ"):
    """These members state different sums of one part."""

    peers: Ids

    of_peers = True


class WorkJudgedEvent(RunEvent, frozen=True, tag="work.judged"):
    """A newcomer's work was looked into: ``fault``, "" for none; ``good``: rounds in a row."""

    peer: Id
    entry: Count
    good: Count
    fault: Text

    quiet = True
    of_peers = True


# ---- the run at this node


class RunWaitingEvent(RunEvent, frozen=True, tag="run.waiting"):
    """``what`` is waited for, ``of`` whom, what ``ends`` it, and ``since`` when (of 1970).

    ``missing``: the sites of a federated run without whom its round does not go on.
    """

    state: Name
    what: Text = ""
    of: Ids = ()
    ends: Text = ""
    since: float = 0.0
    round_open_s: float = 0.0
    missing: Ids = ()

    def words(self) -> str:
        if self.state == "finished":
            return f"finished: {escaped(self.ends)}"
        of = f", of {', '.join(map(short_peer, self.of))}" if self.of else ""
        return (
            f"{escaped(self.state)}, no round for {self.round_open_s:.0f} s: waits for "
            f"{escaped(self.what)}{of}; it ends when {escaped(self.ends)}"
        )


class RunGoesOnEvent(RunEvent, frozen=True, tag="run.goes_on"):
    """An entry is applied, after `RunWaitingEvent` was told."""

    def words(self) -> str:
        return "it goes on"


class RunStartingEvent(RunEvent, frozen=True, tag="run.starting"):
    """The script waits with its first step for the members that the run begins with."""

    there: Count
    wanted: Count

    def words(self) -> str:
        return (
            f"the script waits with its first step: {self.there} of {self.wanted} members are there"
        )


class RunBegunEvent(RunEvent, frozen=True, tag="run.begun"):
    """It waits no longer."""

    there: Count
    wanted: Count

    def words(self) -> str:
        return f"training begins; {self.there} of {self.wanted} members are there"


class RunPausedEvent(RunEvent, frozen=True, tag="run.paused"):
    """The owner of this machine lets no script train; ``why``, in words."""

    why: Text

    def words(self) -> str:
        return f"training is {escaped(self.why)}; the node serves the run"


class RunResumedEvent(RunEvent, frozen=True, tag="run.resumed"):
    """It may train again."""

    def words(self) -> str:
        return "training may go on"


class RunLeftEvent(RunEvent, frozen=True, tag="run.left"):
    """This machine has left the run."""

    def words(self) -> str:
        return "this machine has left the run"


# ---- the script


class ScriptAttachedEvent(RunEvent, frozen=True, tag="script.attached"):
    """A script trains here; ``averaging``: how the run averages, in words."""

    pid: Count = 0
    averaging: Text = ""

    def words(self) -> str:
        return f"a script trains, process {self.pid}"


class ScriptEndedEvent(RunEvent, frozen=True, tag="script.ended"):
    """Its connection ended. ``farewell``: whether it said that it goes, None where the node's end
    ended it; ``error``: its last words; ``finished``: the run is.
    """

    pid: Count = 0
    finished: bool = False
    farewell: bool | None = None
    error: Text = ""

    def words(self) -> str:
        error = f": {escaped(self.error, 300)}" if self.error else ""
        return f"the script has let go, process {self.pid}{error}"


class ScriptExitedEvent(RunEvent, frozen=True, tag="script.exited"):
    """Its process ended: ``how``, and whether that was no order of its owner's."""

    pid: Count
    how: Text
    failed: bool = False

    def words(self) -> str:
        return f"process {self.pid} {escaped(self.how, 300)}"


class ScriptMissingEvent(RunEvent, frozen=True, tag="script.missing"):
    """A script trained here in the node's last life, ``since`` then (of 1970) none does."""

    pid: Count
    since: float = 0.0
    how: Text = ""

    def words(self) -> str:
        return "a script trained here until the node ended, and none is attached now"


class ScriptUnattachedEvent(RunEvent, frozen=True, tag="script.unattached"):
    """A process joined so long ago, and has attached nothing."""

    pid: Count
    seconds: Seconds

    def words(self) -> str:
        return f"process {self.pid} joined {span_text(self.seconds)} ago and has attached nothing"


class ScriptIdleEvent(RunEvent, frozen=True, tag="script.idle"):
    """The script has made no step since it attached, so long ago."""

    seconds: Seconds

    def words(self) -> str:
        return f"the script has made no step in the {span_text(self.seconds)} since it attached"


class ScriptStillEvent(RunEvent, frozen=True, tag="script.still"):
    """The script makes no steps any more; ``step_s``: what one took; ``doing``: what its process
    does, in words.
    """

    pid: Count
    seconds: Seconds
    step_s: Seconds
    doing: Text

    def words(self) -> str:
        return (
            f"process {self.pid} has made no step for {span_text(self.seconds)}; "
            f"{escaped(self.doing, 300)}"
        )


class ScriptReportEvent(RunEvent, frozen=True, tag="script.report"):
    """What the script says of its training, once a round, after it."""

    metrics: Metrics

    quiet = True


class ScriptAnswerEvent(RunEvent, frozen=True, tag="script.answer"):
    """What the model after ``round`` rounds makes of a prompt of the manifest."""

    round: Count
    prompt: Text
    text: Text

    def words(self) -> str:
        return f"round {self.round}, {quoted(self.prompt, 200)} → {quoted(self.text, 1000)}"


class ScriptEvaluationEvent(RunEvent, frozen=True, tag="script.evaluation"):
    """The loss of the model after ``round`` rounds on held-out data, in nats a token."""

    round: Count
    tokens: Count
    held_out: float

    def words(self) -> str:
        return (
            f"held-out loss {self.held_out:.5g} after round {self.round}, on {self.tokens:,} tokens"
        )


class DataOrderEvent(RunEvent, frozen=True, tag="data.order"):
    """Who reads the same data in the same order as this script, for how many rounds running."""

    equal: Annotated[dict[Id, Count], msgspec.Meta(max_length=MAX_MEMBERS)]

    def words(self) -> str:
        if not self.equal:
            return "no other member reads what this script reads any more"
        return "the same data in the same order are read by this script and by " + ", ".join(
            map(short_peer, self.equal)
        )


# ---- what is wrong


class CodedEvent(RunEvent, frozen=True):
    """Something that is wrong and has a code (`atoll explain`)."""

    code: Text = ""
    message: Text = ""
    why: Text = ""
    hint: Text = ""

    @classmethod
    def of(cls, error: AtollError, run: str = "") -> CodedEvent:
        """As the error says it."""
        return cls(run=run, code=error.code, message=error.message, why=error.why, hint=error.hint)

    def words(self) -> str:
        return f"trouble: {escaped(self.code, 16)} {escaped(self.message, 2000)}"


class RunTroubleEvent(CodedEvent, frozen=True, tag="run.trouble"):
    """The run goes on as far as it can."""


class StorageTroubleEvent(CodedEvent, frozen=True, tag="storage.trouble"):
    """What must be written is refused, or a file is damaged."""


class RunFailedEvent(CodedEvent, frozen=True, tag="run.failed"):
    """The run does not go on at this node."""

    def words(self) -> str:
        return f"failed: {escaped(self.code, 16)} {escaped(self.message, 2000)}"


class EngineTroubleEvent(CodedEvent, frozen=True, tag="engine.trouble"):
    """The native engine cannot be had; Python does its work."""


class NodeFailedEvent(CodedEvent, frozen=True, tag="node.failed"):
    """The node cannot go on."""


class StorageMendedEvent(RunEvent, frozen=True, tag="storage.mended"):
    """What must be written is written again."""

    def words(self) -> str:
        return "what must be written is written again"


class VerdictRaisedEvent(RunEvent, frozen=True, tag="verdict.raised"):
    """A verdict holds of ``subject``, "" where it is of no peer (`verdicts`)."""

    code: Text
    subject: Name = ""
    said: Text = ""

    def words(self) -> str:
        return f"verdict {self.said_in_full()}"

    def said_in_full(self) -> str:
        """With its code, and of whom."""
        of = f"{short_peer(self.subject)} " if self.subject else ""
        return f"{escaped(self.code, 16)}: {of}{escaped(self.said, 2000)}"


class VerdictWithdrawnEvent(VerdictRaisedEvent, frozen=True, tag="verdict.withdrawn"):
    """It holds no more."""

    def words(self) -> str:
        return f"verdict holds no more: {self.said_in_full()}"


class NodeAddressesEvent(RunEvent, frozen=True, tag="node.addresses"):
    """This node can be reached elsewhere than before."""

    addresses: Annotated[tuple[Text, ...], msgspec.Meta(max_length=1024)] = ()


def _kinds(of: type[RunEvent]) -> Iterator[type[RunEvent]]:
    for each in of.__subclasses__():
        if each.__struct_config__.tag != each.__name__:  # else it stands for what some kinds share
            yield each
        yield from _kinds(each)


KINDS: Mapping[str, type[RunEvent]] = {
    str(each.__struct_config__.tag): each for each in _kinds(RunEvent)
}
"""The union: each class above, by the name of its kind."""


def document(event: RunEvent) -> dict[str, Any]:
    """As it is published and kept; JSON-able."""
    if isinstance(event, OtherEvent):
        return {**event.object, **({"missed": event.missed} if event.missed else {})}
    told = msgspec.to_builtins(event)
    return {key: value for key, value in told.items() if value or key not in _WHERE_ANY}


def read_event(found: Mapping[str, Any]) -> RunEvent:
    """The event that a document says, of any version of atoll. Never raises."""
    kind = found.get("event")
    try:
        return msgspec.convert(found, KINDS[kind] if isinstance(kind, str) else OtherEvent)
    except (KeyError, msgspec.ValidationError):
        match found.get("at"):
            case bool():
                at = math.nan
            case int() | float() as at if abs(at) < 1e18:
                pass
            case _:
                at = math.nan
        run, missed = found.get("run"), found.get("missed")
        return OtherEvent(
            at=float(at),
            run=run if isinstance(run, str) else "",
            missed=missed if isinstance(missed, int) else 0,
            object=found,
        )
