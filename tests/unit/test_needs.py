"""What a run needs of a machine, and what is said where the machine has less."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from atoll.node.cli import needs, run
from atoll.node.cli.needs import FreeHere, Needs, machine_lines, needs_lines, needs_of, shortages
from atoll.node.manifest import parse_manifest

GIB = 1 << 30
NEEDS = Needs(host=8 * GIB, host_peak=18 * GIB, gpu=16 * GIB, disk=45 * GIB, fetched=8 * GIB)


def test_what_is_short_is_said_with_both_figures() -> None:
    assert shortages(NEEDS, FreeHere(18 * GIB, 16 * GIB, 45 * GIB)) == []
    assert shortages(NEEDS, FreeHere(None, None, None)) == []
    assert machine_lines(NEEDS, FreeHere(10 * GIB, 8 * GIB, 20 * GIB)) == [
        "WARNING  this machine has 10.0 GiB of host memory free, and the run needs about 18.0 GiB "
        "at the peak of a round",
        "WARNING  this machine has 8.0 GiB of GPU memory free, and the run needs about 16.0 GiB "
        "without activations",
        "WARNING  this machine has 20.0 GiB of disk free, and the run needs about 45.0 GiB at most",
    ]
    assert machine_lines(None, FreeHere(1, 1, 1)) == []


def test_lines_for_people_name_the_rate_of_a_join() -> None:
    assert needs_lines(NEEDS, 1e7)[-1] == "joining  fetches 8.0 GiB: 14 min 18 s at 80 Mbit/s"
    assert needs_lines(NEEDS)[-1] == "joining  fetches 8.0 GiB: 11 min 27 s at 100 Mbit/s"
    assert [line.split()[0] for line in needs_lines(NEEDS)] == ["memory", "gpu", "disk", "joining"]


@pytest.mark.parametrize(
    ("more", "between", "peak", "gpu", "fetched"),
    [
        ('[exchange]\ncodec = "fp32"\n', 8, 20, 16, 8),
        ('[exchange]\ncodec = "int4"\n', 8, 16 + 1 / 2 + 2 / 64, 16, 8),
        (
            '[exchange]\ncodec = "fp32"\n[train.outer]\npreset = "published"\nmomentum_dtype = "bf16"\n',
            6,
            18,
            16,
            6,
        ),
        ('[exchange]\ncodec = "fp32"\n[train.inner]\noptimizer = "sgd"\n', 8, 20, 8, 8),
        ('[exchange]\ncodec = "stat2"\n', 12, 20 + 1 / 2 + 2 / 64, 16, 8),
        ('[exchange]\ncodec = "fp32"\n[train]\noverlap = "eager"\nsync_every = 5\n', 20, 32, 16, 8),
    ],
)
def test_bytes_a_parameter(
    more: str, between: float, peak: float, gpu: float, fetched: float
) -> None:
    found = parse_manifest(f'schema = 1\nname = "x"\n[model]\nentry = "builtin:gpt"\n{more}')
    needed, size = needs_of(found), found.parameters
    assert needed is not None
    assert size is not None
    assert needed.host == between * size
    assert needed.host_peak == pytest.approx(peak * size, rel=0.01)
    assert (needed.gpu, needed.fetched) == (gpu * size, fetched * size)
    assert needs_of(parse_manifest('schema = 1\nname = "x"\n[model]\nentry = "local:x"\n')) is None


def test_disk_follows_checkpoints_and_kept_contributions() -> None:
    def disk(more: str) -> float:
        text = f'schema = 1\nname = "x"\n[model]\nentry = "local:x"\n[exchange]\ncodec = "fp32"\n{more}'
        found = needs_of(parse_manifest(text), 1000)
        assert found is not None
        return found.disk / 1000

    assert disk("") == 3 * 8 + 21 * 4
    assert disk("[checkpoint]\nevery = 2\n") == 3 * 8 + 5 * 4
    assert disk("[checkpoint]\nevery = 1000\n") == 3 * 8 + 33 * 4
    assert disk("[audit]\nkeep_contributions = 3\n") == 3 * 8 + 24 * 4


@pytest.mark.parametrize("more", ["codec = 'int8_dither'", "codec = 'stat2'", "error = 0.05"])
def test_small_tensors_in_fp32_are_counted(more: str) -> None:
    def disk(exact: str) -> int:
        text = f'schema = 1\nname = "x"\n[model]\nentry = "local:x"\n[exchange]\n{more}\n{exact}\n'
        found = needs_of(parse_manifest(text), 10**9)
        assert found is not None
        return found.disk

    results = disk("exact = false") - 3 * 8 * 10**9
    assert 1.01 * results < disk("") - 3 * 8 * 10**9 < 1.035 * results


def test_what_a_machine_has_is_asked_of_the_kernel_and_of_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 16 kB\nMemAvailable:    12 kB\n")
    assert needs._host(tmp_path / "meminfo") == 12 * 1024
    assert needs._host(tmp_path / "none") is None
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert needs._gpus() == ()
    for told, expected in (
        ("81000\\n40000\\n", (81000 << 20, 40000 << 20)),
        ("no devices\\n", ()),
    ):
        tool.write_text(f"#!{sys.executable}\nprint('{told}', end='')\n")
        tool.chmod(0o700)
        assert needs._gpus() == expected
        here = needs.this_machine(tmp_path)
        assert (here.gpu, here.cards) == (max(expected, default=None), expected)
    assert needs.this_machine(tmp_path / "not" / "yet").disk == pytest.approx(
        shutil.disk_usage(tmp_path).free, rel=0.2
    )


def test_validate_and_plan_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'schema = 1\nname = "x"\n[model]\nentry = "local:x"\nparameters = 1_000_000_000_000\n'
        '[train]\nsync_every = 10\n[exchange]\ncodec = "int8"\n'
    )

    def say(*arguments: str) -> str:
        assert run(["--home", str(tmp_path / "home"), *arguments]) == 0
        return capsys.readouterr().out

    told = json.loads(say("validate", str(file), "--json"))
    assert (told["host_bytes"], told["join_bytes"]) == (8 * 10**12, 8 * 10**12)
    assert told["join_s"] == 640_000.0
    assert set(told["machine"]) == {"host_bytes", "gpu_bytes", "disk_bytes"}
    assert "WARNING  this machine has" in say("validate", str(file))
    planned = json.loads(
        say(
            "plan",
            str(file),
            "--step-ms",
            "100",
            "--up",
            "20Mbit/s",
            "--down",
            "40Mbit/s",
            "--json",
        )
    )
    # four peers: the others' uplinks together bring more than one's downlink
    assert planned["needs"]["join_s"] == pytest.approx(8e12 / 5e6)
    assert planned["short_of"]
    assert "joining  fetches" in say(
        "plan", str(file), "--step-ms", "100", "--parameters", "1000000"
    )
    small = say("plan", str(file), "--step-ms", "100", "--parameters", "1000000", "--json")
    assert json.loads(small)["needs"]["join_bytes"] == 8_000_000  # of the size that is planned for


def test_where_one_machine_is_sooner_nothing_is_proposed_to_join(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'schema = 1\nname = "x"\n[model]\nentry = "local:x"\nparameters = 124_000_000\n'
    )
    links = ["--peers", "3", "--up", "2Mbit/s", "--down", "16Mbit/s"]
    assert run(["--home", str(tmp_path), "plan", str(file), "--step-ms", "300", *links]) == 0
    said = capsys.readouterr().out
    assert said.startswith("train alone, on p0: without a run, and without atoll\n")
    assert "[train]" not in said
    assert "joining" not in said
    assert "all together" in said
