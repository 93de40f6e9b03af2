"""Callbacks of other people's trainers: what their absence is told as, and how a batch is counted."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import pytest
import torch

from atoll.collectives.errors import ConfigError


@pytest.mark.parametrize(
    ("module", "library", "extra"),
    [("trainer", "transformers", "trainer"), ("lightning", "lightning.pytorch", "lightning")],
)
def test_a_missing_library_is_told_with_the_extra_that_has_it(
    module: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"atoll.optim.integrations.{module}", raising=False)
    with pytest.raises(ConfigError, match=library.split(".")[0]) as error:
        import_module(f"atoll.optim.integrations.{module}")
    assert error.value.hint == f"pip install 'atoll[{extra}]'"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(5, 2), 5),
        ([torch.zeros(3), torch.zeros(7)], 3),
        ({"name": "x", "inputs": (torch.zeros(4, 1),)}, 4),
        (torch.tensor(1.0), 1),
        ("nothing", 1),
    ],
)
@pytest.mark.filterwarnings("ignore")  # lightning's own, at import
def test_a_batch_is_as_long_as_its_first_tensor(batch: Any, size: int) -> None:
    from atoll.optim.integrations.lightning import batch_size

    assert batch_size(batch) == size
