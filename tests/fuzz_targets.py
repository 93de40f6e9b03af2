"""Everything that reads foreign bytes, as functions of bytes alone: each takes them, or refuses
with the error that callers catch.

Anything else is a defect: another exception, more memory than a bound allows, no end.
`scripts/fuzz.py` looks for such bytes; those in ``tests/corpus`` are read again by every run of the
tests. What is signed is signed here by whom it should be, so that what lies behind the signature is
read too.
"""

from __future__ import annotations

import contextlib
import io
import random
import struct
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import zstandard
from blake3 import blake3
from session_table import LAYOUT, Table

from atoll.collectives import messages as m
from atoll.collectives.codec_names import CODECS
from atoll.collectives.codecs.codec import Chunking
from atoll.collectives.codecs.ranges import ranges_of
from atoll.collectives.engine.packing import full_length, unpack
from atoll.collectives.errors import (
    BadSignatureError,
    ConfigError,
    NotAdmittedError,
    RemoteProtocolError,
    StorageError,
    VersionMismatchError,
)
from atoll.collectives.exchange import header
from atoll.collectives.group import Certified, Contributor, Entry, Member, Part, Vote
from atoll.collectives.identifiers import RunId
from atoll.collectives.round.certificate import (
    check_genesis,
    check_log,
    genesis_payload,
    vote_payload,
)
from atoll.node.composing.announced import read_invite
from atoll.node.manifest import SignedManifest, decode_signed, parse_manifest, sign_manifest
from atoll.node.manifest.signed import DOMAIN as MANIFEST
from atoll.node.modes.btard import wire as btard_wire
from atoll.node.modes.operations.naming import parse
from atoll.node.modes.secure import wire as secure
from atoll.node.net import announcements, greeting, lane_talk, look, rendezvous
from atoll.node.net.dht import records as values
from atoll.node.net.dht import wire as kad
from atoll.node.net.lan import mdns
from atoll.node.net.reach import circuit, natpmp, protobuf, upnp
from atoll.node.net.transport.framing import FrameReader, decode, frame
from atoll.node.run import membership_records as records
from atoll.node.run.banning import DOMAIN as BANS
from atoll.node.run.banning import Ban, BanList, Bans, SignedBans
from atoll.node.run.capability import (
    CAPABILITY_DOMAIN,
    CERTIFICATE_DOMAIN,
    Certificate,
    check_certificate,
    recognise,
)
from atoll.node.run.evidence import check
from atoll.node.run.invite import PREFIX, inspect_invite, make_invite
from atoll.node.run.membership import Membership
from atoll.node.run.proof import twice
from atoll.node.session.session import MEMBERSHIP, ROUND
from atoll.node.storage.frames import framed, read_frames
from atoll.security import btard
from atoll.security.btard import messages as btard_messages
from atoll.security.btard.wire import VectorHeader
from atoll.security.identity import Identity, decode_base58, encode_base58, public_key_of
from atoll.security.masking import binding, messages
from atoll.security.rules.reducers import find_reducer

Target = Callable[[bytes], object]
ME, OTHER = Identity(b"m" * 32), Identity(b"o" * 32)
PEER, RUN, NOW_S = OTHER.peer, RunId("a" * 26), 1_800_000_000.0
ELEMENTS, CHUNK = 5000, 2048
CORPUS = Path(__file__).parent / "corpus"
"""A file a target, an input a line, hexadecimal."""
_encode = msgspec.msgpack.encode


# ---- the data plane
def lanes(data: bytes) -> None:
    """The head of a record on a lane, and a payload that zstd has packed."""
    with contextlib.suppress(RemoteProtocolError):
        found = header.parse(data[: header.HEADER_BYTES], PEER, packed_too=True)
        assert found.length <= header.MAX_PAYLOAD_BYTES
        assert header.payload_length(memoryview(data), 0, PEER) == found.length
    with contextlib.suppress(RemoteProtocolError):
        room = bytearray(full_length(memoryview(data), PEER))
        assert len(room) <= header.MAX_PAYLOAD_BYTES
        unpack(memoryview(data), memoryview(room), PEER)


@cache
def _chunkings() -> list[Chunking]:
    return [
        Chunking(name, ELEMENTS, CHUNK) for name in (*CODECS, "bf16:1000+int8", "int4:100+stat2")
    ]


