"""The identity file and signatures."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import SecurityError
from atoll.collectives.identifiers import PeerId
from atoll.security import identity
from atoll.security.identity import Identity, is_peer_id, verify
from atoll.security.key_file import load, load_or_create

SEED = bytes(range(32))


def test_the_peer_id_is_that_of_libp2p() -> None:
    ed25519 = pytest.importorskip("libp2p.crypto.ed25519")
    peer_id = pytest.importorskip("libp2p.peer.id")
    expected = peer_id.ID.from_pubkey(ed25519.create_new_key_pair(SEED).public_key)
    assert Identity(SEED).peer == str(expected)


@given(st.binary(max_size=64))
def test_base58_round_trip(data: bytes) -> None:
    assert identity.decode_base58(identity.encode_base58(data)) == data


@given(st.text(max_size=80))
def test_no_text_breaks_the_peer_id_check(text: str) -> None:
    assert not is_peer_id(text) or text.startswith("12D3KooW")


def test_signatures_are_bound_to_key_domain_and_data() -> None:
    mine, other = Identity(SEED), Identity.generate()
    signature = mine.sign("vote", b"data")
    assert verify(mine.peer, "vote", b"data", signature)
    assert not verify(mine.peer, "announce", b"data", signature)
    assert not verify(mine.peer, "vote", b"Data", signature)
    assert not verify(other.peer, "vote", b"data", signature)
    assert not verify(mine.peer, "vot", b"edata", signature)
    assert not verify(mine.peer, "vote", b"data", signature[:-1])
    assert not verify(PeerId("nonsense"), "vote", b"data", signature)
    assert not verify(PeerId(""), "vote", b"data", b"")


def test_verification_needs_neither_libp2p_nor_trio() -> None:
    code = "import sys, atoll.security.identity as i; x = i.Identity.generate(); assert i.verify(x.peer, 'd', b'', x.sign('d', b'')); "
    code += "print(sorted({'libp2p', 'trio', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_file_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "home" / "identity"
    first = load_or_create(path)
    assert load_or_create(path).peer == load(path).peer == first.peer
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == ["identity"]


def test_two_processes_that_start_at_once_have_one_identity(tmp_path: Path) -> None:
    path = tmp_path / "home" / "identity"
    code = f"from pathlib import Path; from atoll.security.key_file import load_or_create; print(load_or_create(Path({str(path)!r})).peer)"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert len({process.communicate()[0] for process in processes}) == 1


def test_a_key_in_a_folder_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o700)
    load_or_create(folder / "identity")
    real = Path.stat

    def stat(self: Path, **options: bool) -> os.stat_result:
        found = real(self, **options)
        return os.stat_result((*found[:4], 4711, *found[5:])) if self == folder else found

    monkeypatch.setattr(Path, "stat", stat)
    for read in (load_or_create, load):
        with pytest.raises(SecurityError, match="belongs to user 4711") as caught:
            read(folder / "identity")
        assert caught.value.code == "E210"
        assert "chown" in caught.value.hint


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o610])
def test_a_key_that_others_can_get_at_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "identity"
    tmp_path.chmod(0o700)
    load_or_create(path)
    path.chmod(mode)
    with pytest.raises(SecurityError) as caught:
        load_or_create(path)
    assert caught.value.code == "E210"
    assert f"{mode:04o}" in caught.value.message
    assert "chmod 600" in caught.value.hint


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe garbage",
        b"atoll-identity-1 AAAA\n",
        b"atoll-identity-2 " + b"A" * 43 + b"=\n",
        b"x" * 100_000,
    ],
)
def test_garbage_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "identity"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(SecurityError) as caught:
        load_or_create(path)
    assert caught.value.code == "E210"
    assert caught.value.hint
    assert path.read_bytes() == content


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "identity"
    os.mkfifo(path, 0o600)
    with pytest.raises(SecurityError, match="not a regular file"):
        load_or_create(path)


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(SecurityError, match="0777"):
        load_or_create(tmp_path / "identity")
    assert not (tmp_path / "identity").exists()


def test_the_seed_is_not_shown() -> None:
    mine = Identity(SEED)
    assert SEED.hex() not in repr(mine)
    assert repr(mine) == f"Identity({mine.peer})"
