"""The base of a run, from member to member: real files, real exchanges, virtual time."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from exchange_kit import Net

from atoll.collectives import messages as m
from atoll.collectives.digest import chunk_hash
from atoll.collectives.errors import AtollError, ConfigError, RemoteProtocolError, StorageError
from atoll.collectives.exchange import Exchange
from atoll.collectives.identifiers import PeerId
from atoll.node.bases import fetching as fetching_module
from atoll.node.bases.fetching import BaseFetching
from atoll.node.bases.own import OwnBase, fetched_folder, keep_own, stamp_of
from atoll.node.bases.pieces import MOST_CHUNKS, Cutting, FilePorts, decode, encode, pieces_of
from atoll.node.bases.serving import EACH, HELD_BYTES, IDLE_S
from atoll.node.composing.parts import FilesOfBase
from atoll.node.home.paths import Paths, find_paths
from atoll.node.manifest.pretrained import check_bound, travels
from atoll.node.manifest.tables import BaseTable, ModelTable

RUN = "r" * 26
SMALL = Cutting(chunk=1000, segment=4000)
FILES = {"config.json": 700, "model-1.safetensors": 42_000, "model-2.safetensors": 9_999}


def content(name: str) -> bytes:
    return random.Random(name).randbytes(FILES[name])


def base_of(**changes: Any) -> BaseTable:
    digests = {name: hashlib.sha256(content(name)).hexdigest() for name in FILES}
    base = BaseTable(digests, sum(FILES.values()), 1, sizes=dict(FILES))
    return msgspec.structs.replace(base, **changes)


def model_of(**changes: Any) -> ModelTable:
    return ModelTable(entry="folder", folder="tiny", base=base_of(**changes))


@dataclass
class Machine:
    """One member's: its folder, and what it is asked to do. ``drops``: messages that it does not
    send.
    """

    stage: Stage
    peer: PeerId
    folder: Path
    sharing: FilesOfBase = field(init=False)
    exchange: Any = None
    jobs: deque[tuple[Callable[[], Any], Callable[[float, Any], None]]] = field(
        default_factory=deque
    )
    sent: list[m.Get | m.Offer | m.Gone] = field(default_factory=list)
    drops: Callable[[m.Get | m.Offer | m.Gone], bool] = lambda body: False

    def open(
        self, model: ModelTable, *, share: bool = True, cutting: Cutting | None = SMALL
    ) -> None:
        """A node with this folder begins to live."""
        self.exchange = self.stage.net.nodes[self.peer]
        self.run_folder.mkdir(parents=True, exist_ok=True)
        self.sharing = FilesOfBase(
            RUN,
            model,
            self.paths,
            FilePorts(self.exchange, self.send, self.work),
            random.Random(1),
            share=share,
            cutting=cutting,
        )

    @property
    def paths(self) -> Paths:
        return find_paths(self.folder)

    @property
    def run_folder(self) -> Path:
        return self.paths.run_dir(RUN)

    def has(self, **other: bytes) -> None:
        """Its copy lies in a folder of its user, compared; of some files with ``other`` bytes."""
        copy = self.folder / "copy"
        copy.mkdir(parents=True)
        for name in FILES:
            key = name.partition(".")[0].replace("-", "_")
            (copy / name).write_bytes(other.get(key, content(name)))
        self.compared(copy)

    def compared(self, copy: Path) -> None:
        paths = {name: copy / name for name in FILES}
        stamps = {str(path.resolve()): stamp_of(path) for path in paths.values()}
        named = {name: str(path) for name, path in paths.items()}
        keep_own(self.run_folder, OwnBase(str(copy), stamps, named))

    # ---- its ports
    def send(self, peer: PeerId, data: bytes) -> None:
        body = decode(data, self.peer)
        self.sent.append(body)
        if not self.drops(body):
            self.stage.flying.append((self.peer, peer, data))

    def work(self, work: Callable[[], Any], done: Callable[[float, Any], None]) -> None:
        self.jobs.append((work, done))


class Stage:
    """Machines that are connected; the first lacks the base."""

    def __init__(self, count: int, folder: Path, model: ModelTable | None = None) -> None:
        self.net, self.now, self.model = Net(count), 100.0, model or model_of()
        self.flying: deque[tuple[PeerId, PeerId, bytes]] = deque()
        self.faults: list[RemoteProtocolError] = []
        self.machines = [Machine(self, peer, folder / peer) for peer in self.net.peers]
        for machine in self.machines:
            machine.open(self.model)

    def begin(self) -> BaseFetching:
        return self.machines[0].sharing.begin(self.now)

    def restart(self, machine: Machine) -> None:
        """Its process is killed, and another one begins: nothing is known but the disk."""
        machine.jobs.clear()
        self.flying.clear()
        events = self.net.events[machine.peer]
        events.clear()
        self.net.nodes[machine.peer] = Exchange(machine.peer, emit=events.append)
        for other in self.net.peers:
            if other != machine.peer:
                self.net.cut(machine.peer, other)
        machine.open(self.model)

    def step(self, seconds: float = 0.25, passes: int = 10_000) -> None:
        """What is on its way arrives, ``passes`` times at most, then it is later."""
        while passes and self._deliver():
            passes -= 1
        self.now += seconds
        up = [machine for machine in self.machines if machine.peer not in self.net.down]
        for machine in up:
            machine.sharing.tick(self.now, [other.peer for other in up if other is not machine])

    def _deliver(self) -> int:
        count = 0
        while self.flying:
            sender, peer, data = self.flying.popleft()
            count += 1
            if peer not in self.net.down and sender not in self.net.down:
                try:
                    self.machine(peer).sharing.take(self.now, sender, data)
                except RemoteProtocolError as error:
                    self.faults.append(error)
        for machine in self.machines:
            while machine.jobs:
                work, done = machine.jobs.popleft()
                done(self.now, work())
                count += 1
        count += self.net.run()
        for machine in self.machines:
            events, self.net.events[machine.peer][:] = list(self.net.events[machine.peer]), []
            for event in events:
                machine.sharing.on_exchange(self.now, event)
            count += len(events)
        return count

    def machine(self, peer: PeerId) -> Machine:
        return self.machines[self.net.peers.index(peer)]

    def fetch(self, fetching: BaseFetching | None = None, most: int = 1000) -> BaseFetching:
        """Until it is over."""
        fetching = fetching or self.begin()
        for _ in range(most):
            if fetching.over:
                break
            self.step()
        assert fetching.over
        return fetching

    @property
    def folder(self) -> Path:
        """Where the first machine's files come."""
        assert self.model.base is not None
        return fetched_folder(self.machines[0].folder / "cache", self.model.base)

    def all_there(self) -> bool:
        return sorted(path.name for path in self.folder.iterdir()) == sorted(FILES) and all(
            (self.folder / name).read_bytes() == content(name) for name in FILES
        )


