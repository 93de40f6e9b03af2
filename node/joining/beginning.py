"""What a run begins with where its organiser gave a model to start from (`atoll new --from`): that,
in place of the script's own parameters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ...collectives.errors import ModelMismatchError, StorageError
from ...optim.model.adapter_names import saved_names
from ...optim.model.card import START_FILE

if TYPE_CHECKING:
    from torch import Tensor

    from ...collectives.layout import Layout


def beginning(
    folder: Path, layout: Layout, initial: Callable[[Tensor], None]
) -> Callable[[Tensor], None]:
    """``initial``, which writes float32 (layout.numel,), and then what ``folder`` has to start
    from, if anything. Sums, which no model has, stay.

    What is returned raises ModelMismatchError, naming the tensors, and StorageError E303.
    """

    def begin(destination: Tensor) -> None:
        initial(destination)
        if (folder / START_FILE).exists():
            _write(folder / START_FILE, layout, destination)

    return begin


def _write(path: Path, layout: Layout, destination: Tensor) -> None:
    from safetensors import SafetensorError, safe_open

    specs = [spec for spec in layout.tensors if spec.role != "sum"]
    try:
        with safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
            names = list(file.keys())  # it is no dictionary
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
            found = _found({spec.name: spec.shape for spec in specs}, shapes, file.metadata() or {})
            if wrong := [spec.name for spec in specs if spec.name not in found]:
                raise ModelMismatchError(
                    (
                        f"the model to start from is not the script's: {len(wrong)} tensors "
                        f"differ, {', '.join(wrong[:4])}"
                    ),
                    why="An adapter that PEFT computes when it saves has no trained tensors in it."
                    if any("prompt" in name for name in wrong)
                    else "",
                    hint="atoll new --from DIR --name NAME, with an export of a run of this model",
                )
            for spec in specs:
                destination[spec.offset : spec.offset + spec.numel].copy_(
                    file.get_tensor(found[spec.name]).flatten()
                )
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{path} is damaged: {error}", code="E303", exit_code=74) from None


def _found(
    mine: Mapping[str, tuple[int, ...]],
    saved: Mapping[str, tuple[int, ...]],
    about: Mapping[str, str],
) -> dict[str, str]:
    """The saved name of each tensor of the run that is there in its shape: as the export says it,
    else by PEFT's way with names.
    """
    found = {name: name for name, shape in mine.items() if saved.get(name) == shape}
    with suppress(ValueError, TypeError, AttributeError):
        for name, of in json.loads(about.get("names", "{}")).items():
            if of in mine and saved.get(name) == mine[of]:
                found.setdefault(of, name)
    rest = {name: shape for name, shape in mine.items() if name not in found}
    left = {name: shape for name, shape in saved.items() if name not in found.values()}
    return found | saved_names(rest, left)
