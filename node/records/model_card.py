"""The README.md of an exported model: which run made it, of which base and under whose licence, how
long, by how many, what was measured of it and what energy that took; in the form in which the hub
reads such a card.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...collectives.errors import AtollError
from ...collectives.foreign import escaped
from ...collectives.identifiers import PeerId
from ..home.output import count_text, span_text
from ..home.paths import Paths
from ..manifest import Manifest, SignedManifest, adapters_of
from ..manifest.tables import ModelTable

CARD_FILE = "README.md"
EVALUATION_FILE = "evaluation.json"  # in the run's folder: the newest that a script made here
ENERGY_FILE = "energy.json"  # likewise: what this machine took while its script trained
JOULES_IN_KWH = 3.6e6
_LONGEST = 200


@dataclass(frozen=True, slots=True)
class Worked:
    """What a run's logs on this machine say: ``rounds`` by member, and ``samples`` of all: tokens
    that were learned, or what else its script counts. None of both where there is no log.
    """

    rounds: Mapping[PeerId, int]
    samples: int


def worked_in(paths: Paths, signed: SignedManifest) -> Worked | None:
    """Count who contributed, without checking signatures: `atoll audit` does."""
    from ...collectives.round.log import samples_in  # both load torch
    from ..storage.journal import stored_entries

    rounds, samples = Counter[PeerId](), 0
    try:
        for folder in paths.state_dirs(signed.run_id, signed.open().exchange.fragments):
            own, counted = Counter[PeerId](), 0
            for certified in stored_entries(folder / "journal"):
                own.update(each.member.peer for each in certified.entry.contributors)
                counted += samples_in(certified.entry)
            rounds, samples = rounds | own, max(samples, counted)
    except AtollError:
        return None
    return Worked(rounds, samples) if rounds else None


def evaluation_in(folder: Path) -> dict[str, Any] | None:
    """The newest evaluation on held-out data that a script made in this run here: round, tokens,
    held_out; None where there is none."""
    try:
        found = json.loads((folder / EVALUATION_FILE).read_bytes())
        return {key: found[key] for key in ("round", "tokens", "held_out")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class Energy:
    """What one machine took while its script trained: ``joules`` by what counted them (a zone of
    RAPL, or a GPU), in so many ``seconds``. All programs of the machine share in it.
    """

    joules: Mapping[str, float]
    seconds: float


def energy_in(folder: Path) -> Energy | None:
    """What was counted of this run on this machine; None where nothing was, or could be."""
    try:
        found = json.loads((folder / ENERGY_FILE).read_bytes())
        joules = {str(name): float(value) for name, value in found["joules"].items()}
        seconds = float(found["seconds"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    whole = all(math.isfinite(value) and value >= 0 for value in (*joules.values(), seconds))
    return Energy(joules, seconds) if joules and whole else None


def card_of(
    signed: SignedManifest,
    round_: int,
    *,
    worked: Worked | None = None,
    evaluation: Mapping[str, Any] | None = None,
    energy: Energy | None = None,
    credited: Sequence[str] = (),
    how: str = "",
    merged: bool = False,
) -> bytes:
    """The card's text. ``credited``: names of members who agreed to stand there; nobody else is
    named. ``how``: Python that loads the model.
    """
    manifest = signed.open()
    lines = ["---", *_front(manifest, merged=merged), "---", "", f"# {manifest.name}", ""]
    if manifest.description:
        lines += [_plain(manifest.description), ""]
    lines += [f"* Run `{signed.run_id}`, after round {round_:,}."]
    lines += _base_lines(manifest)
    lines += _work_lines(manifest, worked, credited)
    lines += _evaluation_lines(evaluation)
    lines.append(_energy_line(energy))
    if how:
        on_a_base = adapters_of(manifest) is not None and not merged
        base = base_loaded(manifest.model) if on_a_base else ""
        before = ["import transformers", f"model = {_code(base)}"] if base else []
        lines += ["", "```python", *before, how, "```"]
    by = (
        "Trained by one machine on its data, which"
        if worked is not None and len(worked.rounds) == 1
        else "Trained by several machines together, over the internet, each on its own data, which"
    )
    lines += [
        "",
        f"{by} this card does not know. `atoll.json` has all settings; members can check who "
        "decided what with `atoll audit`.",
        "",
    ]
    return "\n".join(lines).encode()


def base_loaded(model: ModelTable) -> str:
    """Python that loads the pretrained model of a run; "": it has none."""
    load = "transformers.AutoModelForCausalLM.from_pretrained"
    if model.hub is not None:
        return f"{load}({model.hub!r}, revision={model.revision!r})"
    if model.gguf is not None:
        return f"{load}('FOLDER_OF_THE_FILE', gguf_file={model.gguf!r})"
    return f"{load}({'PATH_OF/' + model.folder!r})" if model.folder is not None else ""


def _front(manifest: Manifest, *, merged: bool) -> list[str]:
    """What the hub reads, as YAML, of which a string of JSON is one."""
    model, base = manifest.model, manifest.model.base
    adapters = adapters_of(manifest) is not None and not merged
    lines = list[str]()
    if base is not None and base.licence:
        lines.append(f"license: {json.dumps(base.licence)}")
    if model.hub is not None:
        relation = "adapter" if adapters else "finetune"
        lines.append(f"base_model: {json.dumps(model.hub)}")
        lines.append(f"base_model_relation: {relation}")
    if model.pretrained:
        lines.append(f"library_name: {'peft' if adapters else 'transformers'}")
        lines.append("pipeline_tag: text-generation")
    return [*lines, "tags:", "- atoll"]


def _base_lines(manifest: Manifest) -> list[str]:
    model, base, lora = manifest.model, manifest.model.base, adapters_of(manifest)
    if not model.pretrained or base is None:
        return []
    where = (
        f"`{model.hub}` at `{model.revision}`" if model.hub else f"`{_plain(_source(manifest))}`"
    )
    licence = _plain(base.licence) if base.licence else "not known: ask whoever founded the run"
    how = (
        f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}"
        + (" on a base in four bits" if model.method == "qlora" else "")
        if lora is not None
        else f"all of it trained, in {model.dtype}"
    )
    return [
        f"* Base: {where}, {count_text(base.parameters)} parameters. Its licence: {licence}.",
        f"* Method: {how}.",
    ]


def _source(manifest: Manifest) -> str:
    return manifest.model.folder or manifest.model.gguf or ""


def _work_lines(manifest: Manifest, worked: Worked | None, credited: Sequence[str]) -> list[str]:
    lines = list[str]()
    if worked is not None:
        count, unit = len(worked.rounds), manifest.unit
        unit = "learned tokens" if unit == "tokens" else unit
        hidden = manifest.secure is not None
        lines.append(
            f"* {count} member{'s' * (count != 1)} contributed"
            + ("" if hidden else f" {worked.samples:,} {unit}")
            + "."
        )
    if credited:
        lines.append(f"* Members who agreed to be named: {', '.join(map(_plain, credited))}.")
    return lines


def _evaluation_lines(evaluation: Mapping[str, Any] | None) -> list[str]:
    if evaluation is None:
        return ["* Evaluation: none was made on this machine."]
    return [
        f"* Evaluation: {float(evaluation['held_out']):.4f} nats a token on "
        f"{int(evaluation['tokens']):,} held-out tokens of one member, at round "
        f"{int(evaluation['round']):,}."
    ]


def _energy_line(energy: Energy | None) -> str:
    if energy is None:
        return "* Energy: not counted on this machine."
    kwh = sum(energy.joules.values()) / JOULES_IN_KWH
    what = ", ".join(map(_plain, energy.joules))
    return (
        f"* Energy: {kwh:.3g} kWh in {span_text(energy.seconds)}, all that one member's machine "
        f"took by its own counters ({what}) while it trained. The others' is not known."
    )


def _code(text: str) -> str:
    """A line of Python, from which no name of the manifest ends the block of code around it."""
    return escaped(text, _LONGEST).replace("`", "\\x60")


def _plain(text: str) -> str:
    """One line, which Markdown reads as text."""
    found = escaped(text, _LONGEST)
    return "".join(f"\\{sign}" if sign in "\\`*_[]<>#|" else sign for sign in found)
