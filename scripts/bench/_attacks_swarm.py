"""Cells of bench_attacks.py through the real all-reduce: DiLoCo on the byte-level GPT in a
LocalSwarm, of whose members some attack.

Sessions, log, exchange, int8 codec, outer step and rule are those of a run; the rule is the
manifest's. An attacker is a member that trains nothing and contributes, in each round, what an
attack makes of the honest members' contributions to that round, which it sees before its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from _methods import LATENCY_S, SIZES, STEP_S, Size, Task
from torch import Tensor

from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import DiLoCo
from atoll.optim.federated.simulation.attacks import ATTACKS, flipped_labels
from atoll.optim.outer import presets
from atoll.optim.rounds.composing import flat_vector

SYNC_EVERY, CODEC = 10, "int8"
OUTER = {preset.name: preset.outer for preset in presets.PRESETS}["short"]
RULES = ("mean", "trimmed_mean")
FLIPPED, BYTES = "label_flip", 256
PATIENCE_S = 120.0  # virtual seconds that an attacker waits for a round


class Overheard:
    """What honest members contributed, by round: what an omniscient attacker knows."""

    def __init__(self, honest: int) -> None:
        self.honest, self._rounds = honest, dict[int, dict[int, Tensor]]()

    def hears(self, member: LocalMember) -> Any:
        """The member, with its contributions written down."""
        return _Honest(member, self)

    def saw(self, round_: int, index: int, vector: Tensor) -> None:
        """A contribution of an honest member."""
        for old in [number for number in self._rounds if number < round_ - 1]:
            del self._rounds[old]
        self._rounds.setdefault(round_, {})[index] = vector.clone()

    def all_of(self, round_: int) -> Tensor | None:
        """float32 (honest, d), once everybody has contributed to the round."""
        found = self._rounds.get(round_, {})
        return (
            torch.stack([found[index] for index in sorted(found)])
            if len(found) == self.honest
            else None
        )


class _Honest:
    """A Swarm that passes everything on."""

    def __init__(self, member: LocalMember, overheard: Overheard) -> None:
        self.__dict__.update(_member=member, _overheard=overheard)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._member, name)

    def contribute(self, *, write: Callable[[Tensor], None], base: int, **rest: Any) -> Any:
        """See Swarm."""

        def heard(vector: Tensor) -> None:
            write(vector)
            self._overheard.saw(base, self._member.index, vector)

        return self._member.contribute(write=heard, base=base, **rest)


class Flipped(Task):
    """A task with other labels."""

    def __init__(self, task: Task) -> None:
        self.__dict__.update(task.__dict__)

    def labels(self, targets: Tensor) -> Tensor:
        """See Task."""
        return flipped_labels(targets, BYTES)


class Run:
    """One cell: its task, and what its members do."""

    def __init__(self, rule: str, attack: str, seed: int, n: int, f: int, rounds: int) -> None:
        size = replace(SIZES["42k"], steps=SIZES["42k"].synchronous + SYNC_EVERY * rounds)
        self.n, self.honest, self.attack, self.task = (
            n,
            n if attack == "none" else n - f,
            attack,
            start(size, seed, n),
        )
        self.overheard = Overheard(self.honest)
        self.settings = RunSettings(
            sync_every=SYNC_EVERY,
            rounds=rounds,
            codec=CODEC,
            outer=OUTER,
            deadline_s=60.0,
            reducer=rule if rule == "mean" else f"{rule}:{f}",
        )

    def script(self, member: Any) -> dict[str, Any]:
        """What each member runs. The last ones attack."""
        model, inner, stream = self.task.worker(member.index)
        flat = flat_vector(model, self.settings)
        member.open(flat.layout, flat.write_to).release()
        while len(member.members()) < self.n:
            member.sleep(0.1)
        if member.index >= self.honest and self.attack != FLIPPED:
            return self.hostile(member)
        honest = member.index < self.honest
        swarm: Any = self.overheard.hears(member) if honest else member
        task = self.task if honest else Flipped(self.task)
        attachment = DiLoCo(
            model.parameters(), inner, swarm=swarm, model=model, clock=member.clock
        ).attachment
        for step in range(task.size.synchronous, task.size.steps):
            attachment.samples(task.size.batch)
            task.step(model, inner, [stream], step)
        for _ in range(50):
            if attachment.done:
                break
            attachment.sync()
            member.sleep(0.2)
        with attachment.evaluate_anchor():
            loss = self.task.evaluate(model) if member.index == 0 else None
        return {"loss": loss, "counted": attachment.stats["counted"], "anchor": fingerprint(member)}

    def hostile(self, member: LocalMember) -> dict[str, Any]:
        """An attacker's script: in each round, what comes of the honest members' contributions to
        it.
        """
        counted = 0
        for round_ in range(self.settings.rounds or 0):
            member.wait(lambda now=round_: self.overheard.all_of(now) is not None, PATIENCE_S)
            if (seen := self.overheard.all_of(round_)) is None:
                break  # the honest ones have come to an end
            sent = ATTACKS[self.attack](seen)

            def write(vector: Tensor, sent: Tensor = sent) -> None:
                vector.copy_(sent)

            pending = member.contribute(
                samples=SYNC_EVERY * self.task.size.batch, write=write, base=round_
            )
            counted += pending.wait(PATIENCE_S).status == "committed"
        return {"loss": None, "counted": counted, "anchor": fingerprint(member)}


def fingerprint(member: LocalMember) -> str:
    """Of the bits of the member's anchor."""
    view = member.anchor()
    values = torch.empty(view.numel)
    view.copy_into(values)
    view.release()
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]


@lru_cache(maxsize=2)
def start(size: Size, seed: int, n: int) -> Task:
    """Data, and the model after its synchronous start: the same for all cells of a seed."""
    return Task(size, seed, n)


def cell(rule: str, attack: str, seed: int, n: int, f: int, rounds: int) -> dict[str, Any]:
    """Train once: held-out loss of the last anchor, and how many contributions of each member
    counted.
    """
    run = Run(rule, attack, seed, n, f, rounds)
    results = LocalSwarm(n, settings=run.settings, seed=seed, latency_s=LATENCY_S).run(
        run.script, step_s=STEP_S
    )
    return {
        "loss": results[0]["loss"],
        "counted": [result["counted"] for result in results],
        "anchors": len({result["anchor"] for result in results[: run.honest]}),
    }
