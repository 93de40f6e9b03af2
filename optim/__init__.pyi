# What scripts import of atoll.optim, for type checkers: the package loads a name when it is used.

from .integrations.lightning import AtollLightningCallback
from .integrations.trainer import AtollCallback
from .outer import OuterStep
from .outer.presets import outer_preset
from .script.attachment import Attachment, attach
from .script.diloco import DiLoCo
from .script.gradient_averaging import GradientAveraging
from .script.local_sgd import LocalSGD
from .script.schedules import steps_left
from .script.seeded import SeededTraining
from .solo import SoloSwarm

__all__ = [
    "attach",
    "Attachment",
    "DiLoCo",
    "LocalSGD",
    "GradientAveraging",
    "OuterStep",
    "SoloSwarm",
    "outer_preset",
    "SeededTraining",
    "steps_left",
    "AtollCallback",
    "AtollLightningCallback",
]
