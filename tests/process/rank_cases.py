"""A job of two ranks over gloo: python rank_cases.py STORE RANK plays every case below in both
processes; a failed assertion ends them.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from round_table import RoundTable, TableSwarm
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from atoll.collectives.errors import ConfigError, SwarmClosedError
from atoll.collectives.outcomes import Outcome
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.swarm import RunSettings
from atoll.optim import Attachment, DiLoCo, SoloSwarm, attach
from atoll.optim.model.flat import FlatVector
from atoll.optim.rounds.replica import Replica

H = 3
OUTER = OuterSettings("nesterov", 0.9, 0.6)
SETTINGS = RunSettings(sync_every=H, codec="fp32", outer=OUTER)
ROWS = 4  # of each rank's batch


class Alone(nn.Module):
    """Widths that two ranks cannot halve, one row for two of them, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 5)
        self.last = nn.Linear(5, 1, bias=False)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.second(torch.tanh(self.first(inputs + 0.1 * self.frozen(inputs))))
        return self.last(torch.tanh(hidden))


def net() -> nn.Module:
    torch.manual_seed(3)
    return Alone()


def sharded() -> nn.Module:
    model = net()
    fully_shard(model.first)
    return fully_shard(model)


def data(step: int, rank: int | None) -> tuple[Tensor, Tensor]:
    """The batch of one rank, or of both together."""
    inputs = torch.randn(2 * ROWS, 5, generator=torch.Generator().manual_seed(step))
    part = slice(None) if rank is None else slice(rank * ROWS, (rank + 1) * ROWS)
    return inputs[part], inputs.sin().sum(1, keepdim=True)[part]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    attachment: Attachment,
    steps: range,
    rank: int | None,
) -> None:
    for step in steps:
        inputs, targets = data(step, rank)
        (model(inputs) - targets).square().mean().backward()
        attachment.samples(len(inputs))
        optimizer.step()
        optimizer.zero_grad()


def full(model: nn.Module) -> Tensor:
    """All trained parameters."""
    found = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return torch.cat(
        [
            (each.full_tensor() if isinstance(each, DTensor) else each).detach().reshape(-1)
            for each in found
        ]
    )


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)


def solo(rank: int, settings: RunSettings = SETTINGS) -> SoloSwarm | None:
    return None if rank else SoloSwarm(settings)


def by_one_process(settings: RunSettings, steps: int) -> tuple[Tensor, dict[str, Any]]:
    """The same training by one process with both ranks' batches. It must not see the job: its
    replica is driven by hand.
    """
    model = net()
    optimizer, swarm = adamw(model), SoloSwarm(settings)
    replica = Replica(FlatVector(model, settings), swarm, lambda: 0.0, lambda *_: None, settings)
    replica.enter()
    for step in range(steps):
        inputs, targets = data(step, None)
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        replica.collect(len(inputs))
        if (step + 1) % H == 0:
            list(replica.turn(0.0))
    return full(model), {"round": replica.base.round}


def same_everywhere(values: Tensor) -> None:
    """Both ranks have these bits."""
    theirs = [torch.empty_like(values) for _ in range(2)]
    dist.all_gather(theirs, values)
    assert torch.equal(*theirs)


def equals_one_process(make: Callable[[], nn.Module], rank: int) -> None:
    for overlap in ("none", "late", "eager"):
        settings = RunSettings(sync_every=H, codec="fp32", outer=OUTER, overlap=overlap)  # type: ignore[arg-type]
        heard: list[Outcome] = []
        model = make()
        optimizer = adamw(model)
        attachment = attach(model, optimizer, solo(rank, settings), on_round=heard.append)
        train(model, optimizer, attachment, range(4 * H + 1), rank)
        expected, more = by_one_process(settings, 4 * H + 1)
        mine = full(model)
        same_everywhere(mine)
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)
        assert attachment.round == more["round"] == 4
        assert [outcome.contributors[0].samples for outcome in heard] == [2 * ROWS * H] * 4
        attachment.detach()


