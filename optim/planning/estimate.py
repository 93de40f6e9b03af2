"""How long a round takes, and what share of the time is training: the model of costs behind every
plan.

A round costs its member what the data plane moves, some round trips, and passes over memory:

    transfer  the slowest of all peers' links: who owns the share p of the vector sends (1-p) of an
              encoded contribution and (n-1)p of an encoded result, and receives as much with the
              two in each other's place (`collectives/partition.py`, which divides by bandwidth; the
              same division is used here)
    latency   ROUND_TRIPS between the furthest two: ready, plan, the first bytes, votes, decision
    work      encoding, decoding and summing, hashing, the outer step: a time per value

Waiting for a round costs all of it. With overlap a script waits for what is left when the result is
due, and pays in any case for the passes over its own parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...collectives.codec_costs import most_bytes
from ...collectives.codec_names import DEFAULT_CODEC, chunk_elements
from ...collectives.identifiers import PeerId
from ...collectives.partition import comparable, parts_for
from .conditions import Conditions, PeerConditions
from .waiting import CARRIED, FEWEST, SPARE, RoundWaits

# of the line that payload gets: frames' heads take 4.4 %, records and the rest the others
# (measured, `scripts/bench/bench_link.py`)
EFFICIENCY = 0.92
ROUND_TRIPS = 3.0
WORK_S = 20e-9  # a value, in the node (measured, `scripts/bench/bench_wan.py`)
SCRIPT_S = 4e-9  # a value, in the script: making the contribution and taking over the anchor
# a value more with overlap: a snapshot when training goes on, and what was trained since on top of
# the anchor
LATE_S = 6e-9
# a round, in the script: what it asks its node (these three measured, `scripts/bench/bench_wan.py`)
ASK_S = 4e-3


@dataclass(frozen=True, slots=True)
class Choice:
    """The settings that a plan decides; names as in a run's manifest."""

    sync_every: int
    codec: str = DEFAULT_CODEC
    overlap: Literal["none", "late", "eager"] = "none"
    delay: int | None = None
    fragments: int = 1


@dataclass(frozen=True, slots=True)
class RoundCost:
    """What one round of one fragment costs, in seconds; ``bound``: what decided the transfer;
    ``nbytes``, ``received``: the most that one peer sends, and receives. ``thin_s``: what of the
    transfer is for links that are much thinner than the others'.
    """

    transfer_s: float
    latency_s: float
    work_s: float
    nbytes: int
    received: int
    bound: str
    thin_s: float = 0.0

    @property
    def seconds(self) -> float:
        """From the contribution to the new anchor."""
        return self.transfer_s + self.latency_s + self.work_s


@dataclass(frozen=True, slots=True)
class Estimate:
    """What `sync_every` steps of training cost. ``share``: of the time that is training; ``busy``:
    of the time that links are in use.
    """

    compute_s: float
    round: RoundCost
    waiting_s: float
    script_s: float
    fragments: int
    waits: RoundWaits
    thin_rate: float = 0.0
    """Samples a second, of those on thin links, that no round counts for what they are worth."""

    @property
    def share(self) -> float:
        """Of wall time that is training."""
        return self.compute_s / (self.compute_s + self.waiting_s + self.script_s)

    @property
    def period_s(self) -> float:
        """Seconds from one end of a fragment's round to the next."""
        return self.compute_s + self.waiting_s + self.script_s

    @property
    def rate(self) -> float:
        """Samples a second that all machines together contribute."""
        return self.waits.rate(self.share, self.period_s) - self.thin_rate * self.share

    @property
    def nbytes(self) -> int:
        """Bytes that the peer with the most to send sends, for all fragments."""
        return self.round.nbytes * self.fragments

    @property
    def received(self) -> int:
        """Bytes that the peer with the most to receive receives, for all fragments."""
        return self.round.received * self.fragments

    @property
    def transfer_over_compute(self) -> float:
        """Seconds of transfer to seconds of training."""
        return self.round.transfer_s * self.fragments / self.compute_s


