"""What the machine says of itself: its GPUs, by NVIDIA's library where that can be imported, and
the energy that its processors have taken, where the system tells it (RAPL). Read when somebody
asks; nothing where there is none.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

POWERCAP = Path("/sys/class/powercap")
SENSOR_TEMPERATURE = 0  # NVML_TEMPERATURE_GPU


class EnergyCounter:
    """One counter of a processor, in microjoules, which begins anew at 0 when it is full."""

    def __init__(self, folder: Path, name: str) -> None:
        """Raises OSError or ValueError for a counter that cannot be read."""
        self.name, self._file = name, folder / "energy_uj"
        self._range = _number(folder / "max_energy_range_uj")
        self._last = _number(self._file)
        self._total = 0

    def joules(self) -> float:
        """Taken since this was made: whoever asks less often than the counter fills loses what it
        held. Raises OSError or ValueError.
        """
        now = _number(self._file)
        self._total += (now - self._last) % (self._range + 1)
        self._last = now
        return self._total / 1e6


class MachineReadings:
    """Readings of this machine. ``powercap``: where the system keeps its energy counters;
    ``nvml``: NVIDIA's library, None where there is none.
    """

    def __init__(self, powercap: Path = POWERCAP, nvml: Any = None) -> None:
        self._nvml = nvml
        self._counters = list[EnergyCounter]()
        for folder in sorted(powercap.glob("intel-rapl:*")):  # AMD's processors, too
            with contextlib.suppress(OSError, ValueError):  # most systems let only root read them
                self._counters.append(EnergyCounter(folder, _zone(folder)))

    def read(self) -> dict[str, Any]:
        """``{"energy_joules": {zone: joules}, "gpus": [{"index", "name", ...}]}``."""
        energy = dict[str, float]()
        for counter in self._counters:
            with contextlib.suppress(OSError, ValueError):
                energy[counter.name] = counter.joules()
        return {"energy_joules": energy, "gpus": self._gpus()}

    def _gpus(self) -> list[dict[str, Any]]:
        nvml, found = self._nvml, list[dict[str, Any]]()
        if nvml is None:
            return found
        with contextlib.suppress(nvml.NVMLError):  # the driver is being exchanged
            for index in range(nvml.nvmlDeviceGetCount()):
                with contextlib.suppress(nvml.NVMLError):
                    found.append(self._gpu(index, nvml.nvmlDeviceGetHandleByIndex(index)))
        return found

    def _gpu(self, index: int, device: Any) -> dict[str, Any]:
        nvml = self._nvml
        name = nvml.nvmlDeviceGetName(device)
        found: dict[str, Any] = {
            "index": index,
            "name": name.decode(errors="replace") if isinstance(name, bytes) else str(name),
        }
        readings: dict[str, Callable[[], float]] = {
            "busy": lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100,
            "memory_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(device).used,
            "watts": lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1e3,
            "joules": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1e3,
            "celsius": lambda: nvml.nvmlDeviceGetTemperature(device, SENSOR_TEMPERATURE),
        }
        for key, read in readings.items():
            with contextlib.suppress(nvml.NVMLError):  # not every device tells everything
                found[key] = read()
        return found


def find_nvml() -> Any:
    """NVIDIA's library, ready to be asked; None without the package (``atoll[gpu]``), the driver or
    a device.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def _zone(folder: Path) -> str:
    """``package-0``, or ``package-0/core`` of a zone in it. Raises OSError."""
    own = (folder / "name").read_text(encoding="utf-8", errors="replace").strip()
    parent = folder.parent / folder.name.rpartition(":")[0]
    return f"{_zone(parent)}/{own}" if folder.name.count(":") > 1 and parent.is_dir() else own


def _number(file: Path) -> int:
    return int(file.read_text(encoding="ascii"))
