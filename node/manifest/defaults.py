"""``[exchange]``: which codec a run has whose text names none, and whether statistics and small
tensors are sent in fp32.

Bytes that leave them out are those of earlier releases, and mean int8 for all tensors: defaults of
`ExchangeTable` never change. So a text without them is given today's, and the run's bytes say so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ...collectives.codec_names import DEFAULT_CODEC

if TYPE_CHECKING:
    from .manifest import Manifest

CODEC, EXACT = "codec", "exact"


def named_in(table: dict[str, Any]) -> frozenset[str]:
    """Which of the two a text's table gives."""
    exchange: Any = table.get("exchange", {})
    return frozenset({CODEC, EXACT} & exchange.keys() if isinstance(exchange, dict) else ())


def open_in(manifest: Manifest) -> tuple[str, ...]:
    """Which of the two mean something in such a run. Masked sums and BTARD have formats of their
    own, and a wished error picks the codecs.
    """
    if manifest.secure is not None or manifest.btard is not None:
        return ()
    return (CODEC, EXACT) if manifest.exchange.error is None else (EXACT,)


def with_defaults(manifest: Manifest, named: frozenset[str]) -> Manifest:
    """The manifest of a text that names these of the two, with the others written out."""
    today = {CODEC: DEFAULT_CODEC, EXACT: True}
    added = {key: today[key] for key in open_in(manifest) if key not in named}
    exchange = msgspec.structs.replace(manifest.exchange, **added)
    return msgspec.structs.replace(manifest, exchange=exchange)
