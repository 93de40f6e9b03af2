"""What a running node has loaded: none of the native libraries of transports and keys that it does
not speak; and who needs them gets nowhere.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from bad_input_kit import ended, new_run, one_round
from seeds import RARE

from atoll.node.net.lean import UNUSED

pytestmark = [*RARE]

MAPPED = {
    "Crypto": "RSA keys of libp2p peers",
    "PIL": "nothing of ours: torch looks for it where it is installed",
    "_cffi_backend": "cryptography, PyNaCl",
    "atoll": "kernels",
    "blake3": "digests",
    "cbor2": "libp2p.records",
    "cryptography": "Noise, lanes",
    "google": "protobuf",
    "mmh3": "multihash",
    "msgspec": "messages",
    "nacl": "Ed25519 of libp2p",
    "numpy": "",
    "psutil": "interfaces, by multiaddr",
    "torch": "",
    "triton": "torch with CUDA",
    "nvidia": "torch with CUDA",
    "zstandard": "packed records",
}
"""Packages with native parts that a node may have in its memory, and what for."""


DIAL = """
import sys, trio
from libp2p import new_host
from libp2p.crypto.secp256k1 import create_new_key_pair
from libp2p.peer.peerinfo import info_from_p2p_addr
from multiaddr import Multiaddr

async def main():
    host = new_host(key_pair=create_new_key_pair())
    with trio.move_on_after(20):
        async with host.run([]):
            try:
                await host.connect(info_from_p2p_addr(Multiaddr(sys.argv[1])))
                await trio.sleep(1)
                print("inside" if host.get_connected_peers() else "outside")
            except Exception:
                print("outside")

trio.run(main)
"""
"""A libp2p peer whose key is one of secp256k1, for which the library of that curve would be needed.
"""


def mapped(pid: int) -> set[str]:
    """Top-level packages whose shared objects a process has in its memory."""
    found = set[str]()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[5] if line.count(" ") > 4 and "/" in line else ""
        if re.search(r"\.so(\.|$)", path) and "site-packages/" in path:
            top = path.split("site-packages/", 1)[1].split("/")[0]
            found.add(re.split(r"[.]", top)[0])
    return found


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells")
def test_a_running_node_has_mapped_what_it_uses_and_no_more(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    a = run.organiser()
    b = run.member("b")
    with ended(a, b):
        one_round(a, b)
        for member in (a, b):
            found = mapped(member.pid)
            assert "torch" in found  # the instrument works
            assert found & UNUSED == set()
            assert found - MAPPED.keys() == set()


def test_a_peer_with_a_key_that_is_not_loaded_is_turned_away_and_harms_nothing(
    tmp_path: Path,
) -> None:
    run = new_run(tmp_path)
    a = run.organiser()
    with ended(a):
        one_round(a)
        told = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", DIAL, run.address],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert told.stdout.split() == ["outside"], told
        one_round(a)  # the node goes on
        assert mapped(a.pid) & UNUSED == set()


def test_whoever_else_wants_the_packages_gets_the_real_ones() -> None:
    code = (
        "from atoll.node.net.lean import UNUSED, load_libp2p\n"
        "load_libp2p()\n"
        "import sys, libp2p\n"
        "assert not UNUSED & {name.partition('.')[0] for name in sys.modules}\n"
        "import zeroconf, coincurve\n"
        "assert coincurve.PrivateKey().public_key and zeroconf.Zeroconf\n"
        "from libp2p.crypto.secp256k1 import create_new_key_pair\n"
        "try:\n    create_new_key_pair()\nexcept ValueError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "is not loaded into a node" in done.stdout


def test_whoever_wants_shapes_without_values_gets_them_from_torch() -> None:
    code = (
        "from atoll.node.net.lean import load_torch\n"
        "load_torch()\n"
        "import sys, torch\n"
        "print('torch._meta_registrations' in sys.modules)\n"
        "import torch._meta_registrations\n"
        "print(*torch.linalg.qr(torch.empty(3, 2, device='meta')).R.shape)\n"
        "print(torch.linalg.qr(torch.eye(2)).R.abs().tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False", "2 2", "[[1.0, 0.0], [0.0, 1.0]]"]
