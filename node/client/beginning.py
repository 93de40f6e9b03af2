"""What a run begins with where its organiser gave a model to start from (`atoll new --from`): that,
in place of the script's own parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ...collectives.errors import ModelMismatchError, StorageError

if TYPE_CHECKING:
    from torch import Tensor

    from ...collectives.layout import Layout

START_FILE = "start.safetensors"  # in the run's folder


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
            mine = {spec.name: spec.shape for spec in specs}
            if shapes != mine:
                wrong = sorted(
                    name
                    for name in mine.keys() | shapes.keys()
                    if mine.get(name) != shapes.get(name)
                )
                raise ModelMismatchError(
                    (
                        f"the model to start from is not the script's: {len(wrong)} tensors "
                        f"differ, {', '.join(wrong[:4])}"
                    ),
                    hint="atoll new RUN.toml --from DIR, with an export of a run of this model",
                )
            for spec in specs:
                destination[spec.offset : spec.offset + spec.numel].copy_(
                    file.get_tensor(spec.name).flatten()
                )
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{path} is damaged: {error}", code="E303", exit_code=74) from None
