"""The card of a model: what `atoll export` needs beside the anchor to write the whole model, when
the script that has it is gone.

A script writes it into the folder of its run (`script.keeping`), whoever exports reads it. The
folder holds

    card.safetensors     the card as JSON in its metadata; as tensors the values that the run does
                         not have: buffers, of an adapter what is frozen in it, and frozen
                         parameters that change all the same
    frozen.safetensors   frozen parameters, written once
    files/               configurations and tokenizer, as they go into the exported folder
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from ...collectives.errors import StorageError

if TYPE_CHECKING:  # commands read the names here, and load no torch for it
    from torch import Tensor

FOLDER = "model"  # in the run's folder, as is
START_FILE = "start.safetensors"  # the model that the run begins with: `atoll new --from`
CARD_FILE, FROZEN_FILE, FILES = "card.safetensors", "frozen.safetensors", "files"


class Saved(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tensor of the exported file. ``of``: the tensor of the run whose values it has; "": they
    lie here, under ``name``, or under ``same`` where two names are one tensor. ``dtype``: as
    trained, such as "bfloat16". ``tied``: another name has it, too, from which transformers takes
    it when it loads the model.
    """

    name: str
    dtype: str
    of: str = ""
    same: str = ""
    frozen: bool = False
    tied: bool = False


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What one export is made of.

    ``floats``: the floating types of the live model, buffers that ``state_dict()`` leaves out
    included; ``computed``: that of those buffers, where all have one. ``wrapped``: the script's
    model is one of torch.compile or DDP, whose names are others. ``missing``: what belongs to the
    model and is not here, with the reason. ``own``: buffers and frozen parameters that changed in
    training, and are this member's own. ``made``: the saved tensors are computed from trained ones
    (PEFT's prompt encoders), so all lie here, for the anchor of ``round``.
    """

    kind: Literal["module", "transformers", "peft"]
    round: int
    saved: tuple[Saved, ...]
    transformers_class: str = ""
    floats: tuple[str, ...] = ()
    computed: str = ""
    wrapped: bool = False
    files: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    made: bool = False
    frozen_id: str = ""  # of the frozen file that belongs to it


def write_card(folder: Path, card: ModelCard, values: Mapping[str, Tensor]) -> None:
    """Replace the card in ``folder``. Raises OSError."""
    from .tensor_file import write_tensors

    write_tensors(folder / CARD_FILE, values, {"card": msgspec.json.encode(card).decode()})


def read_card(folder: Path) -> tuple[ModelCard, dict[str, Tensor]] | None:
    """The card in ``folder`` and all values that lie beside it, by name; None where no script left
    one. A frozen file of another card is left out, and what it lacks is named in ``missing``.
    Raises StorageError E303.
    """
    from safetensors import SafetensorError

    path = folder / CARD_FILE
    if not path.exists():
        return None
    try:
        about, values = _read(path)
        card = msgspec.json.decode(about["card"], type=ModelCard)
        if card.frozen_id and frozen_id(folder) == card.frozen_id:
            values = _read(folder / FROZEN_FILE)[1] | values  # what has changed since is here
    except (OSError, SafetensorError, msgspec.MsgspecError, KeyError) as error:
        raise StorageError(
            f"{path} is damaged: {error}",
            code="E303",
            why="The disk, or something else than atoll, changed it.",
            hint="Start the training script again: it writes a new one when it attaches.",
            exit_code=74,
        ) from None
    gone = tuple(
        f"{each.name} (frozen, and its file is gone)"
        for each in card.saved
        if not each.of and (each.same or each.name) not in values
    )
    return msgspec.structs.replace(card, missing=card.missing + gone), values


def frozen_id(folder: Path) -> str:
    """Of which frozen parameters the file in ``folder`` is; "" where there is none."""
    from safetensors import SafetensorError, safe_open

    path = folder / FROZEN_FILE
    try:
        with safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
            return (file.metadata() or {}).get("id", "")
    except (OSError, SafetensorError):
        return ""


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
        names = list(file.keys())  # it is no dictionary
        return file.metadata() or {}, {name: file.get_tensor(name) for name in names}
