"""Two real nodes whose scripts read the same data in the same order: both are told, with the cure; and
those that share out one data set, of the same seed, are not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import pytest
from cli_kit import LISTEN, SCRIPT, atoll, nothing_stays
from own_scripts_kit import RUN, plain, until

pytestmark = pytest.mark.slow
PLAIN = SCRIPT.replace("loss.backward();", "import time; time.sleep(0.1); loss.backward();")
# A batch follows from the round alone, so that members that make unlike numbers of steps a round
# read alike, too.
ALIKE = PLAIN.replace(
    "x = torch.randn(8, 4)\n",
    "x = torch.randn(8, 4, generator=torch.Generator().manual_seed(attachment.round))\n",
)
# As in Trainer and Lightning, each batch is told of.
TOLD = ALIKE.replace(
    "        loss = ", "        attachment.first_batches.saw(x, attachment.round)\n        loss = "
)
SHARED = PLAIN.replace(
    "    while not attachment.done:\n        x = torch.randn(8, 4)\n",
    "    data = torch.utils.data.DataLoader(torch.randn(4096, 4), batch_size=8, shuffle=True)\n"
    "    data = swarm.shard(data)\n"
    "    for x in (x for _ in iter(int, 1) for x in data):\n"
    "        if attachment.done: break\n",
)
ROUNDS = 16  # twice as many as both were named in


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    with nothing_stays():
        yield


def verdicts(home: Path) -> dict[str, str]:
    """Of V17: about whom, and what is said."""
    standing = [each for run in atoll(home, "status")["runs"] for each in run["verdicts"]]
    return {each["subject"]: each["said"] for each in standing if each["code"] == "V17"}


@contextmanager
def training(folder: Path, script: str) -> Iterator[tuple[list[Path], list[Popen[str]]]]:
    """Two nodes in one run and a script at each, which differ in nothing but the invite."""
    homes, recipe = [folder / "one", folder / "two"], folder / "run.toml"
    recipe.write_text(RUN.replace("[train]\n", "[train]\nstart_with = 2\n"))
    (folder / "same.py").write_text(script)
    for home in homes:
        atoll(home, "up", "--background", *LISTEN)
    try:
        invite = atoll(homes[0], "new", str(recipe))["invite"]
        joins = script.replace("join()", f"join({invite!r})")
        (folder / "joins.py").write_text(joins)
        with plain(homes[0], "same") as first, plain(homes[1], "joins") as second:
            yield homes, [first, second]
    finally:
        for home in homes:
            atoll(home, "down", "--scripts")


@pytest.mark.parametrize("script", [TOLD, ALIKE], ids=["told", "plain"])
def test_both_are_named_to_one_another(tmp_path: Path, script: str) -> None:
    """In a plain loop, of which nobody is told what it reads, by its gradients."""
    assert ("first_batches" in script) == (script is TOLD)
    with training(tmp_path, script) as (homes, scripts):
        peers = [atoll(home, "id")["peer"] for home in homes]
        found = dict[int, dict[str, str]]()
        ends = time.monotonic() + 300
        while len(found) < 2:
            assert time.monotonic() < ends, found
            found |= {at: said for at, home in enumerate(homes) if (said := verdicts(home))}
        for at, process in enumerate(scripts):
            assert found[at].keys() == {peers[1 - at]}
            assert "3 rounds running were equal" in found[at][peers[1 - at]]
            until(process, "reads the same data in the same order as this member")


def test_members_that_share_out_one_data_set_are_not_named(tmp_path: Path) -> None:
    """Loaders and seeds are the same; the run deals the samples out."""
    assert "swarm.shard" in SHARED
    with training(tmp_path, SHARED) as (homes, scripts):
        for process in scripts:
            said = until(process, f"round {ROUNDS}: 2 contributed, 80 samples here")
            assert "same data" not in said
        assert [verdicts(home) for home in homes] == [{}, {}]