def codec_payloads(data: bytes) -> None:
    """A contribution as each codec has it: any bytes of the right length decode, and are added up,
    or are refused as no numbers.
    """
    chunking = _chunkings()[data[0] % len(_chunkings())] if data else _chunkings()[0]
    body = bytearray(data[1:].ljust(chunking.nbytes, b"\0")[: chunking.nbytes])
    for chunk, view in enumerate(chunking.views(memoryview(body))):
        codec, wire, values_ = (
            chunking.codec(chunk),
            chunking.wire(view, chunk),
            torch.empty(chunking.elements(chunk)),
        )
        codec.decode(wire, values_)
        assert values_.numel() == chunking.elements(chunk)


def statements(data: bytes) -> None:
    """What an owner says of distances: impossible, or it comes to weights."""
    rules = (
        "krum:1",
        "multi_krum:1",
        "geometric_median:1",
        "centred_clip:1",
        "caf:1",
        "flag:1",
        "nnm+trimmed_mean:1",
        "arc+nnm+krum:1",
    )
    reducer: Any = find_reducer(rules[data[0] % len(rules)] if data else rules[0])
    count = 6
    said = np.frombuffer(
        data[1:].ljust(8 * reducer.length(count), b"\0")[: 8 * reducer.length(count)], "<f8"
    ).astype(np.float64)
    if reducer.impossible(said, count) is None:
        reducer.weigh(said, [bytes([index]) * 16 for index in range(count)])


# ---- the round
def round_messages(data: bytes) -> None:
    """A message of the round; and names in it, of codecs, reducers, operations."""
    text = data.decode("utf-8", "replace")
    find_reducer(text)
    parse(text)
    with contextlib.suppress(ConfigError):
        ranges_of(text, ELEMENTS)
    with contextlib.suppress(RemoteProtocolError):
        envelope = m.decode(data, PEER)
        told = m.outline(data, PEER)
        assert (told.log, told.tag) == (envelope.log, envelope.body.__struct_config__.tag)
        parse(envelope.log)
        if isinstance(envelope.body, m.Offer) and envelope.body.layout is not None:
            envelope.body.layout.check()
        m.encode(envelope)


def sessions(data: bytes) -> None:
    """Messages of a member to one that is in a round: two bytes of length before each. Whatever
    they are, the session goes on.
    """
    table = Table(3)
    first, liar, _ = table.all_in()
    first.contribute("mine")
    for body in list(_pieces(data))[:8]:
        first.do(lambda session, now, body=body: session.on_message(now, liar.name, body))
        table.world.run(until=table.world.now + 0.3)
    assert first.node is not None
    assert first.session.phase == "running"


def entries(data: bytes) -> None:
    """Entries of the log, as they are received: signed, where the first byte says so, by whom they
    name.
    """
    body, signs = data[1:], bool(data) and bool(data[0] & 1)
    with contextlib.suppress(RemoteProtocolError, msgspec.MsgspecError, ValueError, RecursionError):
        certified = msgspec.msgpack.decode(body, type=Certified)
        entry = certified.entry
        verify = (
            (lambda peer, payload, signature: True)
            if signs
            else (lambda peer, payload, signature: False)
        )
        if entry.round == 0:
            check_genesis(certified, run=RUN, organiser=ME.peer, verify=verify, peer=PEER)
        config = tuple(vote.member for vote in certified.votes)
        check_log(
            [certified],
            run=RUN,
            log=entry.log,
            base=entry.base,
            config=config,
            organiser=ME.peer,
            verify=verify,
            peer=PEER,
        )


def archives(data: bytes) -> None:
    """A file of entries, in their frames, that somebody hands over; and one entry."""
    entries(data)
    with contextlib.suppress(StorageError):
        for body in read_frames(io.BytesIO(data), Path("archive")):
            entries(b"\1" + body)


# ---- who may enter
def invites(data: bytes) -> None:
    """An invite's line, as it is typed, and what is packed in one whose checksum is right."""
    for text in (
        data.decode("utf-8", "replace"),
        PREFIX + encode_base58(data + blake3(data).digest(4)),
    ):
        with contextlib.suppress(NotAdmittedError, VersionMismatchError):
            found = inspect_invite(text)
            assert inspect_invite(found.encode()) == found