def case_ddp(rank: int) -> None:
    equals_one_process(lambda: DistributedDataParallel(net()), rank)


def case_fsdp2(rank: int) -> None:
    equals_one_process(sharded, rank)
    assert [
        each.to_local().shape[0] for each in (sharded().first.weight, sharded().last.weight)
    ] == [[4, 1], [3, 0]][rank]


def case_a_sharded_job_meets_a_peer_of_one_process(rank: int) -> None:
    """Whose layout is that of the unsharded model; the anchor is the weighted mean of both."""
    plain = FlatVector(net(), SETTINGS)
    table = RoundTable(
        ["job", "plain"],
        RunSettings(
            sync_every=H, codec="fp32", outer=OuterSettings("sgd", 1.0, 0.0), deadline_s=0.0
        ),
        auto=False,
    )
    model = sharded()
    optimizer = adamw(model)
    start = full(model)
    attachment = attach(model, optimizer, None if rank else table.member("job"))
    train(model, optimizer, attachment, range(H), rank)
    assert attachment.describe()["last_status"] == "open"
    mine = start - full(model)
    if rank == 0:
        other = table.member("plain")
        other.open(plain.layout, plain.write_to).release()
        other.contribute(samples=8 * ROWS, write=lambda out: out.fill_(0.5))
        table.decide(["job", "plain"])
    attachment.sync()
    assert attachment.round == 1
    weight = 2 * ROWS * H / (2 * ROWS * H + 8 * ROWS)
    torch.testing.assert_close(
        full(model), start - weight * mine - (1 - weight) * 0.5, rtol=1e-5, atol=1e-6
    )
    assert attachment.describe()["last_contributors"] == ["job", "plain"]


def case_the_anchor_is_evaluated_and_gives_way(rank: int) -> None:
    """Also where a forward leaves gathered parameters behind, as the root's does."""
    model = sharded()
    optimizer = adamw(model)
    attachment = attach(model, optimizer, solo(rank))
    train(model, optimizer, attachment, range(H + 1), rank)
    with torch.no_grad():
        live, before = model(torch.ones(2, 5)), full(model)
        with attachment.evaluate_anchor() as view:
            assert view.round == 1
            anchor, plain = full(model), net()
            seen = model(torch.ones(2, 5))
        nn.utils.vector_to_parameters(
            anchor, [each for each in plain.parameters() if each.requires_grad]
        )
        torch.testing.assert_close(seen, plain(torch.ones(2, 5)))
        assert not torch.equal(seen, live)
        assert torch.equal(model(torch.ones(2, 5)), live)
    model.reshard()  # type: ignore[operator]
    assert torch.equal(full(model), before)


def case_one_ranks_nan_is_dropped_by_all(rank: int) -> None:
    model = sharded()
    optimizer = adamw(model)
    attachment = attach(model, optimizer, solo(rank))
    start = full(model)
    train(model, optimizer, attachment, range(H - 1), rank)
    inputs, targets = data(H, rank)
    (model(inputs) - targets).square().mean().backward()
    with torch.no_grad():
        if rank == 1:
            model.first.weight.grad.to_local().fill_(float("nan"))
    attachment.samples(ROWS)
    optimizer.step()
    assert (attachment.round, attachment.stats["samples_dropped"]) == (0, 2 * ROWS * H)
    assert torch.equal(full(model), start)


def case_what_rank_0_meets_all_meet(rank: int) -> None:
    table = RoundTable(["job"], SETTINGS)
    model = DistributedDataParallel(net())
    optimizer = adamw(model)
    attachment = attach(model, optimizer, None if rank else table.member("job"), strict=True)
    train(model, optimizer, attachment, range(H - 1), rank)
    if rank == 0:
        table.lose("job")
    with pytest.raises(SwarmClosedError, match="the node of job is gone"):
        train(model, optimizer, attachment, range(H - 1, H), rank)
    if rank == 0:
        table.find("job")
    train(model, optimizer, attachment, range(H), rank)
    assert attachment.round == 1
    assert attachment.stats["samples_counted"] == 2 * ROWS * 2 * H


