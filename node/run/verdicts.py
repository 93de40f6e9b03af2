"""What goes wrong in a run over many rounds, judged from its events: a state machine without a
clock or files.

`Verdicts.take` is given the events of a run in their order (`diary`), whose ``at`` is the time; and
`look` the time now, so that silence is noticed as well. Both return what has changed. The node
judges while it runs, `atoll watch` from the file.

A value stands apart from others, or from those before, where it is further from their median than
several times their median absolute deviation (scaled by `SIGMA`, as of a normal distribution). One
odd round is never a verdict: each needs the rounds that its page names.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from ...optim.outer.standing import WorthWatch
from ...optim.outer.worth import BEHIND, Worth
from ...optim.outer.worth import MUCH_WORSE_BY as WORTH_MUCH_WORSE_BY
from ...optim.outer.worth import WORSE_BY as WORTH_WORSE_BY
from ...optim.outer.worth import WORSE_OF as WORTH_WORSE_OF
from . import events as e
from .duty import ABSENT_S, OF_DUTY, READINGS, RETURN_S, Duty, DutyChange
from .duty import SLOWER as STEPS_SLOWER
from .same_order import RUNNING

SIGMA = 1.4826
KEPT = 64  # rounds, or reports, that a usual value is taken from
LEAST = 16  # of which so many must be there

SLOW, SLOW_OF, SLOWER = 5, 6, 2.0
MARGIN_S = 0.5  # and by so much longer
QUIET_S = 600.0
QUIET_ROUNDS = 20.0
FALLEN_S = 60.0
APART, APART_OF, DEVIATIONS = 8, 10, 6.0
DROPS, DROPS_OF = 3, 5
EDGE = 3
WORSE, WORSE_OF, WORSE_BY = 2, 5, 0.05
MUCH_WORSE_BY = 0.25  # once is enough, and twice `DEVIATIONS`
OF_MEDIANS = 0.7  # deviation of the difference of two medians of seven steps, over one step's
CLAIMS, CLAIMS_OF, CLAIMED = 3, 5, 64.0
MUCH_CLAIMED = 4096.0  # once is enough
GONE_S = 300.0  # a trouble that is not told again is over
MOST_APART = 4  # buffers in a verdict
CLOCK_S = 1500.0  # it is looked at every ten minutes


class VerdictPage(NamedTuple):
    """What a verdict means and what to do."""

    slug: str
    title: str
    text: str


PAGES: Mapping[str, VerdictPage] = {
    "V01": VerdictPage(
        "rounds-slow",
        "rounds have become slower",
        f"""\
{SLOW} of {SLOW_OF} rounds took more than {SLOWER:g} times the median of the last {KEPT}, and
more than chance explains. Where one member was the last in most of them, the verdict names it.
It is withdrawn after {SLOW_OF} usual rounds, and once {KEPT} rounds were as slow, which are
then the usual ones.

    atoll peers                  path, round trip and rate of each member
    atoll ping PEER              the one that is named
    atoll plan RUN.toml          settings that fit slower links""",
    ),
    "V02": VerdictPage(
        "link-fallen",
        "a link has fallen back",
        f"""\
A peer that was reached directly goes through a relay for more than {FALLEN_S:g} s, or this
machine's link is too slow for it to add up a part of the rounds. Bulk data over a relay is
slow.

    atoll netcheck               whether others can reach this machine
    atoll ping PEER""",
    ),
    "V03": VerdictPage(
        "loss-apart",
        "a loss stands apart",
        f"""\
In {APART} of {APART_OF} rounds the loss of one member was further above the others' than
{DEVIATIONS:g} deviations, or that of this script above its own before. Losses of others are
known in runs with a governor only ([train.outer] governor). The usual causes: other data,
another preprocessing, a learning rate that is too high, a damaged memory.

    atoll events RUN             since when
    atoll audit RUN --leaning 200        whose contributions point another way""",
    ),
    "V04": VerdictPage(
        "not-finite",
        "work is thrown away because it is not finite",
        f"""\
In {DROPS} of {DROPS_OF} rounds this script's update, or its loss, was NaN or infinite. Such an
update is not contributed, so this machine trains for nothing. Lower the learning rate, clip
gradients, or look for a damaged batch; with float16 use a GradScaler.""",
    ),
    "V05": VerdictPage(
        "clock-wrong",
        "this machine's clock is wrong",
        """\
Most peers that were asked say that this clock is off by more than five minutes. Signed records
carry the time: members refuse this machine's.

    sudo timedatectl set-ntp true
    atoll netcheck""",
    ),
    "V06": VerdictPage(
        "disk-refuses",
        "this machine's disk refuses what must be written, or has lost it",
        """\