def refused(fetching: BaseFetching) -> AtollError:
    assert fetching.error is not None
    assert fetching.error.hint
    return fetching.error


# ---- it works


def test_files_come_from_all_who_have_them(tmp_path: Path) -> None:
    stage = Stage(3, tmp_path)
    for machine in stage.machines[1:]:
        machine.has()
    fetching = stage.fetch()
    assert fetching.error is None
    assert stage.all_there()
    chunks = sum(piece.chunks for piece in pieces_of(base_of(), SMALL))
    assert fetching.brought.total() == chunks == 53  # each once
    assert set(fetching.brought) == {"peer-1", "peer-2"}
    assert fetching.document()["bytes"] == sum(FILES.values())
    assert fetching.progress[1:] == (sum(FILES.values()), sum(FILES.values()))


def test_a_command_hears_how_far_they_are_and_what_came_of_it(tmp_path: Path) -> None:
    stage = Stage(2, tmp_path)
    stage.machines[1].has()
    sharing = stage.machines[0].sharing
    assert sharing.news().over  # nothing is fetched
    fetching = stage.begin()
    news = sharing.news()
    assert (news.over, news.error, news.progress) == (
        False,
        None,
        ("comparing the base's files", 0, sum(FILES.values())),
    )
    stage.fetch(fetching)
    sharing.end()
    assert (sharing.news().over, sharing.news().error) == (True, None)
    assert sharing.news().document == {
        "folder": str(stage.folder),
        "bytes": sum(FILES.values()),
        "fetched": sum(FILES.values()),
        "from": ["peer-1"],
    }