def case_a_checkpoint_goes_on_exactly(rank: int) -> None:
    """In the middle of a round, where the run still has the anchor."""
    table = RoundTable(["job"], SETTINGS)
    model = sharded()
    optimizer = adamw(model)
    attachment = attach(model, optimizer, None if rank else table.member("job"))
    train(model, optimizer, attachment, range(H + 1), rank)
    state = attachment.state_dict()
    weights, inner = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    attachment.detach()
    again = sharded()
    other = adamw(again)
    resumed = attach(again, other, None if rank else table.member("job"))
    resumed.load_state_dict(state)
    again.load_state_dict(weights)
    other.load_state_dict(inner)
    train(again, other, resumed, range(H + 1, 2 * H), rank)
    expected, _ = by_one_process(SETTINGS, 2 * H)
    assert resumed.round == 2
    torch.testing.assert_close(full(again), expected, rtol=1e-4, atol=1e-6)
    assert resumed.stats["samples_counted"] == 2 * ROWS * 2 * H


def case_ranks_that_train_models_of_their_own_are_told(rank: int) -> None:
    """Forgotten DistributedDataParallel: rank 0's progress must not go for the samples of all."""
    model = net()
    optimizer = adamw(model)
    attachment = attach(model, optimizer, solo(rank), strict=True)
    train(model, optimizer, attachment, range(H - 1), rank)
    with pytest.raises(ConfigError, match="is not the same at rank 1"):
        train(model, optimizer, attachment, range(H - 1, H), rank)
    assert (attachment.round, attachment.stats["samples_counted"]) == (0, 0)


class Cut(TableSwarm):
    """A member of a run in fragments, of which nothing is asked but how many."""

    fragments = 2

    def fragment_anchor(self, *arguments: Any, **options: Any) -> Any:
        pytest.fail("nothing was to be asked")

    fragment_closing = contribute_fragment = fragment_anchor


def refused(words: str, model: nn.Module, swarm: Any) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        attach(model, None, swarm)
    assert error.value.hint


def case_refusals(rank: int) -> None:
    """The same words at both ranks, and the job goes on."""
    mesh = dist.init_device_mesh("cpu", (2,))
    refused("rank 1 has a swarm of its own", net(), SoloSwarm(SETTINGS))
    refused("NoneType is not a swarm", net(), None)
    tensor_parallel = net()
    tensor_parallel.first.weight = nn.Parameter(
        distribute_tensor(tensor_parallel.first.weight.detach(), mesh, [Shard(0)])
    )
    refused("first.weight is a DTensor of a model without fully_shard", tensor_parallel, solo(rank))
    both = net()
    both.second.weight = nn.Parameter(
        distribute_tensor(both.second.weight.detach(), mesh, [Replicate()])
    )
    fully_shard(both.first)
    refused("second.weight has placements", both, solo(rank))
    whole = FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True)
    refused("the model is in FullyShardedDataParallel", whole, solo(rank))
    refused(
        "rank 1 has other parameters than rank 0", net() if rank else nn.Linear(2, 2), solo(rank)
    )
    averaging = RunSettings(method="gradient_averaging", sync_every=None, target_samples=8)
    refused(
        "gradient averaging, which a job of several",
        DistributedDataParallel(net()),
        solo(rank, averaging),
    )
    model = net()
    with pytest.raises(ConfigError, match="DiLoCo is for a job of one process"):
        DiLoCo(adamw(model).param_groups, adamw(model), swarm=SoloSwarm(SETTINGS), model=model)
    refused("error feedback, which a sharded", sharded(), solo(rank, RunSettings(feedback=True)))
    cut = RoundTable(["job"], RunSettings(fragments=2))
    refused(
        "fragments, which a job of several",
        DistributedDataParallel(net()),
        None if rank else Cut(cut, cut.peers[0]),
    )


CASES = {name: case for name, case in sorted(globals().items()) if name.startswith("case_")}


def main(store: str, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for name, case in CASES.items():
        case(rank)
        print(name, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
