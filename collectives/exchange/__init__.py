"""The data plane of a round, without I/O. Lowest first:

events      what it reports
header      the record header
pool        buffers for encoded chunks
accounts    what members say of partial sums, by name and chunk
routes      a member's view of a plan's trees: what it adds up, sends up and hands down
dues        what is still to come under a plan, and when the last of it came
checking    partial sums that two members add up: whether they agree, and else who is wrong
statements  what owners say of their parts, where whole vectors are weighed
slot        one open round and the plan in force: chunking, members, received parts, the result
reduction   one chunk: its statistics, its result, or a partial sum
measuring   the phase before such a result: measure, state, weigh
blobs       content-addressed bytes beside the rounds
outbox      what each peer is still to be sent
intake      where what is arriving goes, and for how long it may
exchange    Exchange: commands in, records and events out
"""

from __future__ import annotations

from .blobs import Bounds
from .events import (
    BadChunk,
    BlobComplete,
    BlobProgress,
    CommandFailed,
    ExchangeEvent,
    LaneDown,
    LanesWanted,
    LaneUp,
    NonFinite,
    PartGiven,
    PartReduced,
    PeerFault,
    ReductionReport,
    ResultComplete,
)
from .exchange import Exchange
from .header import HEADER_BYTES, MAX_PAYLOAD_BYTES
from .outbox import Outgoing

__all__ = [
    "HEADER_BYTES",
    "MAX_PAYLOAD_BYTES",
    "BadChunk",
    "BlobComplete",
    "BlobProgress",
    "Bounds",
    "CommandFailed",
    "Exchange",
    "ExchangeEvent",
    "LaneDown",
    "LaneUp",
    "LanesWanted",
    "NonFinite",
    "Outgoing",
    "PartGiven",
    "PartReduced",
    "PeerFault",
    "ReductionReport",
    "ResultComplete",
]