def test_files_smaller_than_a_chunk(tmp_path: Path) -> None:
    """As nodes cut them, and within what a peer is sent of such a base."""
    stage = Stage(2, tmp_path)
    stage.machines[1].has()
    for machine in stage.machines:
        machine.open(stage.model, cutting=None)
    fetching = stage.fetch()
    assert fetching.error is None
    assert stage.all_there()
    assert fetching.brought.total() == len(FILES)


def test_who_has_fetched_it_hands_it_on(tmp_path: Path) -> None:
    stage = Stage(3, tmp_path)
    stage.machines[1].has()
    stage.fetch()
    first, last = stage.machines[0], stage.machines[2]
    first.compared(stage.folder)
    stage.net.kill(stage.machines[1].peer)
    last.sharing.begin(stage.now)
    assert last.sharing.fetching is not None
    assert stage.fetch(last.sharing.fetching).error is None
    assert set(last.sharing.fetching.brought) == {first.peer}


def test_what_is_here_is_not_asked_for(tmp_path: Path) -> None:
    stage = Stage(2, tmp_path)
    stage.machines[1].has()
    stage.fetch()
    (stage.folder / "config.json").write_bytes(b"{}")  # as a disk may
    stage.machines[0].sharing.end()
    again = stage.fetch()
    assert again.error is None
    assert again.brought.total() == 1
    assert stage.all_there()


@pytest.mark.parametrize("after", [1, 12_000, 40_000])
def test_after_a_kill_it_goes_on_with_what_is_on_the_disk(after: int, tmp_path: Path) -> None:
    stage = Stage(2, tmp_path)
    stage.machines[1].has()
    fetching = stage.begin()
    while fetching.have_bytes < after:
        stage.step(0.01, passes=1)
    assert not fetching.over
    kept = fetching.have_bytes
    stage.restart(stage.machines[0])
    parts = list(stage.folder.glob(".*.part"))
    for part in parts:  # the last write may be torn
        with part.open("r+b") as file:
            file.seek(-10, 2)
            file.write(b"x" * 10)
    again = stage.fetch()
    assert again.error is None
    assert stage.all_there()
    assert again.document()["fetched"] <= sum(FILES.values()) - kept + 4000 * len(parts)


# ---- what peers may do


def test_wrong_bytes_are_not_used_and_who_sent_them_is_asked_no_more(tmp_path: Path) -> None:
    """Its hashes are those of other bytes: only the whole file shows it."""
    stage, first = Stage(3, tmp_path), 0
    stage.machines[1].has()
    wrong = bytearray(content("model-1.safetensors"))
    wrong[20_500] ^= 1
    honest, liar = stage.machines[1].peer, stage.machines[2].peer
    stage.machines[2].has(model_1=bytes(wrong))
    for number in range(8):
        stage.machines[0].folder = tmp_path / f"try-{number}"
        for machine in stage.machines:  # with new budgets
            machine.open(stage.model)
        stage.machines[0].sharing._rng.seed(number)
        fetching = stage.fetch()
        assert fetching.error is None
        assert stage.all_there()
        assert fetching._barred <= {liar}
        assert fetching.brought.total() == 53 + 4 * len(fetching._barred)
        assert fetching.brought[honest] >= 4
        first += len(fetching._barred)
        stage.machines[0].sharing.end()
    assert 0 < first < 8  # whichever is believed first


def test_what_lying_hashes_agree_with_is_kept(tmp_path: Path) -> None:
    """One chunk is wrong: when it is found out, that segment is fetched again, and no other."""
    stage = Stage(3, tmp_path)
    stage.machines[1].has()
    wrong = bytearray(content("model-1.safetensors"))
    wrong[20_500] ^= 1
    stage.machines[2].has(model_1=bytes(wrong))
    late = stage.machines[1]
    late.drops = lambda body: isinstance(body, m.Offer)
    fetching = stage.begin()
    while stage.machines[2].peer not in fetching._barred:
        stage.step()
    late.drops = lambda body: False
    assert stage.fetch(fetching).error is None
    assert stage.all_there()
    assert fetching.brought.total() == 53 + 4


