"""What a run needs of a member's machine: host memory, the memory of a GPU, disk, and what a
newcomer fetches; and whether a machine has it.

Figures of host memory are those of plain runs, in bytes a parameter;
`scripts/bench/bench_memory.py` measures them. What training itself takes is known of pretrained
models (`recipes.models.sizing`), measured by `scripts/bench/bench_fit.py`.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ...collectives.codec_costs import exact_share
from ...collectives.codec_names import BYTES_PER_VALUE, RESULTS
from ...collectives.codecs.accuracy import bytes_per_value, ladder
from ...collectives.outer_rules import OUTER_RULES
from ...collectives.round_settings import MOST_REPLAYED
from ...collectives.swarm import RunSettings
from ..home.output import bytes_text, span_text
from ..manifest import Manifest, adapters_of, why_not_sharded
from ..manifest.tables import ShapeTable
from ..recipes.models.shapes import whole_parameters
from ..recipes.models.sizing import (
    PROGRAMS,
    StepBytes,
    StepSettings,
    on_gpu,
    sharded_bytes,
    step_bytes,
    trained_of,
)

FLOAT_BYTES = 4
_SNAPSHOTS = {"none": 0, "late": 1, "eager": 3}  # vectors of a script that trains on meanwhile
# of weights and gradients, and what the built-in recipe's inner optimizer keeps, in float32
_TRAINED = {"adamw": 4, "sgd": 2}
CHECKPOINTS = 3  # the newest, the one before, and one that is being written
USUAL_RATE = 12_500_000  # bytes/s: 100 Mbit/s, where nobody says what a link carries
SMI_S = 5.0
NODE_PROGRAM = 160 << 20  # of a node's process that holds nothing of a run
_FILE_BYTES = 2  # a parameter in the files of a pretrained model, where nobody has looked


def state_bytes(settings: RunSettings) -> int:
    """Bytes of a parameter in the state that members keep on disk, and hand to who joins: the
    anchor and the outer optimizer's vectors, float32, momenta as `momentum_dtype` says.
    """
    outer = settings.outer
    facts = OUTER_RULES.get(outer.kind, OUTER_RULES["nesterov"])  # also of a federated momentum
    saved = 2 * facts.momenta if outer.momentum_dtype == "bf16" else 0
    return FLOAT_BYTES * (1 + max(1, facts.vectors)) - saved


def host_bytes(settings: RunSettings) -> float:
    """Bytes of a parameter that script and node of a plain run hold between rounds, beside
    the model, its optimizer and what programs cost whatever the model: the state, and what
    the script carries from round to round. Results are files, which the system keeps in memory
    as long as it has some to spare.
    """
    encoded = [_codec(settings), *settings.codecs.values()]
    # a contribution's memory goes back to the system, unless there is one at every step
    vectors = int(settings.method == "gradient_averaging")
    vectors += settings.feedback or not RESULTS.keys().isdisjoint(encoded)
    vectors += 2 if settings.worker_momentum else 0
    vectors += _SNAPSHOTS[settings.overlap]
    return state_bytes(settings) + FLOAT_BYTES * vectors


def host_peak_bytes(settings: RunSettings) -> float:
    """The most of it while a round is under way, when the outer step is made: the contribution,
    the next anchor beside the present one, and the result. What others have contributed to this
    member's part is gone by then, and is less than an anchor.
    """
    contribution = settings.method != "gradient_averaging"
    return host_bytes(settings) + FLOAT_BYTES * (contribution + 1) + result_bytes(settings)


def result_bytes(settings: RunSettings) -> float:
    """Bytes of a parameter of one round's result."""
    return _encoded(settings, RESULTS.get(settings.codec, settings.codec))


def _sent(settings: RunSettings) -> float:
    return _encoded(settings, settings.codec)


