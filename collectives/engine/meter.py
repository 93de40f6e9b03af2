"""What a node's links can carry, from what its lanes carry: a state machine without I/O.

Bytes sent a second do not tell a capacity, as a member that waits for others sends little. So a
window counts for the uplink only if some lane had unacknowledged bytes all the time and was not
held up by its receiver: the network was the limit. Then all lanes together carried what the uplink
gives, or less where only the other end was slow; therefore the estimate is a maximum, which decays
with the time in which there was something to measure. Bytes count when the kernel has them
acknowledged: the sender's buffers are not in it. Of a downlink nobody at its end can say whether
more would have come: it is known only where its owner has set a limit.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from typing import NamedTuple

from ..pace import Lead, Pace

WINDOW_S = 0.15
# Of an uplink, besides the round trips: how long a part may take to come back as a result.
AHEAD_S = 0.08
# of them make an estimate of an uplink: acknowledgements come in bunches where the way back has a
# queue
STRETCH_S = 0.4
PAUSE_S = 1.0  # a window that became so long says nothing: this process was stopped
BUSY, HELD_UP = 0.9, 0.1  # shares of a window
HALF_LIFE_S = 20.0  # of the estimate, in time measured
FASTEST = 125_000_000  # bytes/s; above, the processor is the limit
NEAR_S = 0.0005  # a round trip in which 10 Gbit/s carry less than three chunks
SAME = 1.25  # what is announced stays while the estimate is within this factor of it
LEAST_BYTES = 65_536  # a window with fewer says nothing
OUTDONE = 4  # a window that carried so many times the estimate shows that it is of another time

# Struct tcp_info up to tcpi_sndbuf_limited, Linux 4.10 and newer.
_INFO = struct.Struct("=8x24I4Q6I4Q")


class LaneCounters(NamedTuple):
    """Counters of one lane since it began: bytes acknowledged and received, seconds with bytes
    under way, and held up by the receiver.
    """

    acked: int
    received: int
    busy_s: float
    held_up_s: float
    rtt_s: float = 0.0  # smoothed; it grows with what this node has in the queue of its link
    least_rtt_s: float = 0.0  # the path alone
    segments: int = 0  # with data, sent
    again: int = 0  # of them sent again


def read_socket(sock: socket.socket) -> LaneCounters | None:
    """What the kernel says of a TCP connection, or None where it does not."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, option, _INFO.size)
    except OSError:
        return None
    if len(raw) < _INFO.size:
        return None
    fields = _INFO.unpack(raw)
    acked, received, busy_us, held_up_us = fields[26], fields[27], fields[35], fields[36]
    return LaneCounters(
        acked,
        received,
        busy_us / 1e6,
        held_up_us / 1e6,
        fields[15] / 1e6,
        fields[31] / 1e6,
        fields[33],
        fields[23],
    )


class Meter:
    """The estimate of one node. ``max_up``, ``max_down``: its limits in bytes/s, 0 for none."""

    def __init__(self, max_up: int = 0, max_down: int = 0) -> None:
        self._max_up, self._max_down = max_up, max_down
        self._up = Peak()  # while the network was the limit
        self._brief = Peak()  # the same in single windows: known sooner, and rather too much
        self._sent, self._received = Peak(), Peak()
        # Bytes and seconds of windows in a row in which the network was the limit.
        self._stretch = (
            0,
            0.0,
        )
        self._rtt_s = self._least_rtt_s = 0.0
        self._before: Mapping[int, LaneCounters] = {}
        self._since = 0.0

    def read(self, now: float, lanes: Mapping[int, LaneCounters]) -> None:
        """Counters of the present lanes, by lane number, at least WINDOW_S after those before."""
        elapsed = now - self._since
        both = [
            (before, lanes[number]) for number, before in self._before.items() if number in lanes
        ]
        self._since, self._before = now, dict(lanes)
        self._rtt_s = max((reading.rtt_s for reading in lanes.values()), default=0.0)
        self._least_rtt_s = max((reading.least_rtt_s for reading in lanes.values()), default=0.0)
        if elapsed > PAUSE_S or not both:
            return
        acked, received = (
            sum(new.acked - old.acked for old, new in both),
            sum(new.received - old.received for old, new in both),
        )
        self._sent.sample(acked, elapsed)
        self._received.sample(received, elapsed)
        if acked >= LEAST_BYTES and acked / elapsed > OUTDONE * self._up.reported > 0:
            # The link was slow for a while, and may now be too fast to be the limit.
            self._up, self._brief = (
                Peak(),
                Peak(),
            )
        if any(
            new.busy_s - old.busy_s >= BUSY * elapsed
            and new.held_up_s - old.held_up_s <= HELD_UP * elapsed
            for old, new in both
        ):
            self._brief.sample(acked, elapsed)
            self._stretch = self._stretch[0] + acked, self._stretch[1] + elapsed
            if self._stretch[1] < STRETCH_S:
                return
            self._up.sample(*self._stretch)
        self._stretch = 0, 0.0

    def due(self, now: float) -> bool:
        """Whether it is time to `read`."""
        return now - self._since >= WINDOW_S

    @property
    def lead(self) -> Lead:
        """How far contributions may run ahead so that the uplink stays busy; no limit where it is
        not known, or too fast to matter.
        """
        up = self._brief.reported
        if self._max_up:
            up = min(up or self._max_up, self._max_up)
        return Lead(
            0 if up > FASTEST / 2 else up,
            AHEAD_S + 2 * self._least_rtt_s,
            0 < self._least_rtt_s <= NEAR_S,
        )

    @property
    def rtt_s(self) -> float:
        """The round-trip time to the furthest peer of a lane; 0: not known."""
        return self._rtt_s

    @property
    def pace(self) -> Pace:
        """What to announce."""
        up, down = self._up.reported, self._max_down
        if self._max_up:
            up = min(up or self._max_up, self._max_up)
        return Pace(up, down, min(self._sent.reported, self._received.reported), self._rtt_s)


class Peak:
    """A decaying maximum of rates. What is ``reported`` changes only when it has moved clearly."""

    def __init__(self) -> None:
        self.reported = 0
        self._best = 0.0

    def sample(self, nbytes: int, elapsed_s: float) -> None:
        """So many bytes in a window."""
        if nbytes < LEAST_BYTES:
            return
        self._best = min(
            FASTEST, max(nbytes / elapsed_s, self._best * 0.5 ** (elapsed_s / HALF_LIFE_S))
        )
        if not self.reported / SAME <= self._best <= self.reported * SAME:
            self.reported = round(self._best)