def certificates(data: bytes) -> None:
    """A capability and a certificate that a newcomer shows, also with the signatures of who may
    give them.
    """
    about = {"run_id": RUN, "organiser": ME.peer, "peer": PEER}
    for shown in (data, *certified(data)):
        with contextlib.suppress(NotAdmittedError):
            found = check_certificate(shown, now_s=NOW_S, **about)
            assert recognise(found.encode(), **about) == found


def certified(data: bytes) -> Iterator[bytes]:
    """What ``data`` holds with right signatures, so that what is behind their check is tried as
    well.
    """
    with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
        found = msgspec.msgpack.decode(data, type=Certificate)
        capability = msgspec.structs.replace(
            found.capability,
            bearer=public_key_of(OTHER.peer),
            organiser_key=public_key_of(ME.peer),
        )
        capability = msgspec.structs.replace(
            capability, signature=ME.sign(CAPABILITY_DOMAIN, capability.signed_bytes())
        )
        found = msgspec.structs.replace(found, capability=capability)
        yield msgspec.structs.replace(
            found, signature=OTHER.sign(CERTIFICATE_DOMAIN, found.signed_bytes())
        ).encode()


def manifests(data: bytes) -> None:
    """A manifest, as a member sends it; signed by its organiser; and a user's TOML."""
    for read in (
        lambda: decode_signed(data).open(),
        lambda: SignedManifest(data, ME.peer, ME.sign(MANIFEST, data)).open(),
        lambda: parse_manifest(data.decode("utf-8", "replace")),
    ):
        with contextlib.suppress(ConfigError, BadSignatureError, VersionMismatchError):
            read()


def bans(data: bytes) -> None:
    """The organiser's list, as somebody hands it on; and what it would have signed; and evidence."""
    for body in (data, _encode(SignedBans(data, ME.sign(BANS, data)))):
        with contextlib.suppress(RemoteProtocolError):
            Bans(_folder(), RUN, ME.peer).take(body, PEER)
    with contextlib.suppress(RemoteProtocolError):
        check(data, RUN, lambda peer, payload, signature: True, PEER)


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="atoll-fuzz-"))


# ---- who is there
def membership(data: bytes) -> None:
    """Messages about members: two bytes of length before each; and a record that its member has
    signed.
    """
    state = Membership(
        ME.peer,
        RUN,
        sign=lambda _: bytes(64),
        verify=lambda *_: True,
        rng=random.Random(0),
        unix_offset_s=NOW_S,
    )
    state.announce(0.0, addresses=())
    for number, body in enumerate(list(_pieces(data))[:8]):
        with contextlib.suppress(RemoteProtocolError):
            state.on_message(number / 10, PEER, body)
    state.learn(1.0, [records.SignedRecord(data[:4096], bytes(64))], PEER)
    state.tick(2.0)
    state.drain()
    state.records()


def announced(data: bytes) -> None:
    """What is passed on of who takes part in a run."""
    with contextlib.suppress(RemoteProtocolError):
        news = decode(rendezvous._decoder, data, PEER)
        registry = announcements.Registry((), read_invite)
        for each in news.announcements:
            registry.accept(each, PEER, 0.0, NOW_S)


def dht(data: bytes) -> None:
    """A message of the DHT, and a value in it."""
    with contextlib.suppress(RemoteProtocolError):
        if 0 <= (rpc := kad.decode(data, PEER)).kind <= kad.PING:  # others are answered by nobody
            kad.encode(rpc)
    with contextlib.suppress(RemoteProtocolError):
        reader = kad.MessageReader(_stream(data), PEER)
        while _now(reader.next()) is not None:
            pass
    with contextlib.suppress(ValueError):
        values.check(data[:100], data[100:], NOW_S)
    key = values.owner_key(ME.peer, "name")
    with contextlib.suppress(ValueError):
        values.check(key, data, NOW_S)


# ---- streams
def streams(data: bytes) -> None:
    """Frames on a stream, and what is said when one opens, and about a lane."""
    reader = FrameReader(_stream(data), PEER)
    with contextlib.suppress(RemoteProtocolError):
        while (payload := _now(reader.next())) is not None:
            assert len(payload) <= len(data)
    reader.rest()
    decoders: list[Any] = [
        greeting.preface_decoder,
        greeting.hello_decoder,
        greeting.answer_decoder,
        greeting.proof_decoder,
        lane_talk._decoder,
        look._looks,
        look._answers,
    ]
    for decoder in decoders:
        with contextlib.suppress(RemoteProtocolError):
            decode(decoder, data, PEER)


