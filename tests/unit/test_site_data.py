"""A site's own data: by a function in a file of this machine, named by this machine's settings
only.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from atoll.collectives.errors import ConfigError
from atoll.node import SiteData, site_data
from atoll.node.home.config import set_value
from atoll.node.home.own_data import factory_of
from atoll.node.home.paths import find_paths
from atoll.node.manifest import parse_manifest
from atoll.node.recipes.train import load_data
from atoll.optim.data.declared import declared

SITE = """
from torch.utils.data import IterableDataset, TensorDataset
import torch

class Lines(list):
    pass

class Stream(IterableDataset):
    def __iter__(self):
        return iter(())

def make():
    return TensorDataset(torch.arange(6).view(3, 2))

def notes():
    return [f"note {i}: " + "text " * 200 for i in range(200)]

def numbers():
    return [1, 2, 3]

def stream():
    return Stream()

def none():
    return None

def empty():
    return []

def broken():
    raise KeyError("the database is away")

number = 5
"""
RUN = 'schema = 1\nname = "notes"\n[model]\nconfig = { context = 16 }\n[data]\nsource = "local"\n[train]\nsync_every = 5\n'


@pytest.fixture
def folder(atoll_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site.py").write_text(SITE)
    return tmp_path


def length(found: object) -> int:
    assert isinstance(found, SiteData)
    return len(found)


def test_a_factory_by_argument_environment_and_settings(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = site_data("site.py:make")
    assert isinstance(found, SiteData)
    assert [sample[0].tolist() for sample in (found[0], found[2])] == [[0, 1], [4, 5]]
    (folder / "atoll.toml").write_text('[data]\nfactory = "site.py:make"\n')
    monkeypatch.setenv("ATOLL_CONFIG", "atoll.toml")
    assert length(site_data()) == 3
    monkeypatch.setenv("ATOLL_DATA__FACTORY", f"{folder}/site.py:notes")  # before the file
    assert length(site_data()) == 200
    monkeypatch.chdir("/")
    monkeypatch.delenv("ATOLL_CONFIG")
    monkeypatch.delenv("ATOLL_DATA__FACTORY")
    paths = find_paths()
    set_value(paths, "data.factory", "mine.py:make")
    assert (
        factory_of(paths) == f"{paths.config_file.parent}/mine.py:make"
    )  # relative to the file that says so
    set_value(paths, "data.factory", "")
    assert factory_of(paths) == ""


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("none.py:make", "there is no file none.py"),
        ("site.py:other", "defines nothing named 'other'"),
        ("site.py:number", "defines a value of type int named 'number'"),
        ("site.py:none", "returns a NoneType"),
        ("site.py:stream", "returns a Stream"),
        ("site.py:empty", "no samples"),
        ("wrong.py:make", "cannot read wrong.py"),
        ("site.py", "is not FILE.py:NAME"),
        ("https://example.org/site.py:make", "is not FILE.py:NAME"),
        ("git+ssh://example.org/site.py:make", "is not FILE.py:NAME"),
        (None, "settings name no data"),
    ],
)
def test_what_is_no_data_is_refused_with_a_way_out(
    folder: Path, where: str | None, words: str
) -> None:
    (folder / "wrong.py").write_text("def make(:\n")
    with pytest.raises(ConfigError) as caught:
        site_data(where)
    assert words in caught.value.message
    assert caught.value.key == "data.factory"
    assert ".py:" in caught.value.hint or caught.value.hint.startswith("Look at what it reads.")


def test_what_the_factory_itself_raises_is_the_sites_to_see(folder: Path) -> None:
    with pytest.raises(KeyError, match="the database is away"):
        site_data("site.py:broken")


def test_a_run_cannot_name_a_file_of_its_members(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_manifest(RUN.replace('"local"', '"local"\nfactory = "site.py:make"'))
    assert caught.value.key == "$.data.factory"
    assert "atoll config set data.factory" in caught.value.hint


def test_the_built_in_recipe_trains_on_the_records_of_a_site(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = parse_manifest(RUN)
    with pytest.raises(ConfigError, match="every member's own text"):
        load_data(manifest, None)
    monkeypatch.setenv("ATOLL_DATA__FACTORY", "site.py:notes")
    corpus = load_data(manifest, None)
    assert bytes(corpus.training[:11].tolist()) == b"note 0: tex"
    assert len(corpus.training) > 8 * len(corpus.held_out)
    assert (
        load_data(parse_manifest(RUN.replace('"local"', '"builtin:stdlib-text"')), None).name
        == "builtin:stdlib-text"
    )
    with pytest.raises(ConfigError, match=r"sample 0 of site.py:numbers is of type int, not text"):
        load_data(manifest, "site.py:numbers")


ROWS = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from torch.utils.data import Dataset, TensorDataset

@dataclass
class Row:
    value: float

class Own(Dataset):
    def __init__(self):
        self.rows = [Row(float(index)) for index in range(8)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index].value

def own():
    return Own()

def one():
    return TensorDataset(torch.zeros(1, 2), torch.zeros(1))

def holes():
    return TensorDataset(torch.tensor([[0.0, float("nan")], [1.0, 2.0]]), torch.tensor([1, 1]))
"""


def test_a_sites_classes_are_found_by_spawned_workers(folder: Path) -> None:
    """Dataclasses under postponed annotations look their module up; workers import it by name."""
    (folder / "site.py").write_text(ROWS)
    loader = DataLoader(
        site_data("site.py:own"), batch_size=4, num_workers=1, multiprocessing_context="spawn"
    )
    assert [batch.tolist() for batch in loader] == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]


def test_a_data_set_says_how_many_examples_the_site_has(folder: Path) -> None:
    (folder / "site.py").write_text(ROWS)
    site_data("site.py:own")
    assert declared() == 8


def test_one_sample_is_named(folder: Path) -> None:
    (folder / "site.py").write_text(ROWS)
    with pytest.raises(ConfigError, match="a data set of one sample") as refused:
        site_data("site.py:one")
    assert "together with another" in refused.value.hint


def test_data_that_will_not_train_as_meant_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "site.py").write_text(ROWS)
    site_data("site.py:holes")
    told = capsys.readouterr().err
    assert "1 of 2 samples hold NaN or infinity (part 0 of a sample)" in told
    assert "all 2 samples are of one class (1)" in told


def test_names_that_hold_no_path_are_no_modules() -> None:
    for name in ("site_zz", "site_2f", "site_" + b"/nothing/there.py".hex()):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"atoll.node.home.site_files.{name}")