def test_a_chunk_that_is_not_what_was_offered(tmp_path: Path) -> None:
    """Its file has changed under its feet, and nobody noticed."""
    stage = Stage(3, tmp_path)
    for machine in stage.machines[1:]:
        machine.has()
    liar = stage.machines[2]
    provide = liar.exchange.provide

    def other(name: bytes, data: memoryview, bounds: int) -> None:
        provide(name, memoryview(bytes(len(data))), bounds)

    liar.exchange.provide = other
    fetching = stage.fetch()
    assert fetching.error is None
    assert stage.all_there()
    assert fetching._barred == {liar.peer}
    assert set(fetching.brought) == {stage.machines[1].peer}


def test_a_peer_that_offers_and_stalls_is_worked_around(tmp_path: Path) -> None:
    stage = Stage(3, tmp_path)
    for machine in stage.machines[1:]:
        machine.has()
    stage.machines[2].exchange.send_blob = lambda peer, name, spans: None
    fetching = stage.fetch()
    assert fetching.error is None
    assert stage.all_there()
    assert set(fetching.brought) == {stage.machines[1].peer}


def test_a_peer_with_hashes_of_its_own_that_stalls_is_worked_around(tmp_path: Path) -> None:
    stage = Stage(3, tmp_path)
    stage.machines[1].has()
    stage.machines[2].has(model_1=bytes(FILES["model-1.safetensors"]))
    stage.machines[2].exchange.send_blob = lambda peer, name, spans: None
    fetching = stage.begin()
    fetching._slow.add(stage.machines[1].peer)  # the liar is believed first
    assert stage.fetch(fetching).error is None
    assert stage.all_there()


def test_hashes_that_are_taken_back_are_kept_no_longer(tmp_path: Path) -> None:
    """By who offers others each time; what the rest say goes on."""
    stage = Stage(3, tmp_path)
    stage.machines[1].has()
    fetcher, _, liar = stage.net.peers
    stage.machines[2].drops = lambda body: True
    fetching, most = stage.begin(), 0
    pieces = {piece.digest: piece for piece in pieces_of(base_of(), SMALL)}
    while not fetching.over:
        stage.step(0.05, passes=1)
        if (file := fetching._file) is None:
            continue
        most = max(most, len(file.offers))
        digest = file.piece.digest
        for number in range(20):
            false = number.to_bytes(32, "big") * pieces[digest].chunks
            for body in (m.Offer(digest, false, None), m.Gone(digest)):
                stage.flying.append((liar, fetcher, encode(body)))
    assert fetching.error is None
    assert stage.all_there()
    assert most <= 2