A journal, a vote or a checkpoint could not be written, or a file is damaged. Rounds go on where
they can, without this machine's vote.

    df -h                        is it full?
    atoll ls                     what each run takes; atoll rm RUN forgets an old one
    atoll doctor""",
    ),
    "V07": VerdictPage(
        "quorum-edge",
        "one more loss stops the run",
        f"""\
In {EDGE} rounds in a row no more members were reachable than a decision needs. If one more
goes, nothing is decided until one is back.

    atoll peers                  who is lost: start it again
    atoll recertify RUN --without PEER   the organiser: it is lost for ever""",
    ),
    "V08": VerdictPage(
        "key-doubled",
        "another process has this machine's key",
        """\
Two live processes have one key: a home was copied, or an image with a key was started twice.
Neither votes. Stop one of the two; on its machine enter again with a key of its own: atoll join
INVITE --fresh-key.""",
    ),
    "V09": VerdictPage(
        "no-rounds",
        "no round is decided any more",
        f"""\
A script is attached, and for ten minutes, or {QUIET_ROUNDS:g} times as long as rounds usually
take, none was decided. The verdict says what the node waits for, where it has said so.

    atoll status                 what is waited for, of whom, and what would end it
    atoll doctor""",
    ),
    "V10": VerdictPage(
        "averaging-harms",
        "averaging makes the model worse",
        f"""\
In {WORSE} of {WORSE_OF} rounds, or once by {MUCH_WORSE_BY:.0%}, this script's loss right after it
had adopted a round's model was higher than its own just before, and higher than after the
adoption before, by more than the noise of its steps. The usual causes: outer momentum in a run
that started cold, an outer lr that is too high, rounds that are too long, a member that trains
on something else. Known from attachment.log(loss=...), in rounds of eight logged losses and more.

    [train.outer] preset = "plain-mean"  in a new manifest: no outer momentum
    [train] sync_every                   a smaller one
    [train.outer] governor = true        restarts momentum when an update or the loss jumps
    atoll new RUN.toml --from DIR        goes on from what atoll export RUN DIR wrote""",
    ),
    "V11": VerdictPage(
        "no-script",
        "no script trains here",
        f"""\
A script of this machine was attached to the run, and ended as nobody wanted: it was killed, its
process ended with an error, its connection ended without a farewell and it did not come back
within {ABSENT_S:g} s, or it did not attach within {RETURN_S:g} s after this node had come back. The
others go on without this machine. SIGKILL that nobody sent is the system's, for want of memory:
dmesg names the process. A script that closes its swarm, the end of the run, a pause and leaving
the run are no fault: it is withdrawn then, and when a script attaches.

    python train.py              your own script again, as it was started
    atoll join RUN               the built-in script, where the run's model is one of atoll's
    atoll pause RUN              serve the run, train nothing; no verdict then
    atoll events RUN             what was before
    atoll logs                   what the node says of it""",
    ),
    "V12": VerdictPage(
        "steps-slower",
        "this script's steps are many times slower than before",
        f"""\
In each of five minutes in a row steps were slow, and their median is at least {STEPS_SLOWER:g}
times what it was half an hour or more before, in the same script. The usual causes: a loader that
waits for a disk or a network, memory that swaps, another process on the same device, a device
that throttles for heat. Longer batches or sequences, by your own will, look the same.

    atoll status                 the run, and this script's numbers
    atoll events RUN --all       step_s, once a minute""",
    ),
    "V13": VerdictPage(
        "gpu-idle",
        "this script's GPU idles",
        f"""\
