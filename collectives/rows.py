"""Where parts of `collectives` are that some runs ask for by name: one row each."""

from __future__ import annotations

from .registry import ModeRegistry

ROWS = ModeRegistry(
    {
        "levels": "collectives.codecs.levels",
        "sparse": "collectives.codecs.sparse",
        "bits": "collectives.codecs.bits",
        "device": "collectives.codecs.device",
        "mixed": "collectives.codecs.mixed",
        "native": "collectives.codecs.native",
        "reducers": "collectives.reducers",
        "weighing": "collectives.exchange.measuring",
        "trees": "collectives.trees",
    }
)
