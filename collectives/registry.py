"""Modes by name: what some runs ask for and others do without, loaded once a run does.

A folder that asks for modes registers each in one row of its table (`node.run.registry`,
`optim.model.registry`); no other file names where a mode is. An installation without a mode, and
without its rows, refuses in one sentence what asks for it; everything else goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from .errors import ConfigError

TOP = __name__.partition(".collectives")[0]


def describe_absent(name: str) -> str:
    """What to say where a mode, or a part of it, is not registered."""
    return f"this installation has no mode {name.partition('.')[0]!r}"


class ModeRegistry:
    """Rows of name and module. ``modules``: by the name of a mode, or of a part of it
    ("masking.vectors"), the module below the top of the package ("node.modes.secure.vectors").
    """

    def __init__(self, modules: Mapping[str, str]) -> None:
        self._modules = dict(modules)

    def __contains__(self, name: str) -> bool:
        return name in self._modules

    def find(self, name: str, what: str) -> Any:
        """``what`` the module of a mode defines; None where the mode is not here."""
        if name not in self._modules:
            return None
        module = f"{TOP}.{self._modules[name]}"
        try:
            return getattr(import_module(module), what)
        except ModuleNotFoundError as error:  # a part of atoll that is not installed
            if error.name is None or not module.startswith(error.name):
                raise
            return None

    def load(self, name: str, what: str, *, key: str) -> Any:
        """As `find`. Raises ConfigError where the mode is not registered; ``key``: what asks for
        it, as people write it.
        """
        self.check(name, key)
        if (found := self.find(name, what)) is None:
            raise ConfigError(describe_absent(name), key=key, why=f"{key} asks for it.")
        return found

    def check(self, name: str, key: str) -> None:
        """Raise ConfigError where a mode is not registered; ``key``: what asks for it."""
        if name not in self._modules:
            raise ConfigError(
                describe_absent(name),
                key=key,
                why=f"{key} asks for it.",
                hint=f"Leave {key} out, or install all of atoll.",
            )
