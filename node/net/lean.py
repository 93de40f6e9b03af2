"""libp2p without the native libraries of transports and keys that a node does not speak, and torch
without what only its compiler reads.

A node speaks TCP, Noise and Yamux with Ed25519 keys. The package libp2p 0.8.1 nevertheless imports,
when it is imported itself, all that it can do: QUIC and WebTransport (aioquic, pylsqpack), UPnP
(miniupnpc), multicast DNS (zeroconf), secp256k1 and ECDSA keys (coincurve, fastecdsa), certificates
over ACME (requests). That is a dozen libraries in C in the memory of a process that faces the
network, for nothing. It offers no extra to leave them out, and its `__init__` imports them by name.

So while libp2p is imported, these packages are stood in for by modules in which every name is a
class that cannot be made. The code of libp2p that would use one raises `AbsentError` there; a peer
with a secp256k1 or ECDSA key is no peer of ours anyway. Afterwards the stand-ins are taken out of
`sys.modules`, so whoever else imports one of these packages gets the real one.

Only the node process does this (`node/__main__.py`), before anything of it imports libp2p. A test
reads what a running node has mapped. When libp2p can be imported in parts, this file goes.

torch's own `__init__` imports shapes of all its operations without values (`_meta_registrations`),
for torch.compile and tensors on the device "meta". A node has neither: it adds up vectors. So this
module, a third of the time that torch takes, stays out until somebody asks for it by name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

UNUSED = frozenset(
    {"aioquic", "coincurve", "fastecdsa", "miniupnpc", "pylsqpack", "requests", "zeroconf"}
)
"""Top-level packages that libp2p imports and a node does not use."""


class AbsentError(ValueError):
    """Something of libp2p was used that a node does not load. A ValueError, as for a key or an
    address that means nothing: libp2p expects these.
    """


class _AbsentType(type):
    """So that a name of a stand-in may be a base class, a constant of an enumeration, an exception,
    a decorator's argument.
    """

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(f"{cls.__qualname__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise AbsentError(f"{cls.__qualname__} is not loaded into a node (see node/net/lean.py)")


def _stand_in(name: str) -> type:
    return _AbsentType(name, (Exception,), {"__qualname__": name})


class _AbsentModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(f"{self.__name__}.{name}")


class _Finder:
    """Finds a stand-in for each of `UNUSED` that is not imported yet, and for whatever is in it."""

    def __init__(self) -> None:
        self.names = {name for name in UNUSED if name not in sys.modules}
        self.made: list[str] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] not in self.names:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self.made.append(spec.name)
        return _AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


_META = "torch._meta_registrations"


def load_torch() -> None:
    """Import torch without `_META`. Does nothing where torch is there already."""
    if "torch" in sys.modules:
        return
    absent = sys.modules[_META] = ModuleType(_META)
    try:
        torch: Any = import_module("torch")
    finally:
        if sys.modules.get(_META) is absent:
            del sys.modules[_META]
    vars(torch).pop("_meta_registrations", None)


def load_libp2p() -> None:
    """Import libp2p without `UNUSED`. Does nothing where libp2p is there already."""
    if "libp2p" in sys.modules:
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        import libp2p  # pyright: ignore[reportUnusedImport]  # noqa: F401
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        for name in finder.made:
            sys.modules.pop(name, None)
