"""The libraries that read pretrained models, loaded late; and what must not stand beside them."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module, util
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ....collectives.errors import AtollError, ConfigError
from ...home.last_resort import refused

EXTRA = "atoll[models]"
REFUSED = "kernels"  # with it transformers and bitsandbytes fetch compiled code, and run it
BITSANDBYTES, OF_FOUR_BITS = "bitsandbytes", "atoll[4bit]"


def library(name: str) -> Any:
    """The module ``name`` of transformers, peft and what they bring. Raises ConfigError E415 where
    it is not installed, or where a package stands beside it that fetches code.
    """
    if util.find_spec(REFUSED) is not None:
        raise ConfigError(
            f"the package {REFUSED} is installed beside transformers",
            code="E415",
            why="With it transformers fetches compiled code from the hub, and runs it.",
            hint=f"pip uninstall {REFUSED}, or an environment of its own: pip install '{EXTRA}'",
        )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # said once a fork otherwise
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        found = import_module(name)
        if name == "transformers":
            _quieten(found)
        return found
    except ModuleNotFoundError as error:
        extra = OF_FOUR_BITS if name == BITSANDBYTES else EXTRA
        raise ConfigError(
            f"{error.name or name} is not installed",
            code="E415",
            why="Pretrained models are read by it.",
            hint=f"pip install '{extra}'",
        ) from None


@contextmanager
def reading(what: str, *, key: str = "", why: str = "", hint: str = "") -> Generator[None]:
    """Errors of libraries that read somebody's files as ConfigError E415, which begins with
    ``what``: of wrong bytes and values they raise what they like. Ours are passed on, and so is
    what the system refuses.
    """
    try:
        yield
    except AtollError:
        raise
    except Exception as error:
        found = None if isinstance(error, FileNotFoundError) else refused(error, what)
        raise found or ConfigError(
            f"{what}: {first_line(error, 400)}", key=key, code="E415", why=why, hint=hint
        ) from None


def wants_bitsandbytes(method: str, optimizer: str) -> str:
    """Which of a run's settings takes bitsandbytes, an extra of its own; "" where none does.

    >>> wants_bitsandbytes("lora", "adamw8bit"), wants_bitsandbytes("qlora", "adamw")
    ('optimizer = "adamw8bit"', 'method = "qlora"')
    """
    if optimizer == "adamw8bit":
        return 'optimizer = "adamw8bit"'
    return 'method = "qlora"' if method == "qlora" else ""


def has_bitsandbytes() -> bool:
    """Whether it is installed; it is not loaded."""
    return util.find_spec(BITSANDBYTES) is not None


def refuse_without_bitsandbytes(method: str, optimizer: str) -> None:
    """Raise ConfigError E415 where a run's settings take bitsandbytes, and it is not installed."""
    wants = wants_bitsandbytes(method, optimizer)
    if not wants or has_bitsandbytes():
        return
    eight = "optimizer" in wants
    raise ConfigError(
        f"this run has {wants}, which bitsandbytes has",
        key="$.train.inner.optimizer" if eight else "$.model.method",
        code="E415",
        why="It is an extra of its own, and not installed here.",
        hint=f"pip install '{OF_FOUR_BITS}', or a run with "
        + ('optimizer = "adamw"' if eight else 'method = "lora"'),
    )


def first_line(error: Exception, most: int = 300) -> str:
    """What a library says of its error, as far as it fits a sentence of ours: its first line, of
    which at most so many characters.

    >>> first_line(ValueError("no such layer\\nTraceback ..."))
    'no such layer'
    """
    return str(error).strip().partition("\n")[0][:most]


def _quieten(transformers: Any) -> None:
    """No bars and no advice of the library's own in a training script's output; downloads keep
    their bar.
    """
    logging = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    library("huggingface_hub.utils").enable_progress_bars()


def versions() -> str:
    """Those that decide what a tokenizer does: ``transformers 5.23.0, tokenizers 0.23.3``."""
    found = list[str]()
    for name in ("transformers", "tokenizers"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)