The driver says in {READINGS} readings in a row, one a minute, that no kernel ran nearly all of the
time, though the script makes steps. The usual causes: data are not there in time (more workers,
pinned memory), or the model runs on another device than was meant.

    nvidia-smi                   what the device does
    atoll status                 the run, and this script's numbers""",
    ),
    "V14": VerdictPage(
        "not-counted",
        "a script trains and its steps are not counted",
        """\
Gradients reach the attached model, and no step of an attached optimizer follows that trains it:
nothing of this machine's training is contributed. The verdict names what was seen. The usual
causes: an optimizer that was made again after attach(), one whose step() is never called, weights
that were loaded with assign=True, weights that the script sets itself, a copy of the model that is
trained in place of it. Or steps are counted with fewer samples than a shard gave for them, or on
batches that it gave before, 64 in a row. The script's own log names the cure at the same time. It
is withdrawn with the next counted step, of all its samples.

    attach(model, optimizer, swarm)      with the optimizer that steps, after weights were loaded
    attach(model, None, swarm)           and attachment.step() after each step""",
    ),
    "V15": VerdictPage(
        "no-progress",
        "contributions hold no progress",
        """\
This script's steps are counted, and what it contributes is exactly zero: its weights are the
anchor's. The verdict names the cause that was found: the optimizer steps tensors that are not the
model's any more, the learning rate is 0, no gradient reaches the parameters or none requires one,
every gradient is 0, or steps are smaller than weights of bfloat16 can add. Such a contribution
holds back the mean of all. It is withdrawn with the next contribution that holds some.

    attachment.log(loss=loss)            does the loss fall?""",
    ),
    "V16": VerdictPage(
        "weights-moved",
        "weights that were not trained are left out",
        """\
Something other than the attached optimizer changed the script's weights, once and not as a habit: a
checkpoint that was loaded in the middle of the run, averaged or best weights that a callback left
in the model, tensors that were replaced (load_state_dict(assign=True)), an optimizer over other
tensors. That is no progress: the work since the last round was dropped, and the model went back to
the run's. The script's log names the tensors. It is withdrawn after five rounds without one.

    attachment.finish()                  before best or averaged weights are loaded at the end
    attachment.moved("why")              next to a change that is meant
    attach(...)                          after weights are loaded, not before""",
    ),
    "V17": VerdictPage(
        "same-data",
        "a member reads the same data in the same order",
        f"""\
In {RUNNING} rounds running the first batch of a member's script was this machine's, too; of a small
data set whose batches repeat in up to 20. Both compute the same gradients: the mean gains nothing
by one of the two, and the run's position counts their samples twice. The usual cause is one seed
for all members, or a loader that does not shuffle. Known of scripts that read by swarm.shard, and
of Trainer and Lightning, by digests of 16 bytes; never in federated runs, nor with [privacy] or
[secure]. It is withdrawn with the first batch that differs. A member can say it of itself only.

    data = swarm.shard(loader)                   samples are leased to one member each
    AtollCallback(swarm, shard=True)             the same in Trainer
    AtollLightningCallback(swarm, shard=True)    and in Lightning
    torch.manual_seed(crc32(swarm.peer.encode()))    or an order of its own for each""",
    ),
    "V18": VerdictPage(
        "buffers-apart",
        "buffers of the model are not the same at all members",
        """\
A buffer of this script's model is learnt and not averaged, such as a codebook, a normaliser or an
observer: each member has its own, so that the run's model is another one at each. Or other members
brought another value of a buffer that does not change. Or the script changed a frozen parameter, as
by an adapter that was merged into it and left there. The verdict names them; the script's log says
which members differ. Which buffers are averaged is part of the run, so a new one is the
cure of the first; "own" declares that members are to differ, such as in a queue of their samples.

    [model] buffers = { "codebook" = "mean" }    in the manifest of a new run: averaged
    [model] buffers = { "queue" = "own" }        this member's own, and not told of
    atoll new RUN.toml --from DIR        goes on from what atoll export RUN DIR wrote""",
    ),
    "V19": VerdictPage(
        "parts-outside",
        "something is trained here that is no part of the run",
        """\
Parameters that were frozen when the script attached, or were not there, are trained by now. They
are trained in this member only, and what is exported has them as they were. The script's log names
them. It is withdrawn once they have been frozen for five rounds.

    attach(..., include=["backbone.*"])  in all scripts of a new run: frozen, and in the run""",
    ),
    "V20": VerdictPage(
        "parts-frozen",
        "parts of the model are frozen here and trained by others",
        """\
Parameters of the run require no gradient in this script since some rounds, and the run's model goes
on moving there: other members train them. This member contributes no change of them, which holds
back the mean of what others learn there. Where all members freeze them nothing is wrong, and
nothing is raised; nor for parts that are frozen in turns (a GAN, say). The script's log names them.
It is withdrawn once they are trained again.

    parameter.requires_grad_(True)       trains them again
    atoll new RUN.toml --from DIR        a run in which they are frozen from the start""",
    ),
    "V21": VerdictPage(
        "averaging-worthless",
        "averaging does not help",
        f"""\
Members evaluate the model on held-out data just before and just after they adopt a round's model
([evaluate]), and the log holds what they find. The model of a round was worse than their own
weights by more than {BEHIND:.0%} in as many readings in a row as the manifest says, or worse than
both these and the model before by {WORTH_WORSE_BY:.0%} twice in {WORTH_WORSE_OF} readings, or once
by {WORTH_MUCH_WORSE_BY:.0%}: medians, less half of the range over members. The usual causes: outer
momentum in a run that started cold, an outer lr that is too high, rounds that are too long. With
[train.outer] governor = true the outer step takes the plain mean from then on, at all members from
the same entry, which the verdict names; under [quorum] lying it does not, and the verdict is raised
only where any members without so many would raise it. It is withdrawn after as many readings in a
row without fault.

    [train.outer] preset = "plain-mean"  in a new manifest: no outer momentum; or warmup = 20
    [train] sync_every                   a smaller one
    [train.outer] governor = true        takes the plain mean by itself
    atoll new RUN.toml --from DIR        goes on from what atoll export RUN DIR wrote""",
    ),
    "V22": VerdictPage(
        "script-stands-still",
        "the script here lives and makes no step",
        """\
A script of this machine is attached and has made steps; now it makes none, and waits for no round.
That is said after ten minutes in which its process took no processor time, after an hour where it
took some (an evaluation does), and never before twenty of its usual steps, nor before twice the
longest time that it was as silent before. The others go on without this machine. The usual causes:
a loader whose workers are gone, a deadlock, a device or a network file system that does not
answer, a process that was stopped, a rank of its own job that is gone. It is withdrawn with the
next minute of steps, when the script ends or attaches again, and by a pause.

    ps -o stat,time,wchan -p PID  what the process does: PID as atoll status says it
    atoll events RUN             since when
    atoll pause RUN              serve the run, train nothing; no verdict then""",
    ),
    "V23": VerdictPage(
        "samples-claimed",
        "a member claims many times the samples of the others",
        f"""\
In {CLAIMS} of {CLAIMS_OF} rounds a member said that its contribution stands for more than
{CLAIMED:g} times as many samples as the median of the others', or once for {MUCH_CLAIMED:g} times
as many. Samples are a member's own word; nobody can check them. They are its weight in a plain
mean, and what attachment.position counts: with claims of a hundred times the others' in a run of
five a learning-rate schedule ends 21 times as early. It may be so: one machine is that much
faster, or a site has that many examples; then nothing is wrong. Or batch_size of its script counts
tokens where those of others count rows. It is withdrawn after {CLAIMS_OF} rounds without, or when
it leaves.

    attach(..., batch_size=N)            the same unit in all scripts: rows, or tokens
    [robust] rule = "trimmed_mean"       in a new manifest: heads count, not samples
    schedule by attachment.round         moves once a round, whatever anybody claims
    atoll ban PEER                       by the organiser, for everybody""",
    ),
    "V24": VerdictPage(
        "site-missing",
        "a site of a federated run is missing",
        """\
A round of this run waits for a site that is not heard, or too few sites are left for a masked sum.
The verdict names it, and says what the round needs and when it goes on: without the site, 15
seconds after it was heard last, or where a sum needs it only once it is back. What a site has
contributed before stays in the model. It is withdrawn with the next round.

    atoll status                         what is waited for, of whom, and what would end it
    atoll validate RUN.toml --peers 3    how many of three sites may be away
    atoll invite new RUN --name SITE     for a site whose machine or disk is lost""",
    ),
}
NOT_COUNTED: Mapping[str, str] = {
    "uncounted_replaced": "the model holds other tensors than those that its optimizer steps",
    "uncounted_foreign": "weights change, and not by a step of the attached optimizer",
    "uncounted_nothing": "the script goes on, and nothing reaches its attached model: a copy?",
    "uncounted_without": "the script sets weights without gradients, and no step is counted",
    "uncounted_partial": "only some of the attached optimizers step",
    "uncounted_cleared": "gradients are cleared, and no step changes the weights",
    "uncounted_adding": "gradients add up for ten minutes or longer, and no step is counted",
}
"""Metrics in which a script reports training that is not counted (`optim.script.uncounted`): how
many backwards there were since a step was. 0: it is over."""
WITHOUT_GRADIENTS = ("uncounted_nothing", "uncounted_without")
STILL: Mapping[str, str] = {
    "still_replaced": "the model holds other tensors than those that its optimizer steps",
    "still_frozen": "no parameter requires a gradient",
    "still_gradients": "no gradient reaches the parameters",
    "still_zero": "every gradient is 0",
    "still_rate": "the learning rate is 0",
    "still_rounding": "steps are smaller than the weights' type can add",
    "still_other": "weights are at the anchor again",
}
"""Metrics in which it reports how many contributions in a row were zero, and why. 0: it is over."""
PARTS: Mapping[str, tuple[str, str]] = {
    "parts_outside": ("V19", "parameters are trained here and are no part of the run: {:.0f}"),
    "parts_frozen": ("V20", "{:.0%} of what the run trains is frozen here, and others train it"),
}
"""Metrics in which it reports what it trains otherwise than at `attach`
(`optim.script.training_parts`). 0: it is over."""
BUFFERS: Mapping[str, str] = {
    "buffer_learnt/": "is learnt here and not averaged",
    "buffer_differs/": "is another one at {:.0f} other members",
    "frozen_changed/": "is frozen, and changed here by the script",
}
"""Beginnings of metrics in which it reports by name on buffers (`optim.script.buffer_watch`) and on
frozen parameters outside of the run (`optim.script.frozen`)."""
OF_A_SCRIPT = ("V14", "V15", "V18", "V19", "V20")
"""Verdicts that end with the script that they are about."""
TROUBLES = {"E120": "V05", "E501": "V06", "E303": "V06", "E308": "V08"}
"""Verdicts that a trouble of the node is, as long as it is told again."""


