"""Messages between peers in virtual time, over links that delay, lose, double and reorder them, or
are cut.

Harsher than the streams of the real node: messages of one pair overtake each other, are lost one by
one, and a message sent to a process may reach the next process of that peer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from ..identifiers import PeerId
from .world import World

Payload = bytes | tuple[bytes, bytes]
"""A control message, or a record of the data plane: header and plaintext."""

Deliver = Callable[[PeerId, str, Payload], None]
Tap = Callable[[PeerId, PeerId, str, Payload], bool | None]


BUFFERED_S = 0.05
"""A sender is as far ahead of a slow receiver as TCP's windows and routers' queues let it be."""


def length_of(channel: str, payload: Payload) -> int:
    """The bytes of a message on the wire."""
    return len(payload) if isinstance(payload, bytes) else len(payload[0]) + len(payload[1])


@dataclass(slots=True)
class Weather:
    """What happens to each message, in probabilities. Applies to all links at once."""

    loss: float = 0.0
    duplicate: float = 0.0
    late: float = 0.0  # share of messages delayed by up to late_s
    late_s: float = 0.0
    storm: float = 0.0  # a second chance to be lost, for short times


@dataclass(slots=True)
class SimulatedLink:
    """One direction between two peers."""

    latency_s: float
    jitter_s: float
    bandwidth_bytes_per_s: float  # 0: without limit
    free_at: float = 0.0  # when the last byte handed to it has left


class Network:
    """Peers and the links between them. ``tap`` sees every send before the weather does; True loses
    it, and it may raise. ``weigh`` says how many bytes a message counts for: of a model that stands
    for a larger one, more than it has. Channels in ``express`` wait for nothing that is queued.
    """

    def __init__(
        self,
        world: World,
        *,
        latency_s: float = 0.001,
        jitter_s: float = 0.0,
        bandwidth_bytes_per_s: float = 0.0,
    ) -> None:
        self.world = world
        self.weather = Weather()
        self.always: Weather | None = None  # loss, copies and delays that `mend` does not end
        self.tap: Tap | None = None
        self.weigh: Callable[[str, Payload], int] = length_of
        self.express: frozenset[str] = frozenset()
        self.sent: dict[str, int] = {}  # messages by channel
        self.bytes_sent: dict[PeerId, int] = {}
        self.bytes_received: dict[PeerId, int] = {}
        self._rng = world.stream("network")
        self._default = (latency_s, jitter_s, bandwidth_bytes_per_s)
        self._links: dict[tuple[PeerId, PeerId], SimulatedLink] = {}
        self._uplinks: dict[PeerId, SimulatedLink] = {}
        self._downlinks: dict[PeerId, SimulatedLink] = {}
        self._deliver: dict[PeerId, Deliver] = {}
        self._frozen: dict[PeerId, list[tuple[PeerId, str, Payload]]] = {}
        self._side: Mapping[PeerId, int] | None = None
        self._cuts: set[tuple[PeerId, PeerId]] = set()

    def attach(self, peer: PeerId, deliver: Deliver) -> None:
        """Hand messages for ``peer`` to ``deliver(sender, channel, payload)`` from now on."""
        self._deliver[peer] = deliver

    def detach(self, peer: PeerId) -> None:
        """The process of ``peer`` is gone: messages that arrive now are lost."""
        self._deliver.pop(peer, None)
        self._frozen.pop(peer, None)

    def attached(self) -> Collection[PeerId]:
        """Peers with a process, frozen ones included."""
        return self._deliver.keys()

    def freeze(self, peer: PeerId) -> None:
        """Keep what arrives for ``peer`` until `thaw`, as the kernel does for a stopped process."""
        self._frozen.setdefault(peer, [])

    def thaw(self, peer: PeerId) -> None:
        """Deliver everything that was kept, in the order of arrival, now."""
        for sender, channel, payload in self._frozen.pop(peer, []):
            self.world.at(self.world.now, partial(self._arrive, sender, peer, channel, payload))

    def partition(self, side: Mapping[PeerId, int] | None) -> None:
        """Only peers on the same side hear each other; None takes the partition away."""
        self._side = side

    def cut(self, sender: PeerId, receiver: PeerId) -> None:
        """Lose everything from ``sender`` to ``receiver``, in this direction only, until `mend`."""
        self._cuts.add((sender, receiver))

    def mend(self) -> None:
        """Clear weather, no partition, no cuts. Frozen and dead processes stay what they are."""
        self.weather = Weather()
        self._side = None
        self._cuts.clear()

    def severed(self, sender: PeerId, receiver: PeerId) -> bool:
        """Whether a partition or a cut separates the two in this direction."""
        if self._cuts and (sender, receiver) in self._cuts:
            return True
        return self._side is not None and self._side.get(sender, 0) != self._side.get(receiver, 0)

    def link(self, sender: PeerId, receiver: PeerId) -> SimulatedLink:
        """The link of this direction; its fields may be set."""
        found = self._links.get((sender, receiver))
        if found is None:
            if (shared := self._uplinks.get(sender)) is not None:
                return shared
            found = self._links[(sender, receiver)] = SimulatedLink(*self._default)
        return found

    def uplink(self, peer: PeerId) -> SimulatedLink:
        """One link for all that ``peer`` sends, but to those that it has a `link` to already; its
        fields may be set.
        """
        return self._uplinks.setdefault(peer, SimulatedLink(*self._default))

    def share(self, pairs: Iterable[tuple[PeerId, PeerId]]) -> SimulatedLink:
        """One link for all these directions, as a site's uplink is; its fields may be set."""
        link = SimulatedLink(*self._default)
        self._links.update(dict.fromkeys(pairs, link))
        return link

    def downlink(self, peer: PeerId) -> SimulatedLink:
        """What all that comes to ``peer`` goes through after the sender's link: without limit and
        latency at first; jitter is not used.
        """
        return self._downlinks.setdefault(peer, SimulatedLink(0.0, 0.0, 0.0))

    @property
    def busy_until(self) -> float:
        """When the last byte that is on a link now will have left it."""
        links = [*self._links.values(), *self._uplinks.values(), *self._downlinks.values()]
        return max((link.free_at for link in links), default=0.0)

    def send(self, sender: PeerId, receiver: PeerId, channel: str, payload: Payload) -> float:
        """Put one message on its way and return when the next one may follow (virtual seconds):
        when the link is free, and the receiver's is not much behind.
        """
        lost = self.tap is not None and bool(self.tap(sender, receiver, channel, payload))
        now, link, weather, rng = (
            self.world.now,
            self.link(sender, receiver),
            self.weather,
            self._rng,
        )
        size = self.weigh(channel, payload)
        self.sent[channel] = self.sent.get(channel, 0) + 1
        self.bytes_sent[sender] = self.bytes_sent.get(sender, 0) + size
        start = link.free_at if link.free_at > now else now
        if channel in self.express:
            pass
        elif link.bandwidth_bytes_per_s > 0:
            link.free_at = start + size / link.bandwidth_bytes_per_s
        else:
            link.free_at = start
        lost = lost or self.severed(sender, receiver)
        lost = (
            lost
            or (weather.loss > 0 and rng.random() < weather.loss)
            or (weather.storm > 0 and rng.random() < weather.storm)
        )
        always = self.always
        if lost or (always is not None and rng.random() < always.loss):
            return link.free_at
        if always is not None:
            weather = Weather(
                duplicate=max(weather.duplicate, always.duplicate),
                late=max(weather.late, always.late),
                late_s=max(weather.late_s, always.late_s),
            )
        free_at = link.free_at
        copies = 2 if weather.duplicate > 0 and rng.random() < weather.duplicate else 1
        for _ in range(copies):
            delay = link.latency_s + (link.jitter_s * rng.random() if link.jitter_s > 0 else 0.0)
            if weather.late > 0 and rng.random() < weather.late:
                delay += weather.late_s * rng.random()
            there = (now if channel in self.express else link.free_at) + delay
            if (down := self._downlinks.get(receiver)) is not None:
                there += down.latency_s
                if down.bandwidth_bytes_per_s and channel not in self.express:
                    # packets of a record pass on while later ones are still being sent
                    first = max(start + delay + down.latency_s, down.free_at)
                    there = max(there, first + size / down.bandwidth_bytes_per_s)
                    down.free_at = there
                    free_at = max(free_at, there - delay - down.latency_s - BUFFERED_S)
            self.world.at(there, partial(self._arrive, sender, receiver, channel, payload))
        return free_at

    def _arrive(self, sender: PeerId, receiver: PeerId, channel: str, payload: Payload) -> None:
        deliver = self._deliver.get(receiver)
        if deliver is None or self.severed(sender, receiver):
            return
        waiting = self._frozen.get(receiver)
        if waiting is not None:
            waiting.append((sender, channel, payload))
            return
        size = self.weigh(channel, payload)
        self.bytes_received[receiver] = self.bytes_received.get(receiver, 0) + size
        deliver(sender, channel, payload)
