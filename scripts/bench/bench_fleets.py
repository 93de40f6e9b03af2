#!/usr/bin/env python3
"""Whether `atoll plan` ever proposes what a named machine cannot hold: --fleets fleets drawn at
random, each for five models; every second one asks for full training, the others for LoRA. Nothing
is measured: what a machine needs is what `atoll fit` says.

proposed   plans whose settings every machine of the group holds
lacking    where no machine holds the model by any method, and the refusal said what is missing
changed    of the plans those that change settings, or the method, so that the machines hold it
left_out   of the plans those that leave machines out
wrong      plans that need more than a machine has, or refusals that need not be: must be empty
"""

from __future__ import annotations

import argparse
import random
import sys

from _bench import emit

from atoll.collectives.errors import ConfigError
from atoll.node.cli.fitting import HeldRun, changed, hold, judge
from atoll.node.cli.machines import CARDS, NamedMachine, machines_of
from atoll.node.cli.needs import needs_of, shortages, step_settings
from atoll.node.cli.templates import FINETUNE, with_model
from atoll.node.manifest import Manifest, parse_manifest
from atoll.node.manifest.tables import ShapeTable
from atoll.node.recipes.models.shapes import KNOWN
from atoll.node.recipes.models.sizing import trained_of
from atoll.optim.planning import Conditions, PeerConditions, plan

MODELS = ("SmolLM2-135M", "Llama-3.2-1B", "Qwen3-4B", "Llama-3.1-8B", "Qwen3-32B")


def fleet(seed: int) -> list[NamedMachine]:
    """Machines drawn at random: one to four kinds, up to four of each."""
    draw = random.Random(seed)
    texts = [
        f"{draw.randint(1, 4)} x {draw.choice(['cpu', *CARDS])}"
        f"@{draw.choice([10, 50, 100, 1000])}Mbit"
        f"/{draw.choice([8, 16, 32, 64, 128, 512])}GB/{draw.choice([30, 200, 2000])}GB"
        for _ in range(draw.randint(1, 4))
    ]
    return machines_of(texts)


def run_of(name: str, seed: int) -> Manifest:
    """The template's run of a model."""
    method = "full" if seed % 2 else "lora"
    text = with_model(FINETUNE, f"ORG/{name}").replace('method = "lora"', f'method = "{method}"')
    return parse_manifest(text)


def planned(held: HeldRun, shape: ShapeTable) -> tuple[Manifest, tuple[str, ...]]:
    """The run as `plan` proposes it, and its group. A step takes each machine a second."""
    size = trained_of(shape, step_settings(held.manifest))
    peers = tuple(PeerConditions(m.name, m.up or 1e6, m.down or 1e6, 1.0) for m in held.machines)
    decided = plan(Conditions(size, peers, rtt_s=0.05, held=held.pairs))
    tables = decided.settings()
    change = {f"{table}.{key}": value for table, of in tables.items() for key, value in of.items()}
    return changed(held.manifest, {**change, "exchange.error": None}), decided.group


def check(name: str, seed: int, *, plans: bool = True) -> tuple[str, str]:
    """("proposed" or "lacking", what is wrong of it). ``plans``: whether to plan, or to look at all
    codecs and overlaps that a plan might take."""
    manifest, machines, shape = run_of(name, seed), fleet(seed), KNOWN[name]
    try:
        held = hold(manifest, shape, machines)
    except ConfigError as error:
        verdicts = [judge(manifest, shape, {"": each.free}, "qlora") for each in machines]
        idle = any(verdict is None or verdict.fits for verdict in verdicts)
        said = error.code == "E416" and "and the run needs about" in error.why
        return "lacking", "" if said and not idle else f"{name} {seed}: refused by {error.message}"
    named = {each.name for each in held.machines} | set(held.left_out)
    if named != {each.name for each in machines} or not held.pairs:
        return "proposed", f"{name} {seed}: {sorted(named)} of the fleet, {len(held.pairs)} pairs"
    if plans:
        proposals = [planned(held, shape)]
    else:
        everybody = tuple(each.name for each in held.machines)
        proposals = [
            (changed(held.manifest, {"exchange.codec": codec, "train.overlap": overlap}), everybody)
            for codec, overlap in held.pairs
        ]
    for proposed, group in proposals:
        needs = needs_of(proposed, None, shape)
        assert needs is not None
        for each in held.machines:
            if each.name in group and (short := shortages(needs, each.free, each.name)):
                return "proposed", f"{name} {seed}: {short}"
    more = "+changed" * bool(held.change) + "+left_out" * bool(held.left_out)
    return f"proposed{more}", ""


def main() -> int:
    """Exit code: 0 nothing is wrong, 1 something."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fleets", type=int, default=30)
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    options = parser.parse_args()
    found = [
        check(name, seed)
        for name in MODELS
        for seed in range(options.first, options.first + options.fleets)
    ]
    wrong = [why for _, why in found if why]
    kinds = [kind for kind, _ in found]
    emit(
        "fleets",
        vars(options),
        [],
        proposed=sum(kind.startswith("proposed") for kind in kinds),
        lacking=kinds.count("lacking"),
        changed=sum("changed" in kind for kind in kinds),
        left_out=sum("left_out" in kind for kind in kinds),
        wrong=wrong,
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