def masking(data: bytes) -> None:
    """What members say of a masking."""
    with contextlib.suppress(RemoteProtocolError, BadSignatureError):
        talk = secure.decode(data, PEER)
        if isinstance(talk.body, secure.AuthoredMessage):
            bound = binding.Binding(
                RUN, 1, 0, tuple(sorted((ME.peer, PEER, Identity(b"t" * 32).peer))), 2, 100, 32
            )
            messages.check(messages.signed(talk.body.message, bound, OTHER), bound, PEER)
            messages.check(talk.body.message, bound, PEER)


class _Deaf:
    """The driver of a peer that hears only."""

    def tell(self, *what: object) -> None:
        """Nothing."""

    compute = finished = removed = tell


def steps(data: bytes) -> None:
    """What peers of a run with BTARD say of a step, signed by one of them, and with what it is
    signed; and evidence against one.
    """
    peers = (*(Identity(bytes([index]) * 32).peer for index in range(3)), ME.peer, PEER)
    host: Any = _Deaf()
    peer = btard.BtardPeer(
        RUN, ME, lambda *_: True, peers, 64, btard.AttemptSettings(1.0), host, random.Random(0)
    )
    peer.begin(0.0, 3, bytes(32))
    assert peer.attempt is not None
    context = peer.attempt.context
    body = data[: btard_messages.MAX_BODY] or b"\0"
    frames: list[Any] = [
        btard_messages.Signed(3, context.tag, context.roster.index(PEER), body, bytes(64))
    ]
    with contextlib.suppress(RemoteProtocolError):
        frames.append(btard_wire.decode(data, PEER))
    for frame_ in frames:
        if isinstance(frame_, btard_wire.Offered):
            vector = np.zeros(min(frame_.elements, 64), np.float32)
            peer.receive(
                1.0,
                PEER,
                btard_messages.CommittedVector(
                    3, context.tag, frame_.header.item, vector, frame_.header.path
                ),
            )
        elif not isinstance(frame_, btard_wire.Taken):
            peer.receive(1.0, PEER, frame_)
    with contextlib.suppress(RemoteProtocolError):
        check(data, RUN, lambda *_: True, PEER, peers)


def relays(data: bytes) -> None:
    """libp2p's small protocols: relays, their answers, hole punching, dialling back."""
    with contextlib.suppress(ValueError):
        fields = protobuf.decode(data)
        circuit.status_in(fields, 5)
        for read in (circuit.kind_of, circuit.peer_in, circuit.reservation_in):
            with contextlib.suppress(RemoteProtocolError):
                read(fields, PEER)


def neighbours(data: bytes) -> None:
    """Datagrams and answers of whoever is on the same network: multicast DNS, and routers that lead
    a port to us.
    """
    with contextlib.suppress(ValueError):
        mdns.read(data)
    for read in (natpmp.address_in, lambda body: natpmp.mapping_in(body, 4150)):
        with contextlib.suppress(ValueError):
            read(data)
    with contextlib.suppress(ValueError):
        upnp.location_in(data, "192.168.1.1")
    with contextlib.suppress(ValueError):
        body = upnp.body_of(data)
        upnp.external_in(body)
        upnp.control_in(body, "http://192.168.1.1:5000/root.xml")


TARGETS: dict[str, Target] = {
    "streams": streams,
    "lanes": lanes,
    "codec_payloads": codec_payloads,
    "statements": statements,
    "round_messages": round_messages,
    "sessions": sessions,
    "archives": archives,
    "invites": invites,
    "certificates": certificates,
    "manifests": manifests,
    "bans": bans,
    "membership": membership,
    "announced": announced,
    "dht": dht,
    "masking": masking,
    "steps": steps,
    "relays": relays,
    "neighbours": neighbours,
}


