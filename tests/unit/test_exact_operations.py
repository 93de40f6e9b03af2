"""Free-standing operations keep every bit unless a codec is asked for by name, and who asks for one
hears which share of its values it made 0. A `SoloSwarm` does as a run of one member does.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from atoll.collectives import api
from atoll.collectives.averaging import average
from atoll.collectives.codecs.vanished import vanished_share
from atoll.collectives.errors import ConfigError, LocalProtocolError
from atoll.collectives.swarm import RunSettings
from atoll.node.local import LocalSwarm
from atoll.node.modes.operations.naming import spec_of
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


def test_arguments_that_people_give_are_taken_or_refused_in_words() -> None:
    swarm, never = SoloSwarm(), float("nan")
    for number, wait in enumerate((float("inf"), 1e10, -1, timedelta(seconds=5), None)):
        handle = api.all_reduce(
            swarm,
            torch.ones(4),
            op_id=f"w{number}",
            deadline_s=timedelta(seconds=5),  # type: ignore[arg-type]
        )
        assert handle.wait(wait).status == "committed"  # type: ignore[arg-type]
        averaging = average(swarm, torch.ones(4), op_id=f"a{number}", dims=1)
        assert averaging.wait(wait).status == "committed"  # type: ignore[arg-type]
    for wait in (never, "5"):
        handle = api.all_reduce(swarm, torch.ones(4), op_id=f"odd {wait}")
        with pytest.raises(LocalProtocolError, match="timeout_s is a number of seconds"):
            handle.wait(wait)  # type: ignore[arg-type]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"op_id": 17}, "op_id is a str, not 17"),
        ({"deadline_s": float("inf")}, "deadline_s is inf, at most"),
        ({"deadline_s": never}, "deadline_s is a number of seconds"),
        ({"weight": 0}, "a mean takes a weight of at least 1"),
        ({"swarm": None}, "takes a swarm first, not a NoneType"),
        ({"weight": 2, "op": "sum"}, "sum of weight 2: a sum takes no other than 1"),
        ({"deadline_s": -1}, "deadline_s is -1, at most 1e.09 and at least 0"),
        ({"op_id": ""}, "op_id is of 1 to 64 characters that can be seen, not ''"),
        ({"op_id": "a\nb"}, "op_id is of 1 to 64 characters that can be seen"),
        ({"op_id": "x" * 5000}, r"'x{40}'\.\.\. \(5,000 characters\)"),
        ({"tensor": torch.ones(3).numpy()}, "not a ndarray\n.*torch.from_numpy"),
        ({"tensor": [torch.ones(3)]}, "not a list\n.*by name, as a mapping"),
        ({"tensor": torch.ones(2, 3).t()}, "not contiguous\n.*tensor.contiguous()"),
    ]
    for options, words in refused:
        with pytest.raises(LocalProtocolError, match=words):
            api.all_reduce(
                **{"swarm": swarm, "tensor": torch.ones(4), "op_id": "x", **options}  # type: ignore[arg-type]
            )
    for call in (api.broadcast, api.all_gather, average, api.check_state):
        given: Any = {"w": torch.ones(1)} if call is api.check_state else torch.ones(1)
        more = {"root": "p0"} if call is api.broadcast else {}
        with pytest.raises(LocalProtocolError, match="takes a swarm first"):
            call(None, given, op_id="x", **more)  # type: ignore[arg-type, operator]
