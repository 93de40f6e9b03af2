"""What a script leaves in its run's folder, so that `atoll export` writes the whole model when the
script is gone: the card of its model (`model.card`). Written when the model is attached; buffers
again as rounds end. Nothing of it ends training: what cannot be written is a warning, once.
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
from blake3 import blake3
from torch import Tensor, nn

from ...collectives.errors import AtollError, ConfigError
from ...collectives.forced import make_folder
from ...collectives.swarm import AnchorView, RunSettings
from ..model.adapters import base_digest
from ..model.card import FILES, FROZEN_FILE, ModelCard, frozen_id, write_card
from ..model.flat import FlatVector
from ..model.tensor_file import bytes_of, write_tensors
from .saving import Described, ModelSaver, some

logger = logging.getLogger("atoll")

FREE_AFTER = 1 << 30  # bytes that frozen parameters leave free on the disk
SHARE = 0.02  # of the time, at most, for writing buffers as rounds end
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
        self._own: tuple[str, ...] = ()  # what has changed since
        self._frozen_id = ""
        self._no_room = frozenset[str]()
        self._not_before = 0.0
        self._warned = False
        with self._tolerant():
            found = self._saver.describe()
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
            self._keep_frozen(found.frozen)
            self._write(found, round)

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
            changed = (
                name
                for name, value in found.kept.items()
                if self._begun.get(name) != _digest(value)
            )
            self._own = tuple(dict.fromkeys((*self._own, *changed)))
            if self._own or found.made:
                self._write(found, round)
        self._not_before = started + (clock() - started) / SHARE

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
        except ConfigError:
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


def _digest(tensor: Tensor) -> bytes:
    data = bytes_of(tensor.detach().reshape(-1)) if tensor.numel() else b""
    return (
        blake3(str(tuple(tensor.shape)).encode() + tensor.dtype.__repr__().encode())
        .update(data)
        .digest()
    )
