#!/usr/bin/env python3
"""Whether what is exported is the model: models of many shapes are attached, trained for three
rounds by two members on unlike batches and exported, and a process without atoll loads each by the
line that the command prints.

equal      the outputs of the loaded model are those of the run's anchor, bit for bit
refused    by `attach`, before anything was trained
wrong      by case: outputs that differ, lines that fail, refusals elsewhere or of other words
absent     cases whose package is not installed: pip install timm transformers peft

    scripts/bench/bench_models.py --words words.txt

keeps all that each case printed, refusals with their causes and hints.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import _models
import torch
from _bench import emit, progress
from safetensors import safe_open

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from exporting_kit import KeptSwarm

from atoll.collectives.errors import AtollError
from atoll.collectives.swarm import RunSettings
from atoll.node.cli import run
from atoll.node.local import LocalSwarm
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import attach

MEMBERS, ROUNDS = 2, 3
MOST = 60  # steps
TOGETHER_S = 5.0  # in virtual time: all have entered the run


class Refused(Exception):
    """By attach. ``words``: all that it says."""

    def __init__(self, error: AtollError) -> None:
        super().__init__(str(error))
        self.words = f"{error}\n{error.why}\n{error.hint}"


class Kept:
    """A member of a LocalSwarm whose run has a folder, as a node's has: that of ``kept``."""

    def __init__(self, member: LocalMember, kept: KeptSwarm) -> None:
        self._member, self.model_folder, self.run_id = member, kept.model_folder, kept.run_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._member, name)


def loss(case: _models.Case, model: Any, seed: int) -> torch.Tensor:
    """Of a batch of this seed."""
    return _models.output(case, model, seed).square().mean()


def trained(
    case: _models.Case, member: LocalMember, kept: KeptSwarm
) -> tuple[torch.Tensor, torch.Tensor]:
    """One member's three rounds on its own batches: the outputs of the last anchor, and all of its
    values. The first member writes the run's checkpoint.
    """
    torch.manual_seed(3)
    model = case.build()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    swarm: Any = Kept(member, kept) if member.index == 0 else member
    try:
        sync = attach(model, optimizer, swarm, batch_size=2, clock=member.clock)
    except AtollError as error:
        raise Refused(error) from error
    model.train()
    member.sleep(TOGETHER_S - member.clock())
    for step in range(MOST):
        if sync.done:
            break
        loss(case, model, 100 * member.index + step).backward()
        optimizer.step()
        optimizer.zero_grad()
        member.sleep(0.1)
    assert sync.stats["counted"] == ROUNDS, sync.describe()
    view = member.anchor()
    values = torch.empty(view.numel)
    view.copy_into(values)
    if member.index == 0:
        kept.checkpoint(sync._flat.layout, view)
    view.release()
    with sync.evaluate_anchor(), torch.no_grad():
        wanted = _models.output(case, model.eval()).clone()
    sync.detach()
    return wanted, values


def export(case: _models.Case, name: str, home: Path) -> tuple[torch.Tensor, str]:
    """The outputs of the anchor after three rounds of two members, and the line that the command
    printed.
    """
    settings = RunSettings(sync_every=2, rounds=ROUNDS)
    swarm = KeptSwarm(home, name.replace("_", "-"), settings)

    def script(member: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return trained(case, member, swarm)

    found = LocalSwarm(MEMBERS, settings=settings, latency_s=0.01).run(script)
    wanted = found[0][0]
    if not all(torch.equal(found[0][1], values) for _, values in found):
        raise RuntimeError("the members' anchors are not the same")
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        status = run(["export", swarm.run_id, str(home / "out" / name)])
    print(said.getvalue())
    if status:
        raise RuntimeError(f"atoll export ended with {status}")
    line = said.getvalue().split("Load it: ")
    if len(line) != 2:
        raise RuntimeError("what was exported is not the whole model")
    return wanted, line[1].strip()


def load(lines: dict[str, str], folder: Path) -> tuple[dict[str, torch.Tensor], str]:
    """What fresh models give that were loaded by these lines; and what went wrong, as JSON."""
    results = folder / "results"
    command = [sys.executable, _models.__file__, str(results)]
    done = subprocess.run(
        [*command, *(f"{name}={line}" for name, line in lines.items())],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    with safe_open(results, framework="pt") as file:  # type: ignore[no-untyped-call]
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()["wrong"]  # noqa: SIM118


def main() -> None:
    """Train, export and load each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases, separated by commas; default: all")
    parser.add_argument("--words", type=Path, help="a file for what each case prints")
    given = parser.parse_args()
    torch.set_num_threads(1)
    names = given.only.split(",") if given.only else list(_models.CASES)
    absent = [name for name in names if not _models.ready(_models.CASES[name])]
    warnings.simplefilter("ignore")
    refused, wrong, words = list[str](), dict[str, str](), dict[str, str]()
    wanted, lines = dict[str, torch.Tensor](), dict[str, str]()
    log = logging.getLogger("atoll")
    log.setLevel(logging.INFO)
    log.propagate = False
    with tempfile.TemporaryDirectory() as home:
        os.environ["ATOLL_HOME"] = home
        for name in names:
            if name in absent:
                continue
            case, said, began = _models.CASES[name], io.StringIO(), time.perf_counter()
            handler = logging.StreamHandler(said)
            log.addHandler(handler)
            try:
                with contextlib.redirect_stdout(said):
                    wanted[name], lines[name] = export(case, name, Path(home))
                if case.refused:
                    wrong[name] = "attach took it"
            except Refused as error:
                said.write(f"refused: {error.words}\n")
                refused.append(name)
                if not case.refused or case.refused not in str(error):
                    wrong[name] = f"refused: {error}"
            except Exception as error:
                traceback.print_exc(file=said)
                wrong[name] = f"{type(error).__name__}: {error}"
            log.removeHandler(handler)
            words[name] = said.getvalue().replace(home, "HOME")
            progress(f"{name}: {time.perf_counter() - began:.1f} s {wrong.get(name, '')}")
        found, faults = load(lines, Path(home))
    wrong |= json.loads(faults)
    equal = list[str]()
    for name, outputs in found.items():
        if torch.equal(outputs, wanted[name]):
            equal.append(name)
        else:
            far = (outputs - wanted[name]).abs().max() if outputs.shape == wanted[name].shape else 0
            wrong[name] = f"outputs differ by {float(far):.3g}"
    if given.words:
        text = (f"== {name}\n{said.strip()}\n{wrong.get(name, '')}" for name, said in words.items())
        given.words.write_text("\n".join(text) + "\n")
    emit(
        "models",
        {"only": given.only},
        [],
        cases=len(names) - len(absent),
        equal=len(equal),
        refused=refused,
        wrong=wrong,
        absent=absent,
    )


if __name__ == "__main__":
    main()
