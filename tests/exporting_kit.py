"""A run of one member with a folder, and its export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from exported_models import output
from torch import Tensor, nn

from atoll.collectives.digest import chunk_hash, merkle_root
from atoll.collectives.outcomes import AnchorView
from atoll.collectives.swarm import RunSettings
from atoll.node.home.paths import find_paths
from atoll.node.manifest import SignedManifest, parse_manifest, save_run, sign_manifest
from atoll.node.records.export import Exported, export_run
from atoll.node.session.replica import state_chunk_bytes
from atoll.node.storage.checkpoint import SavedCheckpoint, save
from atoll.optim import SoloSwarm, attach
from atoll.security.identity import Identity


def write_checkpoint(folder: Path, run_id: str, layout: Any, view: AnchorView) -> None:
    """That of an anchor, into a run's folder, as a node does it."""
    anchor = torch.empty(view.numel)
    view.copy_into(anchor)
    momentum = torch.zeros(view.numel)
    state = anchor.numpy().tobytes() + momentum.numpy().tobytes()
    step = state_chunk_bytes(view.numel)
    root = merkle_root([chunk_hash(state[at : at + step]) for at in range(0, len(state), step)])
    saved = SavedCheckpoint(1, view.round, root, anchor, momentum)
    save(folder / "checkpoint", layout, saved, run_id=run_id, entry_hash=bytes(32))


class KeptSwarm(SoloSwarm):
    """A swarm of one whose run has a folder, as a node's has."""

    def __init__(
        self,
        home: Path,
        name: str,
        settings: RunSettings,
        extra: str = "",
        signed: SignedManifest | None = None,
    ) -> None:
        super().__init__(settings)
        self.paths = find_paths(home)
        self.paths.ensure()
        text = f'schema = 1\nname = "{name}"\n{extra}[model]\nentry = "local:x"\n'
        self.signed = signed or sign_manifest(parse_manifest(text), Identity.generate())
        self.folder = save_run(self.paths, self.signed)
        self.run_id = self.signed.run_id

    @property
    def model_folder(self) -> Path:  # type: ignore[override]
        """The model's folder in that of the run."""
        return self.folder / "model"

    def checkpoint(self, layout: Any, of: AnchorView | None = None) -> None:
        """As the node writes one at the end of a run: of this anchor, by default its own."""
        view = self.anchor() if of is None else of
        write_checkpoint(self.folder, self.signed.run_id, layout, view)
        if of is None:
            view.release()

    def export(self, out: Path, **options: Any) -> Exported:
        """`atoll export`."""
        return export_run(self.paths, self.signed, out, **options)


def trained(
    home: Path, name: str, model: nn.Module, probe: Tensor, extra: str = "", **options: Any
) -> tuple[KeptSwarm, Tensor]:
    """Three rounds of a run, and the outputs of its anchor."""
    swarm = KeptSwarm(home, name.replace("_", "-"), RunSettings(sync_every=2, rounds=3), extra)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    sync = attach(model, optimizer, swarm, batch_size=4, **options)
    model.train()
    while not sync.done:
        output(model, probe).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sync.round == 3
    swarm.checkpoint(sync._flat.layout)
    with sync.evaluate_anchor(), torch.no_grad():
        wanted = output(model.eval(), probe).float().contiguous()
    sync.detach()
    return swarm, wanted
