"""The arms of bench_methods.py: settings by id, and one cell: a method trained on one seed, through
atoll's public classes and LocalSwarm.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from random import Random
from typing import Any

import msgspec
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from atoll.collectives.api import enter
from atoll.collectives.codec_costs import round_bytes_per_value
from atoll.collectives.cutting import cut
from atoll.collectives.outcomes import Outcome
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.manifest.gpt import GptConfig
from atoll.node.recipes.data import batch, split, unique_paragraphs
from atoll.node.recipes.gpt import GPT
from atoll.node.simulation.local_member import LocalMember, LocalPending
from atoll.optim import DiLoCo, GradientAveraging, LocalSGD, attach
from atoll.optim.lab.gossip import NoLoCo, TwoLevel, over_group, over_swarm
from atoll.optim.outer import presets
from atoll.optim.rounds.composing import flat_vector

PRESETS = {preset.name: preset.outer for preset in presets.PRESETS}
SHORT = PRESETS["short"]
MULOCO = PRESETS["short-muloco"]
MUON_LR = 0.032
# virtual; links are then faster than what a node needs to take part
# (`collectives/round/patience.py`)
STEP_S = 0.1
LATENCY_S = 0.005
TRANSFER_SHARE = (
    0.3  # of a round's compute: how long an exchange in fp32 takes on the simulated links
)
# inner steps of the ten of a round, in which such an exchange is over; with `…_round` a result is a
# whole round late
DELAY = 3


@dataclass(frozen=True)
class Size:
    """A model and its training: `optimization.md`'s setting S, and a larger one."""

    config: GptConfig
    batch: int
    steps: int
    synchronous: int  # the first steps, in all arms
    lr: float
    points: int = 0  # of the curve of held-out loss


SIZES = {
    "42k": Size(GptConfig(width=32, layers=2, heads=2, context=32), 4, 400, 100, 8e-3),
    "1m": Size(GptConfig(width=144, layers=4, heads=4, context=64), 4, 400, 100, 2e-3, 10),
}


@dataclass(frozen=True)
class Method:
    """What differs from the base: settings, and things that are done to the swarm."""

    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    sync_every: int = 10
    peers: int = 4
    lost: float = 0.0  # share of contributions that do not arrive
    inner_lr: float = 0.0  # 0: the size's
    newcomers: bool = False  # in each round a member, in turn, begins with no inner moments
    muon_lr: float = 0.0  # of the blocks' matrices, by Muon; 0: AdamW trains them like the rest
    reference: str = "ddp"


METHODS = {
    "ddp": Method(),
    "solo": Method(),
    "diloco": Method(),
    "diloco_h20": Method(sync_every=20),
    "diloco_h100": Method(sync_every=100),
    "rejoin": Method(sync_every=20, newcomers=True, reference="diloco_h20"),
    "rejoin_h100": Method(sync_every=100, newcomers=True, reference="diloco_h100"),
    "diloco_published": Method({"outer": OuterSettings("nesterov", 0.7, 0.9)}),
    "diloco_bf16": Method(
        {"outer": msgspec.structs.replace(SHORT, momentum_dtype="bf16")}, reference="diloco"
    ),
    "diloco_published_bf16": Method(
        {"outer": OuterSettings("nesterov", 0.7, 0.9, momentum_dtype="bf16")},
        reference="diloco_published",
    ),
    "diloco_int8": Method({"codec": "int8"}, reference="diloco"),
    "diloco_int4": Method({"codec": "int4"}, reference="diloco"),
    "diloco_int4_ef": Method({"codec": "int4", "feedback": True}, reference="diloco"),
    "diloco_2bit_ef": Method({"codec": "stat2"}, reference="diloco"),
    "diloco_2bit_both": Method({"codec": "stat2_both"}, reference="diloco"),
    "sparse_both": Method(
        {"codec": "sparse64_both", "outer": OuterSettings("sgd", 3.0)}, sync_every=5
    ),
    "sparseloco": Method({"codec": "sparse128", "outer": PRESETS["short-sparse"]}),
    "sparseloco_published": Method(
        {"codec": "sparse64", "feedback_kept": 0.95, "outer": PRESETS["sparse"]}
    ),
    "diloco_lost30": Method(lost=0.3, reference="diloco"),
    "adam": Method({"outer": OuterSettings("adam", 0.02, 0.6, 0.95)}),
    "ddp_muon": Method(muon_lr=MUON_LR),
    "muloco": Method({"outer": MULOCO}, muon_lr=MUON_LR, reference="ddp_muon"),
    "local_sgd": Method({"method": "local_sgd"}),
    "streaming": Method({"fragments": 2}, reference="diloco"),
    "streaming_late": Method(
        {"fragments": 2, "overlap": "late", "delay": DELAY}, reference="diloco"
    ),
    "late": Method({"overlap": "late", "delay": DELAY, "outer": PRESETS["short-delay"]}),
    "late_round": Method({"overlap": "late", "outer": PRESETS["short-late"]}),
    "co2": Method({"overlap": "late", "delay": DELAY, "outer": PRESETS["co2"]}),
    "co2_round": Method({"overlap": "late", "outer": PRESETS["co2"]}),
    "eager": Method({"overlap": "eager", "delay": DELAY, "outer": PRESETS["short-delay"]}),
    "eager_round": Method({"overlap": "eager", "outer": PRESETS["short-eager"]}),
    "noloco": Method({"alpha": 0.5, "beta": 0.9, "gamma": 0.9}),
    "noloco_published": Method({"alpha": 0.5, "beta": 0.7, "gamma": 0.7}),
    # these three as chosen on seed 0 (docs/unequal.md)
    "two_level": Method({"outer": OuterSettings("nesterov", 0.7, 0.6, every=2), "alpha": 1.0}),
    "delayed_nesterov": Method({"outer": OuterSettings("delayed_nesterov", 0.9, 0.8, every=2)}),
    "heloco": Method({"outer": OuterSettings("heloco", 1.2, 0.6)}),
    "large_batch": Method(),
    "gradient_averaging": Method(
        {
            "method": "gradient_averaging",
            "sync_every": None,
            "outer": OuterSettings("adamw", 2e-3, 0.9, 0.99, 1e-8, 0.1),
        },
        sync_every=1,
        reference="large_batch",
    ),
}


