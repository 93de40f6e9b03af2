"""Properties of the commit and of its framing: whatever strikes, every promise holds; whatever
bytes come, they are refused or understood.
"""

from __future__ import annotations

import functools

import pytest
from faults import Fault, Simulated
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.rounds.swarm import Options, SimSwarm

from atoll.collectives import messages as m
from atoll.collectives.errors import RemoteProtocolError
from atoll.collectives.exchange import header as record_header
from atoll.collectives.identifiers import PeerId

KINDS = st.sampled_from(("kill", "stop", "blackhole", "reset", "slow", "corrupt"))
FAULTS = st.builds(
    Fault,
    kind=KINDS,
    target=st.sampled_from(("member", "owner", "convener")),
    phase=st.sampled_from(("reduce", "gather", "decide")),
    after_s=st.sampled_from((0.0, 0.002, 0.01)),
    for_s=st.sampled_from((0.3, 2.0)),
)
PEER = PeerId("p1")


@settings(max_examples=25)
@given(
    st.integers(0, 2**32),
    st.lists(FAULTS, min_size=1, max_size=4),
    st.sampled_from(("butterfly", "ring", "two-level", "three-level")),
)
def test_every_promise_holds_whatever_strikes_in_whichever_phase(
    seed: int, script: list[Fault], plan: str
) -> None:
    swarm = SimSwarm(seed, Options(peers=(4, 6), faults=(), rounds=6, plan=plan))  # type: ignore[arg-type]
    Simulated(swarm, script)
    assert swarm.run().problem == ""


@functools.cache
def heard() -> tuple[bytes, ...]:
    """Messages of a round as they went over the network, the first twenty of each kind."""
    swarm, kinds = (
        SimSwarm(5, Options(peers=(4, 4), faults=(), rounds=4)),
        dict[type[m.Body], list[bytes]](),
    )

    def tap(sender: PeerId, receiver: PeerId, channel: str, payload: object) -> bool:
        if isinstance(payload, bytes) and payload[:1] == b"R":
            known = kinds.setdefault(type(m.decode(payload[1:], sender).body), [])
            if len(known) < 20:
                known.append(payload[1:])
        return False

    swarm.network.tap = tap
    assert swarm.run().problem == ""
    assert {m.Ready, m.PlanMessage, m.Accept, m.Accepted, m.Join, m.Catch} <= kinds.keys()
    return tuple(message for messages in kinds.values() for message in messages)


@functools.cache
def member() -> SimSwarm:
    """A swarm of four in the middle of its run; nobody else moves any more."""
    swarm = SimSwarm(5, Options(peers=(4, 4), faults=(), rounds=50))
    swarm._start()
    swarm.world.run(until=4.0)
    process = swarm.members[PEER].process
    assert process is not None
    process.session.ports.emit = lambda event: None  # type: ignore[method-assign]  # it accuses p2, rightly
    return swarm


@settings(max_examples=300)
@given(st.data())
def test_damaged_messages_of_a_round_never_raise(data: st.DataObject) -> None:
    swarm = member()
    process = swarm.members[PEER].process
    assert process is not None
    raw = bytearray(data.draw(st.sampled_from(heard())))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    process.session.on_message(
        swarm.world.now, PeerId("p2"), b"R" + bytes(raw[: data.draw(st.integers(1, len(raw)))])
    )


@given(st.binary(max_size=4096))
def test_any_bytes_are_a_message_or_refused_in_the_name_of_their_sender(data: bytes) -> None:
    try:
        found: m.Envelope | PeerId | None = m.decode(data, PEER)
    except RemoteProtocolError as error:
        found = error.peer
    assert isinstance(found, m.Envelope) or found == PEER


@given(
    st.one_of(
        st.binary(max_size=64),
        st.builds(
            record_header.pack,
            st.integers(0, 9),
            st.integers(0, 2**32 - 1),
            st.integers(0, 2**64 - 1),
            *[st.binary(max_size=16)] * 2,
        ),
    )
)
def test_any_bytes_are_a_header_within_bounds_or_refused(data: bytes) -> None:
    try:
        found = record_header.parse(data, PEER)
    except RemoteProtocolError:
        return
    assert found.length <= record_header.MAX_PAYLOAD_BYTES
    assert record_header.PART <= found.kind <= record_header.ACCOUNT
    assert record_header.pack(*found) == data


def test_a_record_of_another_version_is_refused() -> None:
    data = bytearray(record_header.BEAT_HEADER)
    data[0] += 1
    with pytest.raises(RemoteProtocolError, match="version"):
        record_header.parse(data, PEER)
