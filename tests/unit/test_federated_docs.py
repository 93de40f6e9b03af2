"""What docs/federated.md and docs/operating/ show can be typed: their Python runs on tiny data,
their tables are a manifest's.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from house import ROOT
from torch import nn
from torch.utils.data import TensorDataset

from atoll.collectives.swarm import RunSettings
from atoll.node.cli.runs import EXAMPLE
from atoll.node.cli.templates import TEMPLATES
from atoll.node.manifest import parse_manifest
from atoll.optim import SoloSwarm, attach

FEDERATED = "".join(
    (ROOT / "docs" / name).read_text(encoding="utf-8")
    for name in ("federated.md", "federated-arrivals.md", "federated-simulation.md")
)
OPERATING = "".join(
    page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "operating").glob("*.md"))
)
TABLES = {"federated", "secure", "privacy", "robust"}


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a document."""
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def snippets() -> list[str]:
    """Tables of a manifest, of which one at least is about members that do not trust each other."""
    return [
        block
        for block in blocks(FEDERATED, "toml") + blocks(OPERATING, "toml")
        if TABLES & tomllib.loads(block).keys()
    ]


def completed(block: str) -> dict[str, Any]:
    """The tables with what the text around them says that they need."""
    tables: dict[str, Any] = {"schema": 1, "name": "x", **tomllib.loads(block)}
    if "privacy" in tables:
        tables["privacy"] = {
            "noise": 4.0,
            "clip": 1.0,
            "delta": 1e-5,
            "stop_at_epsilon": 12.0,
        } | tables["privacy"]
        tables = {"secure": {}, "train": {"rounds": 10}} | tables
    return tables | ({"kind": "federated"} if TABLES - {"robust"} & tables.keys() else {})


def toml(tables: dict[str, Any], path: str = "") -> str:
    """As a file; values are those that JSON and TOML write alike."""
    rows = [
        f"{key} = {json.dumps(value)}"
        for key, value in tables.items()
        if not isinstance(value, dict)
    ]
    rows = [f"[{path}]", *rows] if path else rows
    return "\n".join(
        [
            *rows,
            *(
                toml(value, f"{path}.{key}".lstrip("."))
                for key, value in tables.items()
                if isinstance(value, dict)
            ),
        ]
    )


OF_OTHER_TABLES = (
    *("noise", "threshold", "validators"),
    *("preset", "optimizer", "lr", "momentum", "warmup", "hold"),
)
"""Keys of [privacy], [secure], [btard] and [train.outer], which stand below their own header."""


def test_there_are_some() -> None:
    assert len(snippets()) >= 3


@pytest.mark.parametrize("number", range(len(snippets())))
def test_tables_in_documents_are_a_manifests(number: int) -> None:
    tables = completed(snippets()[number])
    manifest = parse_manifest(toml(tables))
    for name in TABLES & tables.keys():
        for key, value in tables[name].items():
            assert (
                msgspec.json.decode(msgspec.json.encode(getattr(getattr(manifest, name), key)))
                == value
            )


@pytest.mark.parametrize("text", [EXAMPLE, *TEMPLATES.values()], ids=["example", *TEMPLATES])
def test_what_is_commented_out_in_templates_names_settings_that_there_are(text: str) -> None:
    """Every table and key behind a `#` is one of the manifest."""
    manifest = parse_manifest(text)
    rows = re.findall(r"^# (\[[a-z.]+\]|[a-z_]+ = .*)$", text, flags=re.MULTILINE)
    table: Any = manifest
    for row in rows:
        if row.startswith("["):
            assert hasattr(manifest, row[1:-1].split(".")[0]), row
            continue
        key = row.split(" = ")[0]
        found = [
            name
            for name in manifest.__struct_fields__
            if key in getattr(getattr(manifest, name), "__struct_fields__", ())
        ]
        assert found or hasattr(table, key) or key in OF_OTHER_TABLES, row


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Share of the samples whose class the model names."""
    x, y = data.tensors
    return float((model(x).argmax(1) == y).float().mean())


def test_the_sites_and_the_simulations_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = TensorDataset(torch.eye(4)[torch.arange(80) % 4], torch.arange(80) % 4)
    (tmp_path / "site.py").write_text(
        "from data_here import *\n"
        + next(block for block in blocks(FEDERATED, "python") if "def make" in block)
    )
    (tmp_path / "data_here.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n"
        "def read_from_our_archive():\n    return torch.zeros(60, 4), torch.zeros(60, dtype=torch.int64)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ATOLL_DATA__FACTORY", f"{tmp_path}/site.py:make")
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    torch.manual_seed(0)
    names: dict[str, Any] = {
        "DataLoader": torch.utils.data.DataLoader,
        "make_model": lambda: nn.Linear(4, 4),
    }
    names |= dict(zip(("x", "y"), data.tensors, strict=True)) | dict(
        zip(("test_x", "test_y"), data.tensors, strict=True)
    )
    swarm, model = SoloSwarm(RunSettings(sync_every=1)), nn.Linear(4, 4)
    attachment = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), swarm)
    names |= {
        "swarm": swarm,
        "model": model,
        "attachment": attachment,
        "loader": torch.utils.data.DataLoader(data, batch_size=20),
    }
    names |= {
        "loss_of": lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        "accuracy": lambda model: accuracy(model, data),
    }
    ran = 0
    for block in blocks(FEDERATED, "python"):
        if "def make" not in block:
            exec(compile(block.replace("rounds=50", "rounds=2"), "federated.md", "exec"), names)
            ran += 1
    assert ran >= 3
    assert accuracy(names["own"], data) > accuracy(model, data)
    assert len(next(iter(names["loader"]))[0]) == 20
    assert names["result"].points[-1].accuracy > 0