# ---- where to start from
def seeds() -> dict[str, list[bytes]]:
    """Good bytes of every kind."""
    member, hash_ = Member(ME.peer, 1), b"h" * 32
    contributor = Contributor(member, b"c" * 16, 10)
    parts = (Part(ME.peer, 0, 2),)
    entry = Entry(
        "main",
        1,
        hash_,
        hash_,
        (contributor,),
        parts,
        (hash_,),
        LAYOUT.numel,
        4,
        "fp32",
        "mean",
        (member,),
    )
    vote = Vote(member, 0, ME.sign("x", vote_payload(RUN, "main", 1, entry.base, 0, entry.hash())))
    certified = _encode(Certified(entry, (vote,)))
    genesis = Entry("main", 0, bytes(32), hash_, (), (), (), 8, 4, "fp32", "mean", (member,))
    founded = _encode(
        Certified(genesis, (Vote(member, 0, ME.sign("x", genesis_payload(RUN, genesis.hash()))),))
    )
    invite = make_invite(RUN, ["/ip4/10.0.0.1/tcp/4150"], ME, now_s=NOW_S)
    toml = 'schema = 1\nname = "a"\n[model]\nentry = "local:a"\n[robust]\nrule = "krum"\nf = 1\n[join]\npolicy = "open"\n'
    signed = sign_manifest(parse_manifest(toml), ME)
    listed = _encode(BanList(RUN, 1, (Ban(PEER, "why", 5),), (b"n" * 8,)))
    record = records.Record(
        RUN, PEER, int(NOW_S * 1000), int((NOW_S + 30) * 1000), ("/ip4/10.0.0.1/tcp/4150",), 3
    )
    said = [
        records.Beat(True),
        records.Probe(PEER, b"n" * 8),
        records.TableHash(hash_),
        records.Records((records.SignedRecord(_encode(record), bytes(64)),)),
    ]
    bodies: list[Any] = [
        m.Ready(hash_, b"c" * 16, 1, False),
        m.Prepare(1),
        m.Accept(0, entry),
        m.Accepted(0, hash_, bytes(64)),
        m.Fetch(),
        m.Join(),
        m.Catch((Certified(entry, (vote,)),), 2, 0),
        m.Get(hash_, ((0, 1),)),
        m.AskState(),
        m.Offer(hash_, hash_, LAYOUT),
        m.Gone(hash_),
        m.Promise(1, m.Accepted1(0, entry), None),
        m.Missing(b"p" * 16, ((b"c" * 16, ((0, 1),)),)),
        m.Need(b"p" * 16, ((0, 1),)),
        m.Trial(b"c" * 16, hash_ * 2),
        m.Sample(b"c" * 16, 1, bytes(16)),
        m.Seal(hash_, (member,), bytes(64)),
        m.Sealed((member,), m.Accepted1(0, entry), bytes(64)),
    ]
    rounds = [m.encode(m.Envelope("main", 1, 1, body)) for body in bodies]
    located = ((PEER, ("/ip4/10.0.0.1/tcp/4150",)),)
    rpc = kad.encode(kad.Rpc(kad.FIND_NODE, b"k" * 32, b"v", located, located))
    value = values.sign(ME, "name", b"payload", 1, int(NOW_S + 60))[1]
    news = announcements.announce(OTHER, RUN, ["/ip4/10.0.0.1/tcp/4150"], NOW_S)
    return {
        "streams": [frame(b"hello") + frame(b"")]
        + [
            _encode(x)
            for x in (
                greeting.GreetingHello(2, RUN),
                greeting.Proof(b"certificate"),
                greeting.GreetingAnswer("", "", shown=b"certificate"),
                greeting.GreetingAnswer("", ""),
                lane_talk.LaneRequest(b"t" * 16, 0),
                lane_talk.LaneOffer(b"t" * 16, b"s" * 32, ("/ip4/10.0.0.1/tcp/1",), 0, False),
                lane_talk.Met((), True),
            )
        ],
        "lanes": [
            header.pack(header.PART, 100, 1, b"k" * 16, b"s" * 16),
            header.BEAT_HEADER,
            zstandard.ZstdCompressor().compress(b"abc" * 3000),
        ],
        "codec_payloads": [bytes([index]) + bytes(200) for index in range(len(CODECS))],
        "statements": [bytes([index]) + struct.pack("<d", 1.0) * 21 for index in range(8)],
        "round_messages": [
            *rounds,
            b"bf16:1000+int8",
            b"nnm+trimmed_mean:2",
            b"op/100/fp32/mean/all/key/config",
        ],
        "sessions": [_piece(ROUND + body) for body in rounds]
        + [_piece(MEMBERSHIP + records.encode(body)) for body in said],
        "archives": [b"\1" + certified, b"\1" + founded, framed(certified) + framed(founded)],
        "invites": [
            invite.encode().encode(),
            decode_base58(invite.encode()[len(PREFIX) :], most=4096)[:-4],
        ],
        "certificates": [invite.certify(OTHER, NOW_S).encode()],
        "manifests": [signed.encode(), signed.manifest, toml.encode()],
        "bans": [
            _encode(SignedBans(listed, ME.sign(BANS, listed))),
            listed,
            twice(
                PEER,
                *(
                    (vote_payload(RUN, "main/x", 1, bytes(32), 0, bytes([i]) * 32), bytes(64))
                    for i in (1, 2)
                ),
            ).encode(),
        ],
        "membership": [b"".join(_piece(records.encode(body)) for body in said), _encode(record)],
        "announced": [_encode(rendezvous._News(RUN, (news,), True))],
        "dht": [rpc, rpc[1:], value],
        "masking": [
            secure.encode(secure.AttemptMessage(1, 0, body))[1:]
            for body in (
                secure.Pass(),
                secure.Fixed(0, (1, 2)),
                secure.Want(1, (0,)),
                secure.AuthoredMessage(1, messages.Keys(b"k" * 32, b"p" * 32, hash_)),
                secure.AuthoredMessage(1, messages.MaskConsent((0, 1))),
            )
        ],
        "steps": [
            btard_wire.encode(said)[1:]
            for said in (*_said_of_steps(), btard_wire.Taken(bytes(32), ((0, 1),)))
        ]
        + [_encode(body) for body in _bodies_of_steps()],
        "relays": [
            protobuf.encode(
                {
                    1: 0,
                    2: circuit.peer_field(PEER),
                    3: circuit.reservation_fields(5, ["/ip4/10.0.0.1/tcp/4150"]),
                    5: 100,
                }
            )
        ],
        "neighbours": [
            mdns.question(),
            mdns.answer("abc", [f"/ip4/10.0.0.1/tcp/4150/p2p/{PEER}"]),
            struct.pack(">BBHI4s", 0, 128, 0, 1, b"abcd"),
            b"HTTP/1.1 200 OK\r\nLOCATION: http://192.168.1.1:5000/root.xml\r\n\r\n<service><serviceType>x</serviceType></service>",
        ],
    }