def estimate(
    conditions: Conditions,
    choice: Choice,
    *,
    one: RoundCost | None = None,
    margin: float = 1.0,
) -> Estimate:
    """What settings cost under these conditions. ``one``: what `round_of` says of them, where that
    is known; ``margin``: by what factor a round that must be over in time may be longer than said.
    """
    one = one or round_of(conditions, choice.codec, choice.fragments)
    fastest_s = conditions.fastest_s
    passes_s = SCRIPT_S if choice.overlap == "none" else SCRIPT_S + LATE_S
    compute_s, script_s = (
        choice.sync_every * fastest_s,
        passes_s * conditions.parameters + ASK_S * choice.fragments,
    )
    if len(conditions.peers) == 1:
        alone = conditions.rounds.waits(choice.sync_every, 0.0, may_stand_aside=False)
        return Estimate(compute_s, one, 0.0, script_s, choice.fragments, alone)
    before_s = thin_rate = 0.0  # seconds of training until the result is due
    if choice.overlap != "none":
        margin_s = margin * one.seconds
        before_s = (choice.sync_every if choice.delay is None else choice.delay) * fastest_s
    else:
        spare_s = SPARE * (compute_s + script_s) / choice.fragments
        margin_s = one.seconds - max(0.0, one.thin_s - spare_s)
        if one.thin_s > CARRIED * spare_s:
            thin_rate = (1 - CARRIED * spare_s / one.thin_s) * conditions.thin_rate
    others_s = script_s + choice.fragments * max(0.0, margin_s - before_s)
    # who stands aside finds that out for each fragment anew, and late: it is counted on for none
    may = choice.fragments == 1 and choice.overlap == "none"
    waits = conditions.rounds.waits(choice.sync_every, others_s, may_stand_aside=may)
    if waits.aside and conditions.thin and _alone(conditions, waits):
        # who stands aside is counted in every second round, and the others are one machine alone
        margin_s, thin_rate = (margin_s + one.seconds) / 2, thin_rate / 2
    waiting_s = choice.fragments * max(0.0, waits.apart_s + margin_s - before_s)
    return Estimate(compute_s, one, waiting_s, script_s, choice.fragments, waits, thin_rate)


def _alone(conditions: Conditions, waits: RoundWaits) -> bool:
    """Whether too few have neither thin links nor stand aside: their rounds wait for thin links."""
    aside = {(each.step_s, each.samples) for each in waits.aside}
    rest = [
        peer
        for peer in conditions.peers
        if peer not in conditions.thin and (peer.step_s, peer.samples) not in aside
    ]
    return len(rest) < FEWEST


def round_of(
    conditions: Conditions,
    codec: str,
    fragments: int = 1,
    known: dict[float, dict[str, float]] | None = None,
) -> RoundCost:
    """What one round of one of so many fragments costs. ``known``: who adds up what part of a
    vector of so many chunks, kept from call to call under the same conditions.
    """
    values, n = math.ceil(conditions.parameters / fragments), len(conditions.peers)
    if n == 1:
        return RoundCost(0.0, 0.0, WORK_S * values, 0, 0, "nothing is sent")
    given, result = most_bytes(codec, values)
    chunks = values / chunk_elements(codec, values)
    known = {} if known is None else known
    if chunks not in known:
        known[chunks] = _shares(conditions, chunks)
    share = known[chunks]
    sent = {name: given * (1 - part) + result * (n - 1) * part for name, part in share.items()}
    received = {name: given * (n - 1) * part + result * (1 - part) for name, part in share.items()}

    def slowest(peers: Sequence[PeerConditions]) -> tuple[float, str]:
        names = {peer.name for peer in peers}
        times = [(sent[peer.name] / peer.up, f"{peer.name}'s uplink") for peer in peers]
        times += [(received[peer.name] / peer.down, f"{peer.name}'s downlink") for peer in peers]
        times += [
            ((given * share[b] + result * share[a]) / rate, f"the link from {a} to {b}")
            for (a, b), rate in conditions.links.items()
            if {a, b} <= names
        ]
        return max(times, key=lambda row: row[0])

    slowest_s, bound = slowest(conditions.peers)
    others = [peer for peer in conditions.peers if peer not in conditions.thin]
    thin_s = slowest_s - slowest(others)[0] if conditions.thin else 0.0
    return RoundCost(
        slowest_s / EFFICIENCY,
        ROUND_TRIPS * conditions.rtt_s,
        WORK_S * values,
        round(max(sent.values())),
        round(max(received.values())),
        bound,
        thin_s / EFFICIENCY,
    )


def _shares(conditions: Conditions, chunks: float) -> dict[str, float]:
    """What part of the vector each peer reduces, as the convener of a round divides it."""
    rates = comparable([(round(peer.up), round(peer.down)) for peer in conditions.peers])
    parts = parts_for(
        chunks,
        [(PeerId(peer.name), rate) for peer, rate in zip(conditions.peers, rates, strict=True)],
    )
    owned = {str(part.owner): (part.stop - part.first) / math.ceil(chunks) for part in parts}
    return {peer.name: owned.get(peer.name, 0.0) for peer in conditions.peers}
