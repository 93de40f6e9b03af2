"""Free-standing operations keep every bit unless a codec is asked for by name, and who asks for one
hears which share of its values it made 0. A `SoloSwarm` does as a run of one member does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from atoll.collectives import api
from atoll.collectives.averaging import average
from atoll.collectives.codecs.vanished import vanished_share
from atoll.collectives.errors import ConfigError
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.session.naming import spec_of
from atoll.optim.solo import SoloSwarm

MIXED = [0.62, 851.0, 1000.0, 2_048_000.0]
"""A loss, correct answers, samples and tokens, as evaluations add them up."""


def test_a_call_without_a_codec_keeps_every_bit_whatever_the_runs_codec() -> None:
    def script(member: Any) -> list[list[float]]:
        api.enter(member)
        while len(member.members()) < 2:
            member.sleep(0.1)
        found = list[list[float]]()
        for op in ("sum", "mean", "max"):
            flat = torch.tensor(MIXED)
            outcome = api.all_reduce(member, flat, op_id=op, op=op, everyone=True).wait()
            assert (outcome.status, outcome.vanished) == ("committed", 0.0)
            found.append(flat.tolist())
        flat = torch.tensor(MIXED)
        average(member, flat, op_id="average", everyone=True).wait()
        found.append(flat.tolist())
        return found

    mine = torch.tensor(MIXED)
    expected = [(mine + mine).tolist(), mine.tolist(), mine.tolist(), mine.tolist()]
    played = LocalSwarm(2, settings=RunSettings(codec="int8"), latency_s=0.01).run(script)
    assert played == [expected] * 2


def test_a_codec_of_ones_choice_tells_which_share_it_made_0(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "_told", set[str]())
    for turn, swarm in enumerate((SoloSwarm(), SoloSwarm(RunSettings(codec="int8")))):
        flat = torch.tensor(MIXED)
        outcome = api.all_reduce(swarm, flat, op_id="sums", op="sum", codec="int8").wait()
        assert (outcome.status, outcome.vanished) == ("committed", 0.75)
        assert flat.tolist() == [0.0, 0.0, 0.0, MIXED[3]]
        scattered = api.reduce_scatter(swarm, torch.tensor(MIXED), op_id="part", codec="int8")
        assert scattered.wait().outcome.vanished == 0.75
        averaged = average(swarm, torch.tensor(MIXED), op_id="average", dims=1, codec="int8").wait()
        assert averaged.steps[0].vanished == 0.75
        assert len(caplog.messages) == 1, turn  # once a codec, not once a call
    assert "75 % of this member's values 0" in caplog.messages[0]
    normal = torch.randn(300_000, generator=torch.Generator().manual_seed(0))
    assert 0.001 < vanished_share(normal, "int8") < 0.02
    assert vanished_share(normal, "bf16") == 0.0
    assert vanished_share(normal, "sparse64") > 0.9


@pytest.mark.parametrize("codec", ["", "fp32", "bf16", "int8", "int4", "stat2", "sparse64"])
def test_a_swarm_of_one_gives_the_bits_of_a_run_of_one(codec: str) -> None:
    values = torch.randn(40_003, generator=torch.Generator().manual_seed(1))

    def script(member: Any) -> list[int]:
        if not isinstance(member, SoloSwarm):
            api.enter(member)
        flat = values.clone()
        outcome = api.all_reduce(member, flat, op_id="op", codec=codec, op="sum").wait()
        assert outcome.status == "committed"
        return flat.view(torch.int32).tolist()

    alone = script(SoloSwarm())
    assert LocalSwarm(1).run(script) == [alone]
    assert (alone == values.view(torch.int32).tolist()) is (codec in ("", "fp32"))


@pytest.mark.parametrize("codec", ["int8", "bf16", "bits"])
def test_a_maximum_takes_no_codec(codec: str) -> None:
    call = api.call_of("op", "max", 5.0, False, codec=codec)
    with pytest.raises(ConfigError, match="codec"):
        spec_of(call, 8)
    with pytest.raises(ConfigError, match="codec"):
        api.all_reduce(SoloSwarm(), torch.ones(8), op_id="op", op="max", codec=codec)
