"""On a GPU: steps between rounds never wait for the device, and values cross through page-locked
memory.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from atoll.collectives.errors import ConfigError
from atoll.collectives.swarm import OuterSettings, RunSettings
from atoll.optim import SoloSwarm, attach

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

H = 6
SETTINGS = RunSettings(sync_every=H, codec="fp32", outer=OuterSettings("nesterov", 0.9, 0.6))


def test_no_step_between_rounds_waits_for_the_device() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    attachment = attach(model, optimizer, SoloSwarm(SETTINGS))
    inputs, found_inf = torch.randn(32, 64, device="cuda"), torch.zeros(1, device="cuda")
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]  # as GradScaler leaves it at a fused optimizer
    for step in range(3 * H):
        if step % H in (0, H - 1):
            torch.cuda.set_sync_debug_mode(
                "default"
            )  # a round ends with the last step; the first makes the optimizer's state
        else:
            torch.cuda.set_sync_debug_mode("error")
        loss = model(inputs).square().mean()
        loss.backward()
        attachment.log(loss=loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    assert attachment.round == 3


def test_values_cross_through_page_locked_memory() -> None:
    model = nn.Linear(512, 512).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment = attach(model, optimizer, SoloSwarm(SETTINGS))
    model(torch.ones(4, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        attachment.sync()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.name.startswith("Memcpy DtoH")]
    assert any("Pinned" in name for name in names)


@pytest.mark.filterwarnings("ignore")  # the graph is empty
def test_a_step_captured_into_a_graph_is_refused() -> None:
    """Plain SGD can be captured without being capturable; replayed it would train, and never be
    counted.
    """
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer, SoloSwarm(SETTINGS))
    model(torch.ones(4, 8, device="cuda")).square().mean().backward()
    optimizer.step()
    torch.cuda.synchronize()
    with (
        pytest.raises(ConfigError, match="captured into a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()