def _encoded(settings: RunSettings, codec: str) -> float:
    """With as many small tensors in fp32 as may be."""
    if codec not in BYTES_PER_VALUE:
        return FLOAT_BYTES  # words of a masked sum
    value = BYTES_PER_VALUE[codec] if settings.error is None else bytes_per_value(settings.error)
    exact = exact_share(settings.codec) if settings.exact else 0.0
    return value + exact * (FLOAT_BYTES - value)


def _codec(settings: RunSettings) -> str:
    return settings.codec if settings.error is None else ladder(settings.error).fine


@dataclass(frozen=True, slots=True)
class Needs:
    """Of one member, in bytes. ``host`` between rounds and ``host_peak`` in them, beside the model
    and its optimizer: None where no figure is known. ``gpu``: weights, gradients and inner
    optimizer of the built-in model, without activations; all that is there of a pretrained one
    whose shape is known. atoll itself keeps nothing of the model's size there. ``disk``: at most,
    with a pretrained model's files, the ``base``. ``fetched``: by who joins, of other members.
    ``step``: what training takes on a machine without a GPU, where that is known; ``loaded``: a
    pretrained model's weights, which go through host memory on their way to a GPU. ``shared``: of
    ``gpu``, what several cards of one machine hold in shards, 0 where they do not train together;
    ``gathered``: what each of them needs besides.
    """

    host: int | None
    host_peak: int | None
    gpu: int | None
    disk: int
    fetched: int
    step: StepBytes | None = None
    base: int = 0
    loaded: int = 0
    shared: int = 0
    gathered: int = 0

    def join_s(self, down: float) -> float:
        """Seconds in which a link of ``down`` bytes/s brings what a newcomer fetches, of members
        and of a hub.
        """
        return (self.fetched + self.base) / down

    def on_each(self, cards: int) -> int | None:
        """What each of so many cards of one machine needs that train together."""
        if self.gpu is None or cards < 2 or not self.shared:
            return self.gpu
        return self.gpu - self.shared + -(-self.shared // cards) + self.gathered

    def host_all(self, *, gpu: bool, cards: int = 1) -> int | None:
        """The most of a machine's memory that node and script take together, programs and training
        included where it trains there; None where that is not known. ``cards``: processes, which
        load the model one after another.
        """
        if self.step is None or self.host is None or self.host_peak is None:
            return self.host_peak
        programs = PROGRAMS * (cards if self.shared else 1) + NODE_PROGRAM
        if gpu:
            return programs + max(self.loaded + self.host, self.host_peak)
        held = self.step.weights + self.step.optimizer  # gradients are gone when a round begins
        return programs + max(self.step.peak + self.host, held + self.host_peak)


def step_settings(manifest: Manifest, *, gpu: bool = False) -> StepSettings:
    """How a run of a pretrained model trains, as the recipe does it."""
    model, inner, length = manifest.model, manifest.train.inner, manifest.data.length
    lora, dtype = adapters_of(manifest), model.dtype
    if dtype == "auto":
        dtype = "float32" if model.method == "full" else "bfloat16"
    return StepSettings(
        method=model.method,
        dtype=dtype,
        checkpointing=model.checkpointing,
        length=length,
        micro_batch=inner.micro_batch,
        accumulated=max(1, -(-inner.tokens_per_step // (length * inner.micro_batch))),
        optimizer=inner.optimizer,
        rank=lora.rank if lora is not None else 1,
        in_backward=inner.in_backward,
        autocast=gpu and (dtype == "float32" or model.method != "full"),
    )


Count = Callable[[ShapeTable, StepSettings], StepBytes]
"""How a step's memory is counted."""


def needs_of(
    manifest: Manifest,
    parameters: int | None = None,
    shape: ShapeTable | None = None,
    count: Count = step_bytes,
) -> Needs | None:
    """What a run needs; None where the size of its model is not known. ``parameters``: of another
    size than the manifest says, or where it says none. ``shape``: of a pretrained model that
    nobody has looked at yet. ``count``: of a step without a GPU.
    """
    base = manifest.model.base
    shape = base.shape if base is not None else shape
    size = parameters if parameters is not None else manifest.parameters
    shape = shape if manifest.model.pretrained and parameters is None else None
    if size is None and shape is not None:
        size = trained_of(shape, step_settings(manifest))
    if size is None:
        return None
    settings = manifest.settings()
    plain = not (manifest.kind == "federated" or settings.secure or settings.btard)
    state = state_bytes(settings)
    # results are kept from the older checkpoint on
    results = 2 * min(manifest.checkpoint.every, MOST_REPLAYED) + 1
    own = manifest.audit.keep_contributions * _sent(settings)
    files = base.size if base is not None else 0
    step, gpu, loaded, shared = None, None, 0, (0, 0)
    if manifest.model.entry == "builtin:gpt":
        gpu = size * FLOAT_BYTES * _TRAINED[manifest.train.inner.optimizer]
    elif shape is not None:
        files = files or _FILE_BYTES * whole_parameters(shape)
        step = count(shape, step_settings(manifest))
        gpu = on_gpu(step_bytes(shape, step_settings(manifest, gpu=True)))
        if not why_not_sharded(manifest)[0]:
            shared = sharded_bytes(shape, step_settings(manifest, gpu=True))
        loaded = 0 if manifest.model.method == "qlora" else step.weights
    return Needs(
        round(size * host_bytes(settings)) if plain else None,
        round(size * host_peak_bytes(settings)) if plain else None,
        gpu,
        round(size * (CHECKPOINTS * state + results * result_bytes(settings) + own)) + files,
        size * state,
        step,
        files,
        loaded,
        *shared,
    )


@dataclass(frozen=True, slots=True)
class FreeHere:
    """What a machine has free, in bytes; None: not known, or no GPU. ``cards``: of each GPU, where
    there are several; ``gpu`` is then that which has most.
    """

    host: int | None
    gpu: int | None
    disk: int | None
    cards: tuple[int, ...] = ()


def this_machine(folder: Path) -> FreeHere:
    """``folder``: where the run would lie, which need not exist yet. Asks the kernel, and
    nvidia-smi where there is one, for SMI_S seconds at most.
    """
    cards = _gpus()
    return FreeHere(host_memory(), max(cards, default=None), _disk(folder), _several(cards))


def host_memory() -> int | None:
    """Bytes that are free here, as far as that is known."""
    return _host(Path("/proc/meminfo"))


def _host(meminfo: Path, *names: str) -> int | None:
    """What the kernel says of these names together; of what is free without any."""
    found = list[int]()
    try:
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.partition(":")[0] in (names or ("MemAvailable",)):
                found.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError, IndexError):
        return None
    return sum(found) if found else None


def whole_machine(card: Path = Path("/dev/kfd")) -> FreeHere:
    """What this machine has of memory, used or not: what does not fit in it never will. Of a GPU
    that nvidia-smi does not know, ``card``, nothing is said, and nothing of the memory beside it.
    """
    if card.exists():
        return FreeHere(None, None, None)
    host = _host(Path("/proc/meminfo"), "MemTotal", "SwapTotal")
    cards = _gpus("memory.total")
    return FreeHere(host, max(cards, default=None), None, _several(cards))


def _gpus(what: str = "memory.free") -> tuple[int, ...]:
    """Free memory of each GPU; empty where nvidia-smi does not say it of all."""
    try:
        return tuple(int(line) << 20 for line in _smi(what).split())
    except ValueError:
        return ()


def _several(cards: tuple[int, ...]) -> tuple[int, ...]:
    return cards if len(cards) > 1 else ()


def gpu_name() -> str:
    """What the driver calls the first GPU; "": there is none."""
    return _smi("name").partition("\n")[0].strip()


def _smi(what: str) -> str:
    """What nvidia-smi says of it, a line a GPU; "" where it says nothing."""
    if (program := shutil.which("nvidia-smi")) is None:
        return ""
    command = [program, f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=SMI_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _disk(folder: Path) -> int | None:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def shortages(needs: Needs, machine: FreeHere, whose: str = "this machine") -> list[str]:
    """What of it a machine does not have free, a sentence each."""
    trains = needs.step is not None
    gpu = machine.gpu is not None
    # the system keeps results' pages only as long as it has room: they need not be there
    peak = "at the peak of a round" if not trains else "at the peak" if gpu else "while it trains"
    cards = len(machine.cards) if needs.shared else 1
    each, memory = "at the peak" if trains else "without activations", machine.gpu
    if cards > 1:
        each, memory = f"at the peak on each of {cards} cards", min(machine.cards)
    pairs = (
        ("host memory", peak, needs.host_all(gpu=gpu, cards=max(1, cards)), machine.host),
        ("GPU memory", each, needs.on_each(cards), memory),
        ("disk", "at most", needs.disk, machine.disk),
    )
    return [
        f"{whose} has {bytes_text(free)} of {what} free, and the run needs about "
        f"{bytes_text(needed)} {when}"
        for what, when, needed, free in pairs
        if needed is not None and free is not None and free < needed
    ]


def needs_lines(needs: Needs, down: float | None = None) -> list[str]:
    """For people. ``down``: bytes/s that this machine's link brings; None: not known."""
    lines = list[str]()
    if needs.host is not None and needs.host_peak is not None:
        lines.append(
            f"memory   about {bytes_text(needs.host)} between rounds, "
            f"{bytes_text(needs.host_peak)} at their peak, beside the model and its optimizer"
        )
    if needs.step is not None and needs.gpu is not None:
        alone, beside = needs.host_all(gpu=False), needs.host_all(gpu=True)
        lines.append(
            f"train    {bytes_text(needs.gpu)} of GPU memory"
            + (f" and {bytes_text(beside)} of the machine's" if beside is not None else "")
            + (f"; {bytes_text(alone)} without a GPU" if alone is not None else "")
        )
    elif needs.gpu is not None:
        lines.append(
            f"gpu      {bytes_text(needs.gpu)} and activations, where the model is trained on one"
        )
    rate = USUAL_RATE if down is None else down
    lines.append(
        f"disk     up to {bytes_text(needs.disk)} for the newest states and the results since"
        + (", and the model's files" if needs.base else "")
    )
    lines.append(
        f"joining  fetches {bytes_text(needs.fetched)}"
        + (f", and the model's {bytes_text(needs.base)}" if needs.base else "")
        + f": {span_text(needs.join_s(rate))} at {8e-6 * rate:.4g} Mbit/s"
    )
    return lines


def needs_document(needs: Needs, down: float | None = None) -> dict[str, object]:
    """For JSON; seconds are those of `needs_lines`."""
    step = needs.step
    return {
        "host_bytes": needs.host,
        "host_peak_bytes": needs.host_peak,
        "host_all_bytes": needs.host_all(gpu=False),
        "host_beside_gpu_bytes": needs.host_all(gpu=True),
        "step_bytes": None if step is None else asdict(step),
        "base_bytes": needs.base,
        "gpu_bytes": needs.gpu,
        "disk_bytes": needs.disk,
        "join_bytes": needs.fetched,
        "join_s": round(needs.join_s(USUAL_RATE if down is None else down), 3),
    }


def machine_document(needs: Needs | None, machine: FreeHere) -> dict[str, object]:
    """For JSON: what is free here, and what is short."""
    return {
        "machine": {
            "host_bytes": machine.host,
            "gpu_bytes": machine.gpu,
            "disk_bytes": machine.disk,
        },
        "short_of": [] if needs is None else shortages(needs, machine),
    }


def machine_lines(needs: Needs | None, machine: FreeHere) -> list[str]:
    """For people: a warning for each thing that is short."""
    return [] if needs is None else [f"WARNING  {each}" for each in shortages(needs, machine)]