class Verdict(NamedTuple):
    """One that stands. ``subject``: whom it is about, "" where nobody; ``since``: of 1970."""

    code: str
    subject: str
    since: float
    said: str


class VerdictChange(NamedTuple):
    """A verdict is ``raised`` or, False, withdrawn, at ``at``."""

    raised: bool
    verdict: Verdict
    at: float


class Usual:
    """The last values that were not odd, and how many of the newest were."""

    def __init__(self, odd: int, of: int) -> None:
        self._values: deque[float] = deque(maxlen=KEPT)
        self._odd: deque[bool] = deque(maxlen=of)
        self._apart: deque[float] = deque(maxlen=KEPT)  # odd ones in a row of odd ones
        self._least = odd

    def take(self, value: float, least_ratio: float, least: float) -> bool:
        """Whether so many of the newest are odd: above the median by ``least_ratio``, by ``least``
        and by `DEVIATIONS`. What stays odd for `KEPT` values is the usual from then on.
        """
        odd = len(self._values) >= LEAST and value > self.limit(least_ratio, least)
        if odd:
            self._apart.append(value)
            if len(self._apart) == KEPT:
                self._values = deque(self._apart, KEPT)
                self._apart.clear()
                self._odd.clear()
        else:
            self._values.append(value)
        self._odd.append(odd)
        if not any(self._odd):
            self._apart.clear()
        return sum(self._odd) >= self._least

    def limit(self, least_ratio: float, least: float) -> float:
        """Above this a value is odd."""
        middle = self.median
        return middle + max(least_ratio * abs(middle), least, DEVIATIONS * deviation(self._values))

    @property
    def median(self) -> float:
        """Of the usual values; 0 before there are any."""
        return median(self._values) if self._values else 0.0

    @property
    def calm(self) -> bool:
        """Whether none of the newest is odd."""
        return not any(self._odd)