def test_only_one_peer_and_it_stalls_then_all_ends_and_what_came_is_kept(tmp_path: Path) -> None:
    stage = Stage(2, tmp_path)
    stage.machines[1].has()
    fetching = stage.begin()
    while fetching.have_bytes < 20_000:
        stage.step(0.01, passes=1)
    stage.machines[1].exchange.send_blob = lambda peer, name, spans: None
    error = refused(stage.fetch(fetching))
    assert error.code == "E415"
    assert "send no more of" in error.message
    assert "are kept" in error.why
    kept = fetching.have_bytes
    del stage.machines[1].exchange.send_blob
    stage.machines[0].sharing.end()
    again = stage.fetch()
    assert again.error is None
    assert again.brought.total() <= -(-(sum(FILES.values()) - kept) // 1000) + 3


@pytest.mark.parametrize("hashes", [b"", bytes(31), bytes(32 * 41), bytes(32 * 43)])
def test_hashes_of_another_length_break_a_rule(hashes: bytes, tmp_path: Path) -> None:
    """A peer cannot make this machine take fewer bytes than are bound, or more."""
    stage = Stage(2, tmp_path)
    fetching = stage.begin()
    digest = bytes.fromhex(base_of().files["config.json"])
    while digest not in {body.name for body in stage.machines[0].sent}:
        stage.step()
    offer = m.Offer(digest, hashes, None)
    with pytest.raises(RemoteProtocolError, match="another number of chunks"):
        stage.machines[0].sharing.take(stage.now, stage.machines[1].peer, encode(offer))
    assert fetching.have_bytes == 0


def test_a_truncated_file_is_not_offered(tmp_path: Path) -> None:
    stage = Stage(2, tmp_path)
    stage.machines[1].has(model_1=content("model-1.safetensors")[:-1])
    error = refused(stage.fetch())
    assert "gives model-1.safetensors" in error.message
    assert "[models] share = false" in error.why
    assert (stage.folder / "config.json").exists()


def test_a_file_that_has_changed_is_served_no_more(tmp_path: Path) -> None:
    stage = Stage(2, tmp_path)
    stage.machines[1].has()
    path = stage.machines[1].folder / "copy" / "model-1.safetensors"
    path.write_bytes(bytes(FILES["model-1.safetensors"]))
    assert "gives model-1.safetensors" in refused(stage.fetch()).message


@pytest.mark.parametrize("garbage", [b"F", b"Fxx", b"F\x92\xa3get\xc0", b"F" + bytes(1000)])
def test_garbage_is_refused(garbage: bytes, tmp_path: Path) -> None:
    stage = Stage(2, tmp_path)
    with pytest.raises(RemoteProtocolError):
        stage.machines[0].sharing.take(0.0, stage.machines[1].peer, garbage)


def test_more_lies_than_it_is_worth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many times a file is fetched at most, whoever offers what."""
    monkeypatch.setattr(fetching_module, "MOST_LISTS", 3)
    stage = Stage(6, tmp_path)
    for number, machine in enumerate(stage.machines[1:]):
        machine.has(model_1=bytes([number]) * FILES["model-1.safetensors"])
    fetching = stage.fetch()
    assert "is not the run's, 3 times" in refused(fetching).message
    assert fetching.brought.total() <= 1 + 10 + 3 * 42
    assert not (stage.folder / "model-1.safetensors").exists()


# ---- what is served, and to whom


def asked(stage: Stage, body: m.Get, peer: int = 1) -> list[m.Get | m.Offer | m.Gone]:
    """What the first machine answers to another's question."""
    before = len(stage.machines[0].sent)
    stage.machines[0].sharing.take(stage.now, stage.machines[peer].peer, encode(body))
    stage._deliver()
    return stage.machines[0].sent[before:]


def test_only_files_of_the_manifest_are_served(tmp_path: Path) -> None:
    stage = Stage(2, tmp_path)
    stage.machines[0].has()
    secret = stage.machines[0].folder / "copy" / "secret.txt"
    secret.write_bytes(b"mine")
    own = stage.machines[0].run_folder / "base.json"
    for name in (
        hashlib.sha256(b"mine").digest(),
        hashlib.sha256(own.read_bytes()).digest(),
        bytes(32),
    ):
        assert asked(stage, m.Get(name, ())) == [m.Gone(name)]
        assert asked(stage, m.Get(name, ((0, 9),))) == [m.Gone(name)]
    data = content("config.json")
    name = hashlib.sha256(data).digest()
    assert asked(stage, m.Get(name, ())) == [m.Offer(name, chunk_hash(data), None)]


def gated(**base: Any) -> ModelTable:
    return ModelTable(entry="hub", hub="org/tiny", base=base_of(**base))


@pytest.mark.parametrize("model", [gated(gated=True), gated(gated=None)])
def test_a_gated_base_is_neither_served_nor_asked_for(model: ModelTable, tmp_path: Path) -> None:
    stage = Stage(2, tmp_path, model)
    stage.machines[0].has()
    name = bytes.fromhex(base_of().files["config.json"])
    assert asked(stage, m.Get(name, ())) == [m.Gone(name)]
    with pytest.raises(ConfigError, match="not handed on by members") as caught:
        stage.machines[1].sharing.begin(0.0)
    assert caught.value.code == "E415"
    assert "hf auth login" in caught.value.hint
    assert not stage.machines[1].sent


def test_a_base_that_the_hub_called_gated_to_this_machine_is_not_served(tmp_path: Path) -> None:
    stage = Stage(2, tmp_path, gated(gated=False))
    machine = stage.machines[0]
    machine.has()
    name = bytes.fromhex(base_of().files["config.json"])
    assert isinstance(asked(stage, m.Get(name, ()))[0], m.Offer)
    own = msgspec.json.decode((machine.run_folder / "base.json").read_bytes(), type=OwnBase)
    keep_own(machine.run_folder, msgspec.structs.replace(own, gated=True))
    assert asked(stage, m.Get(name, ())) == [m.Gone(name)]


def test_who_does_not_share_serves_nothing_and_fetches_all_the_same(tmp_path: Path) -> None:
    stage = Stage(3, tmp_path)
    stage.machines[1].has()
    stage.machines[2].has()
    stage.machines[2].open(stage.model, share=False)
    stage.machines[0].open(stage.model, share=False)
    fetching = stage.fetch()
    assert fetching.error is None
    assert set(fetching.brought) == {stage.machines[1].peer}


def test_memory_and_bytes_of_serving_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(3, tmp_path)
    stage.machines[0].has()
    serving = stage.machines[0].sharing.serving
    assert serving is not None
    piece = next(p for p in pieces_of(base_of(), SMALL) if p.name == "model-1.safetensors")
    names = [piece.segment_name(RUN, number) for number in range(piece.segments)]
    monkeypatch.setattr("atoll.node.bases.serving.HELD_BYTES", 5 * 4000)
    for name in names:
        assert asked(stage, m.Get(name, ((0, 4),))) == []
        assert serving.held_bytes <= 5 * 4000
    assert names[-1] in serving._held  # one peer goes on from one to the next
    for name in names[:6]:
        asked(stage, m.Get(name, ((0, 4),)), peer=2)
    assert serving.held_bytes <= 5 * 4000
    stage.step(IDLE_S + 1)
    assert serving.held_bytes == 0
    total, got = sum(FILES.values()), 42_000
    for turn in range(EACH * 2 * total // 4000):
        name = names[turn % 10]
        answers = asked(stage, m.Get(name, ((0, 1 << 40),) * 4000))
        assert answers in ([], [m.Gone(name)])
        got += 0 if answers else 4000
    assert EACH * total - 4000 < got <= EACH * total + 4000
    for _ in range(EACH * total):  # the same again and again counts, too
        if asked(stage, m.Get(names[1], ((0, 4),)), peer=2):
            break
    else:
        raise AssertionError("as often as it likes")
    assert HELD_BYTES == 96 << 20


# ---- sizes, disk, folders


def test_a_manifest_binds_sizes_that_are_those_of_the_files() -> None:
    for sizes in ({"config.json": 1}, {**FILES, "config.json": 701}):
        with pytest.raises(ConfigError, match="another size"):
            check_bound(model_of(sizes=sizes))
    check_bound(model_of())
    check_bound(model_of(sizes={}))  # as of a run that was founded before
    assert not travels(model_of(sizes={}))
    assert not travels(model_of(gated=True))
    assert travels(model_of())


def test_a_large_file_has_no_more_chunks_than_one_message_can_say() -> None:
    for size in (1 << 20, 5 << 30, 40 << 30, 255 << 30):
        base = BaseTable({"a": "0" * 64}, size, 1, sizes={"a": size})
        (piece,) = pieces_of(base, Cutting())
        assert piece.chunks <= MOST_CHUNKS
        assert piece.chunk <= 17 << 20
        assert piece.span(piece.segments - 1)[1] == size
        assert sum(len(piece.numbers(n)) for n in range(piece.segments)) == piece.chunks


def test_a_disk_without_room_is_refused_before_anything_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(2, tmp_path)
    stage.machines[1].has()
    monkeypatch.setattr(fetching_module, "SPARE_BYTES", 1 << 60)
    error = refused(stage.fetch())
    assert isinstance(error, StorageError)
    assert str(stage.folder) in error.message
    assert "XDG_CACHE_HOME" in error.hint
    assert not stage.machines[0].sent


def test_nobody_is_there(tmp_path: Path) -> None:
    error = refused(Stage(1, tmp_path).fetch())
    assert "no member of the run is connected" in error.message
    assert "--model PATH" in error.hint


def test_two_commands_do_not_fetch_at_once(tmp_path: Path) -> None:
    stage = Stage(1, tmp_path)
    stage.begin()
    with pytest.raises(ConfigError, match="by another command"):
        stage.begin()
    stage.machines[0].sharing.end()
    stage.begin()
