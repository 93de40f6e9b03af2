"""What a run needs of a member's machine, in bytes a parameter: host memory, the memory of a GPU,
disk, and what a newcomer fetches; and whether this machine has it.

Figures of host memory are those of plain runs; `scripts/bench/bench_memory.py` measures them.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ...collectives.codec_names import BYTES_PER_VALUE, RESULTS, exact_share
from ...collectives.codecs.accuracy import bytes_per_value, ladder
from ...collectives.swarm import MOST_REPLAYED, RunSettings
from ..home.output import bytes_text, span_text
from ..manifest import Manifest

FLOAT_BYTES = 4
STATE_VECTORS = {"adam": 2, "yogi": 2, "adamw": 2, "delayed_nesterov": 2}
"""Vectors as long as the anchor that an outer optimizer keeps, where it is not one. (The rules
themselves load torch, for which nobody who reads a manifest waits.)"""
_MOMENTA = {"delayed_nesterov": 2}  # of them, those that momentum_dtype is about, where not one
_SNAPSHOTS = {"none": 0, "late": 1, "eager": 3}  # vectors of a script that trains on meanwhile
# of weights and gradients, and what the built-in recipe's inner optimizer keeps, in float32
_TRAINED = {"adamw": 4, "sgd": 2}
CHECKPOINTS = 3  # the newest, the one before, and one that is being written
USUAL_RATE = 12_500_000  # bytes/s: 100 Mbit/s, where nobody says what a link carries
SMI_S = 5.0


def state_bytes(settings: RunSettings) -> int:
    """Bytes of a parameter in the state that members keep on disk, and hand to who joins: the
    anchor and the outer optimizer's vectors, float32, momenta as `momentum_dtype` says.
    """
    outer = settings.outer
    saved = 2 * _MOMENTA.get(outer.kind, 1) if outer.momentum_dtype == "bf16" else 0
    return FLOAT_BYTES * (1 + STATE_VECTORS.get(outer.kind, 1)) - saved


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
    """The most of it while a round is under way: the contribution, the next anchor beside the
    present one, what others have contributed to this member's part, and the result.
    """
    contribution = settings.method != "gradient_averaging"
    return (
        host_bytes(settings)
        + FLOAT_BYTES * (contribution + 1)
        + _sent(settings)
        + result_bytes(settings)
    )


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
    optimizer of the built-in model, without activations; atoll itself keeps nothing of the model's
    size there. ``disk``: at most. ``fetched``: by who joins.
    """

    host: int | None
    host_peak: int | None
    gpu: int | None
    disk: int
    fetched: int

    def join_s(self, down: float) -> float:
        """Seconds in which a link of ``down`` bytes/s brings what a newcomer fetches."""
        return self.fetched / down


def needs_of(manifest: Manifest, parameters: int | None = None) -> Needs | None:
    """What a run needs; None where the size of its model is not known. ``parameters``: of another
    size than the manifest says, or where it says none.
    """
    size = parameters if parameters is not None else manifest.parameters
    if size is None:
        return None
    settings = manifest.settings()
    plain = not (manifest.mode == "federated" or settings.secure or settings.btard)
    state = state_bytes(settings)
    # results are kept from the older checkpoint on
    results = 2 * min(manifest.checkpoint.every, MOST_REPLAYED) + 1
    own = manifest.audit.keep_contributions * _sent(settings)
    trained = _TRAINED[manifest.train.inner.optimizer]
    return Needs(
        round(size * host_bytes(settings)) if plain else None,
        round(size * host_peak_bytes(settings)) if plain else None,
        size * FLOAT_BYTES * trained if manifest.model.entry == "builtin:gpt" else None,
        round(size * (CHECKPOINTS * state + results * result_bytes(settings) + own)),
        size * state,
    )


@dataclass(frozen=True, slots=True)
class FreeHere:
    """What this machine has free, in bytes; None: not known, or no GPU."""

    host: int | None
    gpu: int | None
    disk: int | None


def this_machine(folder: Path) -> FreeHere:
    """``folder``: where the run would lie, which need not exist yet. Asks the kernel, and
    nvidia-smi where there is one, for SMI_S seconds at most.
    """
    return FreeHere(host_memory(), _gpu(), _disk(folder))


def host_memory() -> int | None:
    """Bytes that are free here, as far as that is known."""
    return _host(Path("/proc/meminfo"))


def _host(meminfo: Path) -> int | None:
    try:
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _gpu() -> int | None:
    """Free memory of the GPU that has most."""
    if (program := shutil.which("nvidia-smi")) is None:
        return None
    command = [program, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=True)
        return max(int(line) for line in told.stdout.split()) << 20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _disk(folder: Path) -> int | None:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def shortages(needs: Needs, machine: FreeHere) -> list[str]:
    """What of it this machine does not have free, a sentence each."""
    # the system keeps results' pages only as long as it has room: they need not be there
    pairs = (
        ("host memory", "at the peak of a round", needs.host_peak, machine.host),
        ("GPU memory", "without activations", needs.gpu, machine.gpu),
        ("disk", "at most", needs.disk, machine.disk),
    )
    return [
        f"this machine has {bytes_text(free)} of {what} free, and the run needs about "
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
    if needs.gpu is not None:
        lines.append(
            f"gpu      {bytes_text(needs.gpu)} and activations, where the model is trained on one"
        )
    rate = USUAL_RATE if down is None else down
    lines.append(
        f"disk     up to {bytes_text(needs.disk)} for the newest states and the results since"
    )
    lines.append(
        f"joining  fetches {bytes_text(needs.fetched)}: {span_text(needs.join_s(rate))} "
        f"at {8e-6 * rate:.4g} Mbit/s"
    )
    return lines


def needs_document(needs: Needs, down: float | None = None) -> dict[str, object]:
    """For JSON; seconds are those of `needs_lines`."""
    return {
        "host_bytes": needs.host,
        "host_peak_bytes": needs.host_peak,
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