def method_of(name: str) -> Method:
    """The method of an id, such as ``late`` or, with other values,
    ``late@lr=0.9,momentum=0.2,sync_every=20,delay=3``.
    """
    base, _, changes = name.partition("@")
    if base not in METHODS:
        raise KeyError(base)
    method = METHODS[base]
    settings, outer, more = (
        dict(method.settings),
        msgspec.to_builtins(method.settings.get("outer", SHORT)),
        {},
    )
    for change in filter(None, changes.split(",")):
        key, _, text = change.partition("=")
        value: Any = (
            text
            if key in ("kind", "codec", "overlap", "momentum_dtype")
            else (float(text) if "." in text else int(text))
        )
        if key in outer:
            outer[key] = value
        elif key in ("sync_every", "peers", "lost", "inner_lr", "muon_lr"):
            more[key] = value
        else:
            settings[key] = value
    return replace(method, settings={**settings, "outer": OuterSettings(**outer)}, **more)


class Both:
    """Muon for the matrices of the blocks, AdamW for all else, stepped together (MuLoCo, arXiv
    2505.23725).
    """

    def __init__(self, model: GPT, lr: float, rest: torch.optim.AdamW) -> None:
        matrices = {p for p in model.blocks.parameters() if p.dim() == 2}
        for group in rest.param_groups:
            group["params"] = [p for p in group["params"] if p not in matrices]
        # moves as far as AdamW would at this rate
        muon = torch.optim.Muon(
            [p for p in model.parameters() if p in matrices],
            lr=lr,
            weight_decay=0.1,
            adjust_lr_fn="match_rms_adamw",
        )
        self.each: tuple[torch.optim.Optimizer, ...] = (muon, rest)

    def groups(self) -> list[dict[str, Any]]:
        """Of both, as in one optimizer."""
        return [group for each in self.each for group in each.param_groups]

    param_groups = property(groups)

    def zero_grad(self) -> None:
        """Of both."""
        for each in self.each:
            each.zero_grad()

    def step(self) -> None:
        """Of both."""
        for each in self.each:
            each.step()

    def state_dict(self) -> dict[str, Any]:
        """Of both."""
        return {str(index): each.state_dict() for index, each in enumerate(self.each)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of both."""
        for index, each in enumerate(self.each):
            each.load_state_dict(state[str(index)])


class Task:
    """Data, model and inner optimizer of one seed: the same samples for a worker's index in every
    arm.
    """

    def __init__(self, size: Size, seed: int, peers: int, muon_lr: float = 0.0) -> None:
        self.size, self.seed, self.peers, self.muon_lr = size, seed, peers, muon_lr
        training, held_out = split(
            unique_paragraphs(list(import_module("pydoc_data.topics").topics.values())).encode()
        )
        self.training, self.held_out = (
            torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (training, held_out)
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = GPT(size.config)
            for embedding in (
                self.model.tokens,
                self.model.positions,
            ):  # with torch's N(0, 1) synchronous training is best at three times
                torch.nn.init.normal_(
                    embedding.weight, std=size.config.width**-0.5
                )  # this rate, and all methods look alike below that
        self.optimizer = self.make(self.model)
        self.streams = [
            torch.Generator().manual_seed(1000 * seed + index) for index in range(peers)
        ]
        for step in range(size.synchronous):
            self.step(self.model, self.optimizer, self.streams, step)

    def make(self, model: GPT) -> Any:
        """The inner optimizer."""
        rest = torch.optim.AdamW(
            model.parameters(), lr=self.size.lr, betas=(0.9, 0.99), weight_decay=0.1
        )
        return Both(model, self.muon_lr, rest) if self.muon_lr else rest

    def step(
        self,
        model: GPT,
        optimizer: Any,
        streams: list[torch.Generator],
        step: int,
    ) -> None:
        """One inner step on a batch of each stream, at the cosine's rate."""
        for group in optimizer.param_groups:
            full = group.setdefault("full_lr", group["lr"])
            group["lr"] = full * max(0.01, 0.5 * (1 + math.cos(math.pi * step / self.size.steps)))
        optimizer.zero_grad()
        self.backward(model, streams)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def backward(self, model: GPT, streams: list[torch.Generator]) -> None:
        """The gradient of a batch of each stream."""
        parts = [
            batch(self.training, self.size.config.context, self.size.batch, stream)
            for stream in streams
        ]
        inputs, targets = (torch.cat(column) for column in zip(*parts, strict=True))
        model.loss(inputs, self.labels(targets)).backward()

    def labels(self, targets: torch.Tensor) -> torch.Tensor:
        """What is learnt: the targets."""
        return targets

    def worker(self, index: int) -> tuple[GPT, Any, torch.Generator]:
        """A worker's own model, optimizer and stream after the synchronous start."""
        model = copy.deepcopy(self.model)
        optimizer = self.make(model)
        optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return model, optimizer, torch.Generator().set_state(self.streams[index].get_state())

    def look(self, step: int) -> bool:
        """Whether the curve has a point after this step."""
        size = self.size
        return (
            size.points > 0
            and (step + 1 - size.synchronous) % ((size.steps - size.synchronous) // size.points)
            == 0
        )

    @torch.no_grad()
    def evaluate(self, model: GPT) -> float:
        """Mean loss in nats a byte over all held-out text, in windows one after another."""
        context = self.size.config.context
        count = (len(self.held_out) - 1) // context
        inputs = self.held_out[: count * context].view(count, context).long()
        targets = self.held_out[1 : count * context + 1].view(count, context).long()
        return float(model.loss(inputs, targets))


def alone(task: Task, workers: int) -> dict[str, Any]:
    """Synchronous training on the batches of so many workers, in one process: what all arms are
    measured against.
    """
    model, optimizer, _ = task.worker(0)
    streams = [torch.Generator().set_state(stream.get_state()) for stream in task.streams[:workers]]
    curve = list[tuple[int, float]]()
    for step in range(task.size.synchronous, task.size.steps):
        task.step(model, optimizer, streams, step)
        if task.look(step):
            curve.append((step + 1, task.evaluate(model)))
    k, fp32 = task.peers, 4.0
    return {
        "loss": task.evaluate(model),
        "curve": curve,
        "bytes_per_param_step": 2 * (k - 1) / k * fp32 if workers > 1 else 0.0,
        "waiting_share": None,
    }


def large_batch(task: Task) -> dict[str, Any]:
    """torch's AdamW on the batches of all workers, in one process: what `gradient_averaging` must
    come to.
    """
    model, _, _ = task.worker(0)
    outer = METHODS["gradient_averaging"].settings["outer"]
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=outer.lr,
        betas=(outer.momentum, outer.beta2),
        eps=outer.epsilon,
        weight_decay=outer.weight_decay,
    )
    streams = [torch.Generator().set_state(stream.get_state()) for stream in task.streams]
    for _ in range(task.size.synchronous, task.size.steps):
        optimizer.zero_grad()
        task.backward(model, streams)
        optimizer.step()
    return {"loss": task.evaluate(model), "bytes_per_param_step": None, "waiting_share": None}


class Lossy:
    """A member whose contributions to some rounds do not arrive: the others commit those without
    it, as they would if it were cut off.
    """

    def __init__(self, member: LocalMember, peers: int, share: float, seed: int) -> None:
        self.__dict__.update(_member=member, _peers=peers, _share=share, _seed=seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._member, name)

    def _loses(self, round_: int) -> bool:
        rng = Random(f"{self._seed}/{round_}")
        lost = [rng.random() < self._share for _ in range(self._peers)]
        return lost[self._member.index] and not all(lost)

    def contribute(self, *, base: int, **rest: Any) -> Any:
        """See Swarm."""
        if not self._loses(base):
            return self._member.contribute(base=base, **rest)
        pending = LocalPending(self._member, self._member.clock())
        self._member.wait(
            lambda: any(
                view.path == "self" and view.round > base for view in self._member.members()
            ),
            None,
        )
        pending.outcome = Outcome("committed", base + 1, reason="it did not arrive")
        return pending


def cell(name: str, seed: int, size: Size) -> dict[str, Any]:
    """Train one method on one seed."""
    method, base = method_of(name), name.partition("@")[0]
    task = Task(replace(size, lr=method.inner_lr or size.lr), seed, method.peers, method.muon_lr)
    if base in ("ddp", "ddp_muon", "solo"):
        return alone(task, 1 if base == "solo" else method.peers)
    if base == "large_batch":
        return large_batch(task)
    if base.startswith(("noloco", "two_level")):
        return without_anchor(task, method)
    steps = size.steps - size.synchronous
    rounds = steps // method.sync_every
    settings = msgspec.structs.replace(
        RunSettings(
            sync_every=method.sync_every, rounds=rounds, codec="fp32", outer=SHORT, deadline_s=60.0
        ),
        **method.settings,
    )
    if settings.method == "gradient_averaging":
        settings = msgspec.structs.replace(settings, target_samples=method.peers * size.batch)
    layout = flat_vector(task.model, settings).layout
    payload = 2 * (method.peers - 1) / method.peers * 4 * layout.numel
    swarm = LocalSwarm(
        method.peers,
        settings=settings,
        seed=seed,
        latency_s=LATENCY_S,
        bandwidth_bytes_per_s=payload / (TRANSFER_SHARE * method.sync_every * STEP_S),
    )

    def script(member: Any) -> dict[str, Any]:
        return worker(member, task, method, settings)

    results = swarm.run(script, step_s=STEP_S)
    assert len({result["digest"] for result in results}) == 1, "anchors differ"
    first = results[0]
    sent = sum(result["sent"] for result in results) / method.peers
    share = max(part.numel for part in cut(layout, settings.fragments)) / layout.numel
    return {
        "loss": first["loss"],
        "curve": first["curve"],
        "bytes_per_param_step": sent / layout.numel / steps,
        "payload_per_param_step": payload
        / 4
        * round_bytes_per_value(settings.codec)
        / layout.numel
        / method.sync_every,
        "peak_ratio": share * round_bytes_per_value(settings.codec) / 4,
        "waiting_share": sum(result["waited"] for result in results)
        / sum(result["seconds"] for result in results),
        "counted": [result["counted"] for result in results],
        "rounds": rounds,
    }


def without_anchor(task: Task, method: Method) -> dict[str, Any]:
    """NoLoCo, or two groups on two levels, over public averages: peers stay apart, so the loss is
    the mean of theirs.
    """
    size = task.size
    steps = size.steps - size.synchronous
    numel = sum(parameter.numel() for parameter in task.model.parameters())
    constants = {key: value for key, value in method.settings.items() if key != "outer"}
    swarm = LocalSwarm(
        method.peers,
        settings=RunSettings(codec="fp32", deadline_s=60.0),
        seed=task.seed,
        latency_s=LATENCY_S,
        bandwidth_bytes_per_s=2
        * (method.peers - 1)
        / method.peers
        * 4
        * numel
        / (TRANSFER_SHARE * method.sync_every * STEP_S),
    )

    def script(member: Any) -> dict[str, Any]:
        enter(member)
        while len(member.members()) < method.peers:
            member.sleep(0.1)
        model, inner, stream = task.worker(member.index)
        live = parameters_to_vector(model.parameters()).detach()
        if "beta" in constants:
            outer = NoLoCo(live, **constants)
            step_of = partial(outer.step, exchange=over_swarm(member, "noloco"))
        else:
            own = method.settings["outer"]
            table = {"lr": own.lr, "momentum": own.momentum, "every": own.every, **constants}
            outer = TwoLevel(live, **table)
            step_of = partial(
                outer.step,
                within=over_group(member, "within", f"2x{method.peers // 2}.1"),
                across=over_group(member, "across"),
            )
        started, sent, waited = member.clock(), member.traffic()[0], 0.0
        for step in range(size.synchronous, size.steps):
            task.step(model, inner, [stream], step)
            member.sleep(STEP_S)
            if (step + 1 - size.synchronous) % method.sync_every == 0:
                live, before = parameters_to_vector(model.parameters()).detach(), member.clock()
                step_of(live)
                vector_to_parameters(live, model.parameters())
                waited += member.clock() - before
        seconds, sent = member.clock() - started, member.traffic()[0] - sent
        member.sleep(10.0)  # others may still need this node
        if isinstance(outer, TwoLevel):
            vector_to_parameters(outer.common, model.parameters())
        found = {"loss": task.evaluate(model), "slow": outer.slow, "sent": sent}
        return {**found, "waited": waited, "seconds": seconds}

    results = swarm.run(script)
    slow = torch.stack([result["slow"] for result in results])
    mean = copy.deepcopy(task.model)
    vector_to_parameters(slow.mean(0), mean.parameters())
    losses = [result["loss"] for result in results]
    return {
        "loss": sum(losses) / len(losses),
        "losses": losses,
        "loss_of_mean": task.evaluate(mean),
        "apart": float((slow - slow.mean(0)).norm(dim=1).mean() / slow.mean(0).norm()),
        "bytes_per_param_step": sum(result["sent"] for result in results)
        / method.peers
        / numel
        / steps,
        "waiting_share": sum(result["waited"] for result in results)
        / sum(result["seconds"] for result in results),
    }


def worker(
    member: LocalMember, task: Task, method: Method, settings: RunSettings
) -> dict[str, Any]:
    """One member's script."""
    model, inner, stream = task.worker(member.index)
    member.open(
        flat_vector(model, settings).layout, flat_vector(model, settings).write_to
    ).release()
    while len(member.members()) < method.peers:
        member.sleep(0.1)
    swarm: Any = Lossy(member, method.peers, method.lost, task.seed) if method.lost else member
    optimizer: DiLoCo | LocalSGD | GradientAveraging | Both
    if isinstance(inner, Both):
        optimizer = inner
        attachment = attach(model, list(inner.each), swarm, clock=member.clock)
    elif settings.method == "gradient_averaging":
        optimizer = GradientAveraging(
            model.parameters(), swarm=swarm, model=model, clock=member.clock
        )
        attachment = optimizer.attachment
    else:
        kind = LocalSGD if settings.method == "local_sgd" else DiLoCo
        optimizer = kind(model.parameters(), inner, swarm=swarm, model=model, clock=member.clock)
        attachment = optimizer.attachment
    started, sent, curve = (
        member.clock(),
        member.traffic()[0],
        list[tuple[int, float]](),
    )
    for step in range(task.size.synchronous, task.size.steps):
        attachment.samples(task.size.batch)
        round_, first = divmod(step - task.size.synchronous, method.sync_every)
        if method.newcomers and not first and round_ % method.peers == member.index:
            for each in inner.each if isinstance(inner, Both) else (inner,):
                each.state.clear()  # as who has just joined: the anchor is all it was given
        if isinstance(optimizer, GradientAveraging):
            optimizer.zero_grad()
            task.backward(model, [stream])
            member.sleep(STEP_S)
            optimizer.step()
        else:
            task.step(model, optimizer, [stream], step)
        if member.index == 0 and task.look(step):
            with attachment.evaluate_anchor():
                curve.append((step + 1, task.evaluate(model)))
    seconds = member.clock() - started
    # On a thin link the last rounds last longer than their steps; who ends before the others has
    # another anchor than they.
    tries = 0
    while not attachment.done and tries < 1000:
        attachment.sync()
        member.sleep(0.2)
        tries += 1
    with attachment.evaluate_anchor() as view:
        loss = task.evaluate(model) if member.index == 0 else 0.0
        digest = view.digest or _digest(view)
    stats = attachment.stats
    return {
        "loss": loss,
        "curve": curve,
        "digest": digest,
        "sent": member.traffic()[0] - sent,
        "waited": stats["waiting_s"],
        "seconds": seconds,
        "counted": stats["counted"],
    }


def _digest(view: Any) -> str:
    values = torch.empty(view.numel)
    view.copy_into(values)
    return str(hash(values.numpy().tobytes()))
