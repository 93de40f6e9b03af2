"""Four peers of `LocalSwarm` on `node/storage` in a folder in memory, admitted by invites of
`node/run`: one is killed and comes back from its disk, one joins late. Prints one JSON object: the
hash of the anchor that all end with, and of what each script saw.

    python scripts/_ring_trial.py

Imports nothing but the kernel and what stands beside it (`scripts/ring_one.py`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import nn

from atoll.collectives.errors import StorageError
from atoll.collectives.identifiers import PeerId, RunId
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.round import Doors
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.run.gate import Gate
from atoll.node.run.inner_doors import doors_of
from atoll.node.run.invite import make_invite
from atoll.node.session.ports import Storage
from atoll.node.session.replica import PlainSlots
from atoll.node.storage import RunFiles
from atoll.optim import attach
from atoll.security.identity import Identity

NOW_S = 1_800_000_000.0
ROUNDS = 8
SETTINGS = RunSettings(
    sync_every=4, rounds=ROUNDS, codec="int8", outer=OuterSettings("nesterov", 0.7, 0.9)
)
PEOPLE = [Identity((index + 1).to_bytes(32, "big")) for index in range(4)]
RUN = RunId(base64.b32encode(hashlib.sha256(b"ring 1").digest()).decode()[:26].lower())


class NobodyKeptOut:
    """Implements `gate.KeptOut`."""

    of_run: Collection[PeerId] = ()
    revoked: Collection[bytes] = ()

    def why(self, peer: PeerId) -> str | None:
        """Nobody is banned."""
        return None

    def refuse(self, peer: PeerId) -> None:
        """Nobody is banned."""

    def check_invite(self, nonce: bytes) -> None:
        """No invite is revoked."""


def make_doors(peer: PeerId) -> Doors:
    """The doors of one member, to which those who were invited have shown their certificates."""
    organiser = PEOPLE[0]
    gate = Gate(RUN, organiser.peer, NobodyKeptOut(), lambda: [person.peer for person in PEOPLE])
    gate.policy = "invite"
    doors = doors_of(gate, lambda: NOW_S)
    for person in PEOPLE[1:]:
        invite = make_invite(RUN, [], organiser, now_s=NOW_S, peer=person.peer)
        doors.note(person.peer, invite.certify(person, NOW_S).encode())
    return doors


def train(swarm: Any) -> dict[str, Any]:
    """A plain torch loop: every peer has other data of one linear problem."""
    torch.manual_seed(7)
    model, truth = nn.Linear(6, 2), torch.randn(6, 2)
    torch.manual_seed(100 + swarm.index)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    attachment, losses = attach(model, optimizer, swarm, clock=swarm.clock), list[float]()
    while not attachment.done and len(losses) < 400:
        x = torch.randn(8, 6)
        loss = nn.functional.mse_loss(model(x), x @ truth)
        optimizer.zero_grad()
        loss.backward()
        attachment.samples(8)
        optimizer.step()
        losses.append(loss.item())
    view = swarm.anchor()
    anchor = torch.zeros(view.numel)
    view.copy_into(anchor)
    return {
        "round": view.round,
        "anchor": blake3(anchor.numpy().tobytes()).hexdigest(),
        "losses": blake3(torch.tensor(losses).numpy().tobytes()).hexdigest(),
        "steps": len(losses),
    }


def main() -> None:
    """Play it."""
    shared = Path("/dev/shm")  # nosec B108: a folder of its own is made in it
    memory = shared if shared.is_dir() else None
    troubles = list[str]()
    torch.set_num_threads(1)

    def tell(error: StorageError) -> None:
        troubles.append(str(error))

    with tempfile.TemporaryDirectory(dir=memory) as name:
        lives = dict[PeerId, int]()

        def make_storage(peer: PeerId, fragment: int, before: Storage | None) -> Storage:
            lives[peer] = lives.get(peer, -1) + 1
            folder = Path(name) / peer
            folder.mkdir(exist_ok=True, mode=0o700)
            return RunFiles(
                folder,
                run_id=RUN,
                outer=SETTINGS.outer,
                slots=PlainSlots,
                trouble=tell,
                me=peer,
                organiser=PEOPLE[0].peer,
            )

        swarm = LocalSwarm(
            len(PEOPLE),
            settings=SETTINGS,
            latency_s=0.02,
            names=[person.peer for person in PEOPLE],
            storage=make_storage,
            doors=make_doors,
        )
        swarm.place.run_id = RUN
        swarm.crash_at(1, 3.0, back_after_s=1.0).join_at(3, 4.0)
        found = swarm.run(train, step_s=0.25)
    print(
        json.dumps(
            {
                "rounds": [each["round"] for each in found],
                "one_anchor": len({each["anchor"] for each in found}) == 1,
                "lives": [lives[person.peer] + 1 for person in PEOPLE],
                "troubles": troubles,
                "bits": blake3(json.dumps(found, sort_keys=True).encode()).hexdigest(),
            }
        )
    )


if __name__ == "__main__":
    main()
