"""Operations that nobody called: their names, and plans for them, as a member makes them up."""

from __future__ import annotations

import msgspec
from blake3 import blake3

from atoll.collectives.group import Config, Contributor, Entry, Part, Plan, convener
from atoll.collectives.identifiers import PeerId
from atoll.node.modes.operations.naming import Spec, operation_key
from atoll.node.modes.operations.operation import NO_STATE

LONGEST = 1 << 28


def invented(
    run: str,
    config: Config,
    liar: PeerId,
    name: str,
    *,
    numel: int = LONGEST,
    codec: str = "fp32",
    reducer: str = "mean",
) -> Plan:
    """A plan of an operation with a ``name`` like this one, which the liar convenes and contributes
    to alone, and whose parts it owns alone.
    """
    me = next(member for member in config if member.peer == liar)
    number = 0
    while True:
        spec = Spec(numel, codec, reducer, False, "")
        key = operation_key(run, f"{name}/{number}")
        log = spec.log_name(key, config, config)
        if convener(run, log, 1, 0, config).peer == liar:
            break
        number += 1
    shape = spec.shape(config)
    base = blake3(b"atoll/op/1" + msgspec.msgpack.encode((run, log, config))).digest()
    genesis = Entry(
        log,
        0,
        base,
        NO_STATE,
        (),
        (),
        (),
        shape.numel,
        shape.chunk_elements,
        codec,
        reducer,
        config,
    )
    chunks = -(-shape.numel // shape.chunk_elements)
    return Plan(
        log,
        1,
        0,
        0,
        genesis.hash(),
        (Contributor(me, key[:16].encode(), 1),),
        (Part(liar, 0, chunks),),
        shape.numel,
        shape.chunk_elements,
        codec,
        reducer,
    )
