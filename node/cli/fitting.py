"""Whether a machine holds a run of a pretrained model, and which setting makes it so: the
arithmetic of `fit`, `plan` and joining.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ...collectives.codec_costs import PLANNED
from ...collectives.errors import ConfigError
from ..manifest import Manifest, why_not_sharded
from ..manifest.tables import ShapeTable
from ..recipes.models.libraries import OF_FOUR_BITS, has_bitsandbytes, wants_bitsandbytes
from ..recipes.models.shapes import active_parameters
from ..recipes.models.sizing import StepSettings
from .machines import NamedMachine
from .needs import Count, FreeHere, Needs, needs_of, shortages, step_settings

METHODS: tuple[Literal["full", "lora", "qlora"], ...] = ("full", "lora", "qlora")
LEAST_LENGTH = 256  # tokens: a shorter sample is not proposed
USED = 0.35  # of what a card's maker says, in training; of a measured rate, see `machines`
COUNTED_WITHIN = 0.1  # of what is needed, as `scripts/bench/bench_fit.py` measures it
Change = Mapping[str, Any]
"""Settings by their place in the manifest, such as ``model.checkpointing``."""


@dataclass(frozen=True, slots=True)
class FitVerdict:
    """Whether a machine holds a run. ``change``: the settings with which it does; empty: as they
    are. ``short``: what it lacks, with those of them that need least where nothing fits.
    """

    method: str
    fits: bool
    change: Change
    needs: Needs
    short: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        """For a column: yes, no, or the settings."""
        return (words_of(self.change) or "yes") if self.fits else "no"


def changed(manifest: Manifest, change: Change) -> Manifest:
    """The manifest with these settings in place of its own."""
    for path, value in change.items():
        manifest = _replaced(manifest, path.split("."), value)
    return manifest


def _replaced(table: Any, path: Sequence[str], value: Any) -> Any:
    head, *rest = path
    inner = _replaced(getattr(table, head), rest, value) if rest else value
    return msgspec.structs.replace(table, **{head: inner})


_FOLLOWS = (
    "model.method",
    "lora",
    "adapters.base",
    "train.inner.clip",
    "train.inner.tokens_per_step",
)
"""Settings that are said by the method, or follow from it and from in_backward."""


def words_of(change: Change) -> str:
    """``checkpointing, length 512``."""
    found = list[str]()
    for path, value in change.items():
        key = path.rpartition(".")[2]
        if path in _FOLLOWS:
            continue
        found.append(key if value is True else str(value) if _speaks(key) else f"{key} {value}")
    return ", ".join(found)


def _speaks(key: str) -> bool:
    """Whether a setting's value says which setting it is."""
    return key in ("method", "dtype", "optimizer")


def toml_of(change: Change) -> str:
    """``[model] checkpointing = true; [data] length = 512``."""
    tables = dict[str, list[str]]()
    for path, value in change.items():
        table, _, key = path.rpartition(".")
        if not table:
            tables[f"no [{key}]"] = []
            continue
        text = f'"{value}"' if isinstance(value, str) else str(value)
        text = text.lower() if isinstance(value, bool) else text
        tables.setdefault(table, []).append(f"{key} = {text}")
    return "; ".join(
        f"[{table}] {', '.join(keys)}" if keys else table for table, keys in tables.items()
    )


