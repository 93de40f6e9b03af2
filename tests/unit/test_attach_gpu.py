"""On a GPU: steps between rounds never wait for the device, and values cross through page-locked
memory.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from atoll.collectives.errors import ConfigError
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.script_swarm import Swarm
from atoll.collectives.swarm import RunSettings
from atoll.node.simulation.local_member import LocalMember
from atoll.node.simulation.local_swarm import LocalSwarm
from atoll.optim import SoloSwarm, attach

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# what contributions may hold: outliers, both zeros and denormals
SPECIAL = [0.0, -0.0, 1e-42, -1e-40, 1e-31, 6.1e-5, 100.0, -2.5]

H = 6
SETTINGS = RunSettings(sync_every=H, codec="fp32", outer=OuterSettings("nesterov", 0.9, 0.6))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_step_between_rounds_waits_for_the_device() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    attachment = attach(model, optimizer, SoloSwarm(SETTINGS))
    inputs, found_inf = torch.randn(32, 64, device="cuda"), torch.zeros((), device="cuda")
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


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
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


def anchors(devices: list[str], settings: RunSettings, dtype: torch.dtype) -> dict[int, str]:
    """The digest of each round's anchor, in a run whose members have their models on these
    devices."""
    digests: dict[int, dict[int, str]] = {}

    def script(swarm: Swarm) -> None:
        assert isinstance(swarm, LocalMember)
        device, random = devices[swarm.index], torch.Generator().manual_seed(swarm.index)
        model = nn.Sequential(nn.Linear(300, 301), nn.BatchNorm1d(301), nn.Linear(301, 5))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=random))
        model.to(device, dtype)
        # a power of two, so that a product with it is exact, fused or not
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        sync = attach(model, optimizer, swarm, batch_size=8, clock=swarm.clock)
        mine = digests.setdefault(swarm.index, {})
        while not sync.done:
            for parameter in model.parameters():
                grad = torch.randn(parameter.shape, generator=random)
                grad.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)[: grad.numel()]
                parameter.grad = grad.to(device, dtype)
            before = sync.round
            optimizer.step()
            if sync.round != before:
                with sync.evaluate_anchor() as view:
                    mine[view.round] = view.digest
            swarm.sleep(0.1)

    LocalSwarm(len(devices), settings=settings).run(script)
    assert len(digests[1]) >= 4  # of which it made each the same as the founder
    assert digests[1].items() <= digests[0].items()
    return digests[0]


@pytest.mark.parametrize(
    "codec", ["fp32", "bf16", "int8_dither", "int8", "int4", "stat2", "sparse32"]
)
@pytest.mark.parametrize("overlap", ["none", "late", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_on_a_gpu_makes_the_anchors_of_one_on_the_cpu(
    codec: str, overlap: str, dtype: torch.dtype
) -> None:
    settings = RunSettings(
        sync_every=3,
        rounds=6,
        codec=codec,
        feedback=True,
        exact=False,  # else all of so small a model would be fp32
        overlap=overlap,  # type: ignore[arg-type]
        outer=OuterSettings("nesterov", 0.9, 0.6),
    )
    expected = anchors(["cpu", "cpu"], settings, dtype)
    assert len(set(expected.values())) >= 4
    assert anchors(["cuda", "cpu"], settings, dtype) == expected
    assert anchors(["cuda", "cuda"], settings, dtype) == expected
