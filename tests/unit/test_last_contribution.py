"""Trainer's and Lightning's callbacks contribute what was trained last before other callbacks put
averaged or best weights into the model, in whatever order they are listed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.optim import SoloSwarm

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SETTINGS = RunSettings(sync_every=10, rounds=100, codec="fp32", outer=OuterSettings("sgd", 1.0))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def anchor(swarm: SoloSwarm) -> Tensor:
    view = swarm.anchor()
    out = torch.empty(view.numel)
    view.copy_into(out)
    view.release()
    return out


def batches() -> torch.utils.data.TensorDataset:
    inputs = torch.randn(36 * 8, 4, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


@pytest.mark.parametrize("kind", ["none", "swa", "swa_norm", "ema"])
@pytest.mark.parametrize("first", [True, False])
def test_lightning(kind: str, first: bool, tmp_path: Path) -> None:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging

    from atoll.optim import AtollLightningCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            norm = [nn.BatchNorm1d(16)] if kind == "swa_norm" else []
            self.net = nn.Sequential(nn.Linear(4, 16), *norm, nn.Tanh(), nn.Linear(16, 1))
            self.stepped = torch.zeros(0)

        def training_step(self, batch: Any, index: int) -> Tensor:
            return (self.net(batch[0]) - batch[1]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
            optimizer.register_step_post_hook(self.note)
            return optimizer

        def note(self, *arguments: object) -> None:
            if self.current_epoch < 3:  # then running statistics are renewed, and no more
                self.stepped = flat(self.net)

    module, swarm = Module(), SoloSwarm(SETTINGS)
    ours = AtollLightningCallback(swarm)
    others: dict[str, list[Callback]] = {
        "none": [],
        "ema": [EMAWeightAveraging(decay=0.999)],
    }
    averaging = others.get(kind, [StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)])
    trainer = Trainer(
        callbacks=[*averaging, ours] if first else [ours, *averaging],
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        max_epochs=3,
    )
    trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=8))
    attachment = ours.attachment
    assert attachment is not None
    stats = attachment.stats
    assert (stats["steps"] % 10 > 0, stats["samples_dropped"]) == (True, 0)
    assert stats["samples_counted"] == 8 * stats["steps"]
    assert_close(anchor(swarm)[: flat(module.net).numel()], module.stepped)
    if kind == "none":
        assert_close(flat(module.net), module.stepped)
    else:
        assert (flat(module.net) - module.stepped).abs().max() > 1e-3


def test_lightnings_backbone_belongs_to_the_run_before_it_is_unfrozen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import BackboneFinetuning

    from atoll.optim import AtollLightningCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 1)

        def training_step(self, batch: Any, index: int) -> Tensor:
            return (self.head(self.backbone(batch[0])) - batch[1]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)

    module, swarm = Module(), SoloSwarm(SETTINGS)
    begun = flat(module.backbone)
    ours = AtollLightningCallback(swarm, include=["backbone.*"])
    tuning = BackboneFinetuning(
        unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.05, verbose=False
    )
    trainer = Trainer(
        callbacks=[tuning, ours],
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        max_epochs=2,
    )
    trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=8))
    assert "no part of the run" not in caplog.text
    assert_close(anchor(swarm)[: begun.numel()], flat(module.backbone))
    assert (flat(module.backbone) - begun).abs().max() > 1e-3


@pytest.mark.parametrize("ends", ["steps", "early", "data"])
@pytest.mark.parametrize("first", [True, False])
def test_trainer(ends: str, first: bool, tmp_path: Path) -> None:
    from transformers import (
        EarlyStoppingCallback,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from atoll.optim import AtollCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": (self.net(x) - labels).square().mean()}

    class Averaged(TrainerCallback):
        """Leaves other weights in the model at the end."""

        stepped = torch.zeros(0)

        def on_optimizer_step(self, *arguments: Any, **kwargs: Any) -> None:
            self.stepped = flat(kwargs["model"])

        def on_train_end(self, *arguments: Any, **kwargs: Any) -> None:
            with torch.no_grad():
                for parameter in kwargs["model"].parameters():
                    parameter.copy_(torch.randn(parameter.shape))

    swarm, averaged = SoloSwarm(SETTINGS), Averaged()
    ours = AtollCallback(swarm)
    callbacks: list[Any] = [averaged, ours] if first else [ours, averaged]
    if ends == "early":
        callbacks.append(EarlyStoppingCallback(1, early_stopping_threshold=1e9))
    data = [{"x": x, "labels": y} for x, y in batches()]
    evaluated = "no" if ends == "data" else "steps"
    trainer = Trainer(
        Model(),
        TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=8,
            num_train_epochs=2,
            max_steps=-1 if ends == "data" else 54,
            eval_strategy=evaluated,
            save_strategy=evaluated,
            eval_steps=6,
            save_steps=6,
            load_best_model_at_end=evaluated == "steps",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=data,  # pyright: ignore[reportArgumentType]
        eval_dataset=data[:8],  # pyright: ignore[reportArgumentType]
        callbacks=callbacks,
    )
    trainer.train()
    attachment = ours.attachment
    assert attachment is not None
    stats = attachment.stats
    assert (stats["steps"] % 10 > 0, stats["samples_dropped"]) == (True, 0)
    assert stats["samples_counted"] == 8 * stats["steps"]
    assert_close(anchor(swarm), averaged.stepped)
