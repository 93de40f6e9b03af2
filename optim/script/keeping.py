"""What a script leaves in its run's folder, so that `atoll export` writes the whole model when the
script is gone: the card of its model (`model.card`). Written when the model is attached; what
changes, buffers and frozen parameters that the script moves itself, again as rounds end. Nothing of
it ends training: what cannot be written is a warning, once.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from blake3 import blake3
from safetensors import safe_open
from torch import Tensor, nn

from ...collectives.errors import AtollError, ConfigError, ModelMismatchError
from ...collectives.forced import make_folder
from ...collectives.outcomes import AnchorView
from ...collectives.swarm import RunSettings
from ..model.card import FILES, FROZEN_FILE, START_FILE, ModelCard, frozen_id, write_card
from ..model.flat import FlatVector
from ..model.frozen import base_digest
from ..model.tensor_file import bytes_of, write_tensors
from .saving import Described, ModelSaver, some

logger = logging.getLogger("atoll")

FREE_AFTER = 1 << 30  # bytes that frozen parameters leave free on the disk
SHARE = 0.02  # of the time, at most, for writing buffers as rounds end
SAMPLED = 64  # elements of a frozen parameter, by which it is seen to move
AtAnchor = Callable[[], AbstractContextManager[AnchorView]]


class ModelKeeper:
    """The card of one attached model. In a job of several ranks all of them call it alike, and one
    ``writes``.
    """

    def __init__(
        self,
        model: nn.Module,
        flat: FlatVector,
        settings: RunSettings,
        folder: Path | None,
        *,
        tokenizer: Any = None,
        writes: bool = True,
    ) -> None:
        """``flat``: the vector of the whole model. ``folder``: None where no node keeps the run;
        then the model is only checked.

        Raises ConfigError for a PEFT model that trains what PEFT would not save.
        """
        self._flat, self._folder, self._writes = flat, folder, writes
        self._how = settings.adapters.base
        self._saver = ModelSaver(model, flat, tokenizer)
        self._begun = dict[str, bytes]()  # digests of what was kept at first
        self._still = dict[str, Tensor]()  # elements of frozen parameters, as they were at first
        self._own: tuple[str, ...] = ()  # what has changed since
        self._frozen_id = ""
        self._no_room = frozenset[str]()
        self._not_before = 0.0
        self._warned = False
        self._buffers: tuple[str, ...] = ()  # that the model to start from has otherwise
        with self._tolerant():
            found = self._saver.describe()
            self._check_start(found)
            if found.lost and not found.made:
                logger.warning(
                    "state_dict() of the model leaves out what is trained: %s; atoll export cannot "
                    "write all of it",
                    some(found.lost),
                )

    def begin(self, at_anchor: AtAnchor, round: int) -> None:
        """Write everything, once the run is entered. ``at_anchor`` puts the anchor into the
        model.
        """
        if self._folder is None:
            return
        with self._tolerant():
            found, round = self._describe(at_anchor, round)
            self._begun = {name: _digest(value) for name, value in found.kept.items()}
            self._still = {name: _elements(value) for name, value in found.frozen.items()}
            self._keep_frozen(found.frozen)
            self._write(found, round)
        if round == 0 and self._buffers:
            logger.warning(
                "the model that this run starts from has other values in %s than this script's. "
                "Buffers do not travel: load them in each script before attach()",
                some(self._buffers),
            )

    def refresh(
        self, at_anchor: AtAnchor, round: int, clock: Callable[[], float], *, last: bool
    ) -> None:
        """Write what changes in training, buffers and what is computed, as it is at the end of a
        round. Skipped where it would take more than `SHARE` of the time, but for the ``last``.
        """
        if self._folder is None or ((started := clock()) < self._not_before and not last):
            return
        with self._tolerant():
            found, round = self._describe(at_anchor, round)
            found = self._with_moved(found)
            changed = (
                name
                for name, value in found.kept.items()
                if self._begun.get(name) != _digest(value)
            )
            self._own = tuple(dict.fromkeys((*self._own, *changed)))
            if self._own or found.made:
                self._write(found, round)
        self._not_before = started + (clock() - started) / SHARE

    def _with_moved(self, found: Described) -> Described:
        """With those frozen parameters among what is kept that the script moves itself, such as a
        teacher that follows what is trained.
        """
        moved = {
            name: value
            for name, value in found.frozen.items()
            if name in self._own
            or (name in self._still and not _equal(self._still[name], _elements(value)))
        }
        if moved and not moved.keys() & set(self._own):
            logger.info(
                "frozen parameters change in training: %s. They do not travel: each member has its "
                "own, and an export has this machine's",
                some(tuple(moved)),
            )
        return replace(found, kept={**found.kept, **moved}) if moved else found

    def _describe(self, at_anchor: AtAnchor, round: int) -> tuple[Described, int]:
        found = self._saver.describe()
        if not found.made:
            return found, round
        with at_anchor() as anchor:  # what is computed is computed from the anchor
            found = self._saver.describe()
            kept = {name: value.clone() for name, value in found.kept.items()}
            specs = self._flat.layout.tensors
            live = {spec.name: t for spec, t in zip(specs, self._flat.tensors, strict=True)}
            kept |= {each.name: live[each.of].detach().clone() for each in found.saved if each.of}
            saved = tuple(msgspec.structs.replace(each, of="") for each in found.saved)
            return replace(found, kept=kept, saved=saved), anchor.round

    def _check_start(self, found: Described) -> None:
        """Hold the model that the run is to start from against the script's, but for what is
        trained: nobody else would see that frozen parts are others. Raises ModelMismatchError.
        """
        path = self._folder.parent / START_FILE if self._folder is not None else None
        if path is None or not path.exists():
            return
        mine = {**found.kept, **found.frozen}
        known = {each.name: each.frozen for each in found.saved}
        known |= {spec.name: False for spec in self._flat.layout.tensors}
        with safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
            names = list(file.keys())  # it is no dictionary
            other = tuple(
                name
                for name in names
                if name in mine and not _same(_whole(mine[name]), file.get_tensor(name))
            )
        self._buffers = tuple(name for name in other if not known[name])
        if frozen := tuple(name for name in other if known[name]):
            line = (
                f"model.load_state_dict(safetensors.torch.load_file({str(path)!r}), strict=False)"
            )
            raise ModelMismatchError(
                f"{len(frozen)} frozen tensors of the model to start from have other values in "
                f"this script: {some(frozen)}",
                why="What is frozen does not travel: every script brings it.",
                hint="Load the adapter before attach(), as PEFT does it: "
                "peft.PeftModel.from_pretrained(model, DIR, is_trainable=True)"
                if found.kind == "peft"
                else f"Before attach(): import safetensors.torch; {line}",
            )
        if strange := tuple(name for name in names if name not in known):
            raise ModelMismatchError(
                f"the model to start from has {len(strange)} tensors that the script's has not: "
                f"{some(strange)}",
                hint="Start from an export of a run of this model.",
            )

    def _keep_frozen(self, frozen: Mapping[str, Tensor]) -> None:
        assert self._folder is not None
        if not frozen:
            return
        size = sum(value.numel() * value.element_size() for value in frozen.values())
        mark = blake3(json.dumps([[n, str(v.dtype)] for n, v in frozen.items()]).encode())
        try:
            known = self._flat.layout.base if self._how == "values" else b""
            mark.update(known or base_digest(list(frozen.items()), "values"))
        except ConfigError:  # packed values, of which no digest is made: written each time
            mark.update(os.urandom(16))
        self._frozen_id = mark.hexdigest()
        if self._writes and frozen_id(self._folder) == self._frozen_id:
            return
        make_folder(self._folder)
        if (free := shutil.disk_usage(self._folder).free) < size + FREE_AFTER:
            self._frozen_id, self._no_room = "", frozenset(frozen)
            logger.warning(
                "the model's frozen parameters take %.1f GiB and the disk has %.1f GiB: no copy is "
                "kept, and atoll export cannot write the whole model",
                size / 2**30,
                free / 2**30,
            )
            return
        whole = {name: _whole(value) for name, value in frozen.items()}  # by all ranks
        if self._writes:
            write_tensors(self._folder / FROZEN_FILE, whole, {"id": self._frozen_id})

    def _write(self, found: Described, round: int) -> None:
        assert self._folder is not None
        if not self._writes:
            return
        for name, data in found.files.items():
            path = self._folder / FILES / name
            if not path.exists() or path.read_bytes() != data:
                make_folder(path.parent)
                temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
                temporary.write_bytes(data)
                temporary.replace(path)
        card = ModelCard(
            kind=found.kind,
            round=round,
            saved=tuple(each for each in found.saved if each.name not in self._no_room),
            transformers_class=found.library_class,
            floats=found.floats,
            computed=found.computed,
            wrapped=found.wrapped,
            files=tuple(found.files),
            missing=(
                *found.missing,
                *(f"{name} (frozen; the disk had no room)" for name in sorted(self._no_room)),
                *(f"{name} (state_dict() leaves it out)" for name in found.lost if not found.made),
            ),
            own=self._own,
            made=found.made,
            frozen_id=self._frozen_id,
        )
        write_card(self._folder, card, found.kept)

    @contextmanager
    def _tolerant(self) -> Generator[None]:
        """Training goes on without a card; an error of the user's is one."""
        try:
            yield
        except (ConfigError, ModelMismatchError):
            raise
        except (AtollError, OSError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "the model's buffers, frozen parameters and configuration are not kept, so "
                    "atoll export will write what was trained only: %s: %s",
                    type(error).__name__,
                    error,
                )


def _whole(tensor: Tensor) -> Tensor:
    """A DTensor put together, which all ranks ask for; any other as it is."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else cast("Tensor", full())


def _same(mine: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers, whatever their types."""
    if mine.shape != other.shape:
        return False
    return torch.equal(mine.detach().cpu().double(), other.double())


def _elements(tensor: Tensor) -> Tensor:
    """A few of them, copied; none of a tensor that is cut into slices or packed."""
    if type(tensor.detach()) is not Tensor or tensor.device.type == "meta":
        return torch.empty(0)
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED].to("cpu", copy=True)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, so that NaN is what it was."""
    return one.dtype == other.dtype and bytes_of(one) == bytes_of(other)


def _digest(tensor: Tensor) -> bytes:
    data = bytes_of(tensor.detach().reshape(-1)) if tensor.numel() else b""
    return (
        blake3(str(tuple(tensor.shape)).encode() + tensor.dtype.__repr__().encode())
        .update(data)
        .digest()
    )