def deviation(values: Sequence[float] | deque[float]) -> float:
    """A standard deviation, by the median of the distances from the median."""
    middle = median(values)
    return SIGMA * median(abs(value - middle) for value in values)


class Verdicts:
    """Of one run, as one of its members sees it."""

    def __init__(self) -> None:
        self.standing: dict[tuple[str, str], Verdict] = {}
        self._changes = list[VerdictChange]()
        self._rounds = Usual(SLOW, SLOW_OF)
        self._last: deque[str] = deque(maxlen=SLOW_OF)  # who was the slowest in each
        self._own = Usual(APART, APART_OF)
        self._others: dict[str, deque[bool]] = {}
        self._claimed: dict[str, deque[bool]] = {}  # by peer: many times the others' samples
        self._dropped, self._drops = 0.0, deque[bool](maxlen=DROPS_OF)
        self._moved, self._unmoved = 0.0, 0  # changes of the weights; rounds since the last one
        self._apart = dict[str, str]()  # by metric: which buffers are, in words
        self._edge = 0
        self._averaging = ""  # the settings, in words
        self._adopted: float | None = None  # this script's loss right after the last adoption
        self._worse, self._noise = deque[bool](maxlen=WORSE_OF), deque[float](maxlen=WORSE_OF)
        self._relayed: dict[str, float] = {}  # since when, of peers that were reached directly
        self._direct = set[str]()
        self._reported_at: dict[str, float] = {}  # of each trouble
        self._scripts = 0
        self._paused = self._finished = False
        self._decided_at = 0.0
        self._waits = ""
        self._trains = False  # nobody has contributed to the open round yet
        self._worth = WorthWatch()
        self._duty = Duty()

    def take(self, event: e.RunEvent) -> list[VerdictChange]:
        """An event; what follows from it."""
        if not math.isfinite(event.at):
            return []
        self._take(event, event.at)
        self._of_duty(self._duty.take(event, event.at), event.at)
        return self.look(event.at)

    def look(self, now: float) -> list[VerdictChange]:
        """What time alone brings: links that stay relayed, troubles that are over, silence."""
        for peer, since in self._relayed.items():
            if now - since >= FALLEN_S:
                self._raise(
                    "V02", peer, now, "is reached through a relay, and was reached directly"
                )
        for code, at in list(self._reported_at.items()):
            if now - at > (CLOCK_S if code == "V05" else GONE_S):
                del self._reported_at[code]
                self._withdraw(code, "", now)
        expected = self._scripts > 0 and not self._paused and not self._finished
        if self._trains and not self._rounds.median:  # how long the first round takes is open
            expected = False
        silent_s = now - self._decided_at if expected and self._decided_at else 0.0
        if silent_s > QUIET_S and silent_s > QUIET_ROUNDS * self._rounds.median:
            waits = f"; {self._waits}" if self._waits else ""
            self._raise("V09", "", now, f"no round for {silent_s / 60:.0f} min{waits}")
        elif not expected:
            self._withdraw("V09", "", now)
        self._of_duty(self._duty.look(now), now)
        changes, self._changes = self._changes, []
        return changes

    def _take(self, event: e.RunEvent, at: float) -> None:
        match event:
            case e.RoundCommittedEvent() if event.contributors:
                self._round(event, at)
            case e.ReductionTimedEvent() if event.slowest:
                self._last.append(event.slowest.peer)
            case e.ScriptReportEvent():
                self._adoption(event.metrics, at)
                self._silence(event.metrics, at)
                self._model(event.metrics, at)
                self._report(event.metrics, at)
            case e.ScriptAttachedEvent():
                self._averaging, self._adopted = event.averaging, None
                self._moved = 0.0
                self._scripts += 1
                self._decided_at = at
            case e.DataOrderEvent():
                self._order(event.equal, at)
            case e.ScriptEndedEvent():
                self._scripts = max(0, self._scripts - 1)
                self._order({}, at)
                self._apart.clear()
                for code in OF_A_SCRIPT:
                    self._withdraw(code, "", at)
            case e.RunPausedEvent() | e.RunResumedEvent():
                self._paused, self._decided_at = isinstance(event, e.RunPausedEvent), at
            case e.RunWaitingEvent():
                self._finished = event.state == "finished"
                self._trains = event.state == "training"
                self._waits = f"waits for {event.what}"
                self._missed(event, at)
                if event.state == "no quorum":
                    self._edge = 0
                    self._withdraw("V07", "", at)  # the loss has come, and stops the run
                if event.state == "doubled":
                    self._trouble("V08", at, "another process has this node's key")
            case e.RunGoesOnEvent():
                self._missed(None, at)
            case e.PeerPathEvent():
                self._path(event.peer, event.path, at)
            case e.RoundPartEvent():
                if event.part == 0:
                    self._raise("V02", "", at, "this machine's link is too slow to add up a part")
                else:
                    self._withdraw("V02", "", at)
            case e.RunTroubleEvent() | e.StorageTroubleEvent() if event.code in TROUBLES:
                self._trouble(TROUBLES[event.code], at, event.message)
            case e.StorageMendedEvent():
                self._mended("V06", at)
            case _:
                pass

    def _of_duty(self, changes: Sequence[DutyChange], now: float) -> None:
        """What `duty` finds of this machine's own part."""
        for code, said, since in changes:
            if said is None:
                self._withdraw(code, "", now)
            elif (code, "") not in self.standing:
                verdict = self.standing[code, ""] = Verdict(code, "", since, said)
                self._changes.append(VerdictChange(True, verdict, now))

    def _missed(self, event: e.RunWaitingEvent | None, at: float) -> None:
        """Which sites a round of a federated run waits for in vain, and what it needs."""
        missing = {*event.missing} if event is not None else set[str]()
        for code, peer in [*self.standing]:
            if code == "V24" and peer not in missing:
                self._withdraw(code, peer, at)
        if event is not None:
            for peer in sorted(missing):
                self._raise("V24", peer, at, f"is missing: it ends when {event.ends}")

    def _trouble(self, code: str, at: float, text: str) -> None:
        self._reported_at[code] = at
        self._raise(code, "", at, text)

    def _mended(self, code: str, at: float) -> None:
        self._reported_at.pop(code, None)
        self._withdraw(code, "", at)

    def _round(self, event: e.EntryCommittedEvent, at: float) -> None:
        if self._reported_at.get("V08", at) < self._decided_at:
            self._mended("V08", at)  # a node whose key another process has decides nothing
        self._decided_at, self._waits = at, ""
        self._withdraw("V09", "", at)
        seconds = event.elapsed_s
        before = self._rounds.median
        caught_up = not event.counted and seconds < max(MARGIN_S, before / SLOWER)
        if caught_up:
            pass  # decided before this node heard of it: it took the others longer
        elif self._rounds.take(seconds, SLOWER - 1, MARGIN_S):
            self._raise(
                "V01", "", at, f"rounds take {seconds:.1f} s, {before:.1f} s before{self._who()}"
            )
        elif self._rounds.calm:
            self._withdraw("V01", "", at)
        self._samples(event.contributors, event.members, at)
        self._losses(event.losses, at)
        if event.worth is not None:
            self._evaluated(event.worth, event, at)
        reach = event.reach
        if reach and reach.members > 2 and reach.reachable <= reach.needed:
            self._edge += 1
        elif reach:
            self._edge = 0
            self._withdraw("V07", "", at)
        if reach and self._edge >= EDGE:
            self._raise(
                "V07",
                "",
                at,
                (
                    f"{reach.reachable} of {reach.members} members are reachable, and "
                    f"{reach.needed} are needed"
                ),
            )

    def _samples(self, said: Mapping[str, float], members: Sequence[str], at: float) -> None:
        """What each contribution is said to stand for, against the others of its round."""
        for peer in self._claimed.keys() - set(members):
            del self._claimed[peer]
            self._withdraw("V23", peer, at)
        for peer, samples in said.items() if len(said) > 1 else ():
            others = median(count for other, count in said.items() if other != peer)
            times = samples / max(others, 1)
            claims = self._claimed.setdefault(peer, deque(maxlen=CLAIMS_OF))
            claims.append(times > CLAIMED)
            if sum(claims) >= CLAIMS or times > MUCH_CLAIMED:
                share = samples / sum(said.values())
                self._raise(
                    "V23",
                    peer,
                    at,
                    (
                        f"says that its contribution stands for {samples:.4g} samples, {times:.4g} "
                        f"times the others' median: {share:.0%} of a plain mean"
                    ),
                )
            elif len(claims) == CLAIMS_OF and not any(claims):
                self._withdraw("V23", peer, at)

    def _who(self) -> str:
        """Who was the last in most of the newest rounds, in words."""
        for peer in set(self._last):
            if len(self._last) == SLOW_OF and self._last.count(peer) >= SLOW:
                return f"; the last one is {peer}"
        return ""

    def _losses(self, losses: Mapping[str, float], at: float) -> None:
        """Of all members, in a run that records them: against those of the same round."""
        for peer in self._others.keys() - losses.keys():
            del self._others[peer]
            self._withdraw("V03", peer, at)
        if len(losses) < 4:
            return
        middle = median(losses.values())
        most = middle + max(0.05 * abs(middle), DEVIATIONS * deviation(list(losses.values())))
        for peer, loss in losses.items():
            differences = self._others.setdefault(peer, deque(maxlen=APART_OF))
            differences.append(not loss <= most)
            if sum(differences) >= APART:
                self._raise(
                    "V03", peer, at, f"has a loss of {loss:.4g}, the others' median is {middle:.4g}"
                )
            elif not any(differences):
                self._withdraw("V03", peer, at)

    def _report(self, metrics: Mapping[str, float], at: float) -> None:
        """Of this machine's script, once a round."""
        if metrics.keys() <= OF_DUTY:
            return
        moved = self._weights(metrics, at)
        dropped = float(metrics.get("dropped", 0))
        loss = metrics.get("loss")
        bad = (dropped > self._dropped and not moved) or (
            loss is not None and not math.isfinite(loss)
        )
        self._dropped = dropped
        self._drops.append(bad)
        if sum(self._drops) >= DROPS:
            self._raise("V04", "", at, f"{dropped:.0f} samples were thrown away so far")
        elif not any(self._drops):
            self._withdraw("V04", "", at)
        if loss is None or not math.isfinite(loss):
            return
        before = self._own.median
        if self._own.take(float(loss), 0.1, 0.0):
            self._raise("V03", "", at, f"this script's loss is {loss:.4g}, {before:.4g} before")
        elif self._own.calm:
            self._withdraw("V03", "", at)

    def _silence(self, metrics: Mapping[str, float], at: float) -> None:
        """What the script has found of training that is not counted, or holds no progress."""
        if (short := metrics.get("samples_short", 0.0)) > 0:
            text = f"steps count fewer samples than the shard gives: {short:.0f} are left out"
            self._raise("V14", "", at, text)
        elif "samples_short" in metrics:
            self._withdraw("V14", "", at)
        if (steps := metrics.get("samples_zero", 0.0)) > 0:
            text = f"each of {steps:.0f} steps in a row was declared to be of no samples"
            self._raise("V14", "", at, text)
        elif "samples_zero" in metrics:
            self._withdraw("V14", "", at)
        if (steps := metrics.get("samples_again", 0.0)) > 0:
            text = (
                f"each of {steps:.0f} steps in a row was made on batches that the shard gave before"
            )
            self._raise("V14", "", at, text)
        elif "samples_again" in metrics:
            self._withdraw("V14", "", at)
        for code, causes in (("V14", NOT_COUNTED), ("V15", STILL)):
            for name in causes.keys() & metrics.keys():
                if not (times := float(metrics[name])) > 0:
                    self._withdraw(code, "", at)
                elif code == "V14":
                    of = "iterations" if name in WITHOUT_GRADIENTS else "backwards"
                    said = f"{causes[name]}: {times:.0f} {of} and no counted step"
                    self._raise(code, "", at, said)
                else:
                    self._raise(
                        code, "", at, f"{times:.0f} contributions in a row are zero: {causes[name]}"
                    )

    def _order(self, equal: Mapping[str, int], at: float) -> None:
        """Who reads what this machine's script reads (`same_order`)."""
        for code, peer in list(self.standing):
            if code == "V17" and peer not in equal:
                self._withdraw(code, peer, at)
        for peer, rounds in equal.items():
            text = (
                "reads the same data in the same order as this machine's script: the first batches "
                f"of {int(rounds)} rounds running were equal to what is read here"
            )
            self._raise("V17", str(peer), at, text)

    def _model(self, metrics: Mapping[str, float], at: float) -> None:
        """What of the script's model is not as the run has it."""
        for name in PARTS.keys() & metrics.keys():
            code, text = PARTS[name]
            if (value := float(metrics[name])) > 0:
                self._raise(code, "", at, text.format(value))
            else:
                self._withdraw(code, "", at)
        for name, value in metrics.items():
            text = next((BUFFERS[start] for start in BUFFERS if name.startswith(start)), "")
            if text and float(value) > 0:
                self._apart[name] = f"{name.partition('/')[2]} {text.format(float(value))}"
            elif text:
                self._apart.pop(name, None)
        if self._apart:
            self._raise("V18", "", at, "; ".join(list(self._apart.values())[:MOST_APART]))
        else:
            self._withdraw("V18", "", at)

    def _weights(self, metrics: Mapping[str, float], at: float) -> bool:
        """Whether work was dropped since the weights were changed by others (`optim.script`)."""
        changes = float(metrics.get("moved", 0))
        moved, self._moved = changes > self._moved, changes
        self._unmoved = 0 if moved else self._unmoved + 1
        if moved:
            step, far = float(metrics.get("moved_step", 0)), float(metrics.get("moved_by", 0))
            how = f"changed by {far:.3g} times the length of a step" if far else "replaced"
            self._withdraw("V16", "", at)
            text = f"this script's weights were {how}, after its step {step:.0f}"
            self._raise("V16", "", at, text)
        elif self._unmoved >= DROPS_OF:
            self._withdraw("V16", "", at)
        return moved

    def _adoption(self, metrics: Mapping[str, float], at: float) -> None:
        """What adopting an anchor did to this script's loss (`optim.script.adoption`). Its own loss
        just before tells averaging from training that goes wrong by itself; the loss after the
        adoption before tells harm from data that differ between members, with whom every adoption
        costs the members' own fit.
        """
        if "loss_after" not in metrics:
            return
        before, after = metrics.get("loss_before"), float(metrics["loss_after"])
        last, self._adopted = self._adopted, after
        self._noise.append(float(metrics["loss_noise"]))
        if last is None or before is None:
            return
        held_against = max(before, last)
        rise, unit = after - held_against, DEVIATIONS * OF_MEDIANS * median(self._noise)
        self._worse.append(rise > max(unit, WORSE_BY * abs(held_against)))
        if sum(self._worse) >= WORSE or rise > max(2 * unit, MUCH_WORSE_BY * abs(held_against)):
            settings = f" ({self._averaging})" if self._averaging else ""
            self._raise(
                "V10",
                "",
                at,
                f"the loss was {before:.4g} before a round's model was adopted and {after:.4g} "
                f"after it, {last:.4g} after the one before{settings}",
            )
        elif not any(self._worse):
            self._withdraw("V10", "", at)

    def _evaluated(self, told: e.WorthReading, event: e.EntryCommittedEvent, at: float) -> None:
        """What members found by evaluations (`optim.outer.worth`)."""
        worth = Worth(told.anchor, told.own, told.behind, told.worse, told.members)
        plain = event.plain_since
        if standing := self._worth.take(event.fragment, worth, told.rounds, plain):
            settings = f" ({self._averaging})" if self._averaging and not plain else ""
            self._raise("V21", "", at, standing + settings)
        else:
            self._withdraw("V21", "", at)

    def _path(self, peer: str, path: str, at: float) -> None:
        if path and path != "relay":
            self._direct.add(peer)
            self._relayed.pop(peer, None)
            self._withdraw("V02", peer, at)
        elif path == "relay" and peer in self._direct:
            self._relayed.setdefault(peer, at)
        elif not path:  # gone: no link at all is no fallen link
            self._relayed.pop(peer, None)
            self._direct.discard(peer)
            self._withdraw("V02", peer, at)

    def _raise(self, code: str, subject: str, at: float, text: str) -> None:
        if (code, subject) in self.standing:
            return
        verdict = self.standing[code, subject] = Verdict(code, subject, at, text)
        self._changes.append(VerdictChange(True, verdict, at))

    def _withdraw(self, code: str, subject: str, at: float) -> None:
        verdict = self.standing.pop((code, subject), None)
        if verdict is not None:
            self._changes.append(VerdictChange(False, verdict, at))


def judge(events: Iterator[e.RunEvent]) -> tuple[Verdicts, list[VerdictChange]]:
    """All events of a file."""
    verdicts = Verdicts()
    return verdicts, [change for event in events for change in verdicts.take(event)]