def changes_for(manifest: Manifest, method: str) -> Iterator[Change]:
    """Settings with which a run of this method needs less and less, the mildest first."""
    settings, inner = manifest.model, manifest.train.inner
    change: dict[str, Any] = {}
    if settings.method != method:
        change["model.method"] = method
        if method == "qlora" and manifest.adapters.base == "values":
            change["adapters.base"] = "shapes"
        if method == "full" and manifest.lora is not None:
            change["lora"] = None
    yield dict(change)
    if inner.micro_batch > 1:
        change["train.inner.micro_batch"] = 1
        yield dict(change)
    if not settings.checkpointing:
        change["model.checkpointing"] = True
        yield dict(change)
    if method == "full":
        yield from _smaller_states(manifest, change)
    elif settings.dtype == "float32" and method == "lora":
        change["model.dtype"] = "bfloat16"
        yield dict(change)
    length = manifest.data.length
    while length > LEAST_LENGTH:
        length = max(LEAST_LENGTH, length // 2)
        change["data.length"] = length
        if "train.inner.tokens_per_step" in change:
            change["train.inner.tokens_per_step"] = length
        yield dict(change)


def _smaller_states(manifest: Manifest, change: dict[str, Any]) -> Iterator[Change]:
    """Of full training: fewer bytes a parameter."""
    inner, model = manifest.train.inner, manifest.model
    if inner.optimizer == "adamw":
        change["train.inner.optimizer"] = "adamw8bit"
        yield dict(change)
    if model.dtype in ("auto", "float32"):
        change["model.dtype"] = "bfloat16"
        yield dict(change)
    if not inner.in_backward and manifest.train.method != "gradient_averaging":
        change["train.inner.in_backward"] = True
        change["train.inner.clip"] = 0.0
        change["train.inner.tokens_per_step"] = manifest.data.length
        yield dict(change)


def judge(
    manifest: Manifest,
    shape: ShapeTable | None,
    machines: Mapping[str, FreeHere],
    method: str,
    parameters: int | None = None,
    count: Count | None = None,
) -> FitVerdict | None:
    """Whether all of these machines, by name, hold a run of ``method``, with the mildest settings
    that make it so; None where nothing is known of what it needs. ``count``: what fits by the
    formula has to fit by this, too.
    """
    last: FitVerdict | None = None
    for change in changes_for(manifest, method):
        needs = needs_of(changed(manifest, change), parameters, shape)
        if needs is None:
            return None
        short = _short(needs, machines)
        if not short and count is not None:
            needs = needs_of(changed(manifest, change), parameters, shape, count) or needs
            short = _short(needs, machines)
        last = FitVerdict(method, not short, change, needs, tuple(dict.fromkeys(short)))
        if not short:
            return last
        if needs.step is None:  # nothing of it follows from these settings
            return last
    return last


def _short(needs: Needs, machines: Mapping[str, FreeHere]) -> list[str]:
    return [line for whose, each in machines.items() for line in shortages(needs, each, whose)]


def methods_beside(manifest: Manifest) -> tuple[str, ...]:
    """The run's own method, then those that need less."""
    return METHODS[METHODS.index(manifest.model.method) :]


def installs(manifest: Manifest, verdict: FitVerdict) -> str:
    """The extra that a run as the verdict has it takes beside `atoll[models]`; "" where none."""
    run = changed(manifest, verdict.change)
    wants = wants_bitsandbytes(run.model.method, run.train.inner.optimizer)
    return OF_FOUR_BITS if wants else ""


def _cure(manifest: Manifest, verdict: FitVerdict) -> str:
    extra = "" if has_bitsandbytes() else installs(manifest, verdict)
    needed = f", which needs pip install '{extra}'" if extra else ""
    return f"It would fit with {toml_of(verdict.change)}{needed}"


def refuse_too_large(manifest: Manifest, whole: FreeHere) -> None:
    """Raise ConfigError E416 where a run of a pretrained model takes more memory than this machine
    has, by more than what is counted may be off: before anything is downloaded.
    """
    needs = needs_of(manifest)
    if needs is None or needs.step is None:
        return
    cards = tuple(_more(each) or 0 for each in whole.cards)
    roomy = FreeHere(_more(whole.host), _more(whole.gpu), None, cards)
    if not shortages(needs, roomy):
        return
    verdicts = [judge(manifest, None, {"this machine": whole}, each) for each in METHODS]
    fitting = [each for each in verdicts if each is not None and each.fits]
    own = [each for each in fitting if each.method == manifest.model.method] or fitting
    raise ConfigError(
        "; ".join(shortages(needs, whole)).replace(" free,", ","),
        key="machine",
        code="E416",
        why="Nothing was downloaded. All members train alike, so the founder chooses the settings.",
        hint=_cure(manifest, own[0])
        if own
        else "No method and no setting makes it fit here: a smaller model (atoll fit).",
    )


def _more(size: int | None) -> int | None:
    return None if size is None else round(size * (1 + COUNTED_WITHIN))


@dataclass(frozen=True, slots=True)
class HeldRun:
    """A run as machines hold it. ``manifest``: with ``change``. ``machines``: who is in it.
    ``left_out``: by name, what a machine lacks. ``pairs``: codecs with overlaps that all of them
    have the memory for. ``advice``: what a person should know of it.
    """

    manifest: Manifest
    change: Change
    machines: tuple[NamedMachine, ...]
    left_out: Mapping[str, str]
    pairs: frozenset[tuple[str, str]]
    advice: tuple[str, ...] = ()


def hold(
    manifest: Manifest,
    shape: ShapeTable | None,
    machines: Sequence[NamedMachine],
    parameters: int | None = None,
) -> HeldRun:
    """The run as these machines hold it: with the mildest settings for all of them; where fewer
    than half hold its method, by one that needs less; without those that hold none of it.

    Raises ConfigError E416 that says what is missing, where no machine holds it.
    """
    plain = changed(manifest, LEAST)
    ways = methods_beside(manifest) if manifest.model.pretrained else (manifest.model.method,)
    kinds = dict.fromkeys(each.free for each in machines)
    holders = dict[str, list[NamedMachine]]()
    for method in ways:
        fits = {each: _fits(plain, shape, each, method, parameters) for each in kinds}
        holders[method] = [each for each in machines if fits[each.free]]
    most = max(holders.values(), key=len)
    if not most:
        raise _nobody(plain, shape, machines, ways, parameters)
    own = holders[ways[0]]
    kept = own if 2 * len(own) >= len(machines) else most
    method = next(method for method in ways if len(holders[method]) == len(kept))
    verdict = judge(plain, shape, _free(kept), method, parameters)
    if verdict is None:  # nothing is known of what it needs
        return HeldRun(manifest, {}, tuple(machines), {}, PAIRS)
    while not verdict.fits:  # each holds it with settings of its own, and not all with the same
        kept = [each for each in kept if not shortages(verdict.needs, each.free)] or kept[:1]
        verdict = _judged(plain, shape, kept, method, parameters)
    inside = {each.name for each in kept}
    left_out = {
        each.name: "; ".join(_judged(plain, shape, [each], method, parameters).short)
        for each in machines
        if each.name not in inside
    }
    run = changed(manifest, verdict.change)
    advice = list[str]()
    if method != ways[0]:
        advice.append(_take(method, ways[0], len(own), len(machines)))
    elif left_out and len(most) > len(kept):
        better = next(each for each in ways if len(holders[each]) == len(most))
        advice.append(f"with method = {better!r} {len(most)} of {len(machines)} machines hold it")
    if extra := installs(plain, verdict):
        wants = wants_bitsandbytes(run.model.method, run.train.inner.optimizer)
        advice.append(f"{wants} needs pip install '{extra}' on each machine")
    return HeldRun(
        run, verdict.change, tuple(kept), left_out, _pairs(run, shape, kept, parameters), (*advice,)
    )


LEAST: Change = {
    "exchange.codec": "int4",
    "exchange.error": None,
    "exchange.codecs": {},
    "train.overlap": "none",
}
"""Of all that `plan` proposes, what needs least memory."""
PAIRS = frozenset((codec, overlap) for codec in PLANNED for overlap in ("none", "late"))


def _free(machines: Sequence[NamedMachine]) -> dict[str, FreeHere]:
    return {each.name: each.free for each in machines}


def _judged(
    manifest: Manifest,
    shape: ShapeTable | None,
    machines: Sequence[NamedMachine],
    method: str,
    parameters: int | None,
) -> FitVerdict:
    found = judge(manifest, shape, _free(machines), method, parameters)
    assert found is not None, "its size is known"
    return found


def _fits(
    manifest: Manifest,
    shape: ShapeTable | None,
    machine: FreeHere,
    method: str,
    parameters: int | None,
) -> bool:
    verdict = judge(manifest, shape, {"": machine}, method, parameters)
    return verdict is None or verdict.fits


def _pairs(
    manifest: Manifest,
    shape: ShapeTable | None,
    machines: Sequence[NamedMachine],
    parameters: int | None,
) -> frozenset[tuple[str, str]]:
    """Codecs with overlaps that all machines hold."""
    found, kinds = set[tuple[str, str]](), {each.free for each in machines}
    for codec, overlap in PAIRS:
        change = {**LEAST, "exchange.codec": codec, "train.overlap": overlap}
        needs = needs_of(changed(manifest, change), parameters, shape)
        if needs is None or not any(shortages(needs, each) for each in kinds):
            found.add((codec, overlap))
    return frozenset(found)


def _take(method: str, own: str, holding: int, count: int) -> str:
    name = {"lora": "LoRA", "qlora": "QLoRA"}[method]
    who = "none" if not holding else f"{holding}"
    return (
        f'take {name}: method = "{method}". Of {count} machine{"s" * (count > 1)} {who} '
        f'hold{"s" * (holding <= 1)} the run with method = "{own}", whatever its settings'
    )


def _nobody(
    manifest: Manifest,
    shape: ShapeTable | None,
    machines: Sequence[NamedMachine],
    ways: Sequence[str],
    parameters: int | None,
) -> ConfigError:
    """What the largest machine lacks, with the settings that need least."""
    largest = max(machines, key=lambda each: (each.free.gpu or 0, each.free.host or 0))
    least = _judged(manifest, shape, [largest], ways[-1], parameters)
    settings = toml_of(least.change)
    adapters = not manifest.model.pretrained
    return ConfigError(
        f"none of {len(machines)} machines holds this run"
        if len(machines) > 1
        else "this machine does not hold this run",
        key="machine",
        code="E416",
        why=f"What needs least ({settings or 'its own settings'}): {'; '.join(least.short)}.",
        hint="Take LoRA, of which only the adapters are kept and travel (docs/adapters.md), a "
        "smaller model, or machines with more memory."
        if adapters
        else "A smaller model, or machines with more memory: atoll fit says what would do.",
    )


def step_flops(shape: ShapeTable, settings: StepSettings) -> float:
    """Operations for a token, forward and backward."""
    active = active_parameters(shape)
    seen = 2.0 * shape.layers * settings.length * shape.heads * shape.width  # attention, causal
    # forward, gradients of values, gradients of weights; forward again with checkpointing
    passes = 3 if settings.method == "full" else 2
    passes += settings.checkpointing
    return passes * (2.0 * active + seen)


def tokens_s(machine: NamedMachine, shape: ShapeTable, manifest: Manifest) -> float | None:
    """Tokens a second that a machine trains on, within a factor of two where nothing was measured;
    None where it is not known how fast it calculates.
    """
    if machine.flops is None:
        return None
    settings = step_settings(manifest, gpu=machine.gpu)
    cards = 1 if why_not_sharded(manifest)[0] else max(1, len(machine.free.cards))
    return USED * cards * machine.flops / step_flops(shape, settings)