def _bodies_of_steps() -> list[Any]:
    b, hash_ = btard_messages, bytes(32)
    return [
        b.Commit(bytes(160)),
        b.Result(hash_, hash_, hash_),
        b.Reveal(hash_, hash_),
        b.Residuals(hash_, bytes(20), bytes(20)),
        b.Checks(hash_, (b.Accusation(7, 1),)),
        b.Judgement(hash_, (b.GuiltyVerdict(1, 6),)),
        b.VectorRequest(((7, 1, 2),)),
        b.Lacking(((1, 1, 0),)),
    ]


def _said_of_steps() -> list[Any]:
    b = btard_messages
    context = b.Context(RUN, 3, bytes(32), (ME.peer, PEER))
    signed = tuple(
        b.Signed(3, context.tag, 1, _encode(body), bytes(64)) for body in _bodies_of_steps()[:2]
    )
    header_ = VectorHeader(3, context.tag, (int(b.Kind.PART), 1, 0), (bytes(32),))
    return [
        *signed,
        b.Bundle(context, int(b.Fault.EQUIVOCATION), 1, None, signed),
        btard_wire.Offered(header_, 13),
    ]


def corpus(target: str) -> list[bytes]:
    """Good bytes, and all that was kept of what a fuzzer found: bytes that are read in ways of
    their own, or that were a defect.
    """
    file = CORPUS / f"{target}.txt"
    lines = file.read_text(encoding="ascii").split() if file.exists() else []
    return seeds()[target] + [bytes.fromhex(line) for line in lines]


def _piece(body: bytes) -> bytes:
    return len(body).to_bytes(2, "big") + body


def _pieces(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + 2 <= len(data):
        size = int.from_bytes(data[at : at + 2], "big")
        yield data[at + 2 : at + 2 + size]
        at += 2 + size


def _stream(data: bytes) -> Callable[[int], Coroutine[Any, Any, bytes]]:
    rest = bytearray(data)

    async def receive(count: int) -> bytes:
        piece = bytes(rest[: min(count, 7)])
        del rest[: len(piece)]
        return piece

    return receive


def _now(waiting: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns that waits for nothing."""
    try:
        waiting.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")
