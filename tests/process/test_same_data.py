"""Two real nodes whose scripts read the same data in the same order: both are told, with the cure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_kit import LISTEN, SCRIPT, atoll, nothing_stays
from own_scripts_kit import RUN, plain, until

pytestmark = pytest.mark.slow
PLAIN = SCRIPT.replace("loss.backward();", "import time; time.sleep(0.1); loss.backward();")
# As in Trainer and Lightning, each batch is told of; it follows from the round alone, so that
# members that make unlike numbers of steps a round read alike, too.
TOLD = PLAIN.replace(
    "x = torch.randn(8, 4)\n",
    "x = torch.randn(8, 4, generator=torch.Generator().manual_seed(attachment.round))\n"
    "        attachment.first_batches.saw(x, attachment.round)\n",
)


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    with nothing_stays():
        yield


def verdicts(home: Path) -> dict[str, str]:
    """Of V17: about whom, and what is said."""
    standing = [each for run in atoll(home, "status")["runs"] for each in run["verdicts"]]
    return {each["subject"]: each["said"] for each in standing if each["code"] == "V17"}


@pytest.mark.parametrize("script", [TOLD, PLAIN], ids=["told", "plain"])
def test_both_are_named_to_one_another(tmp_path: Path, script: str) -> None:
    """In a plain loop, of which nobody is told what it reads, by its gradients: both scripts set
    one seed, as they are copies of each other.
    """
    one, two, recipe = tmp_path / "one", tmp_path / "two", tmp_path / "run.toml"
    recipe.write_text(RUN.replace("[train]\n", "[train]\nstart_with = 2\n"))
    (tmp_path / "same.py").write_text(script)
    assert ("first_batches" in script) == (script is TOLD)
    homes = (one, two)
    for home in homes:
        atoll(home, "up", "--background", *LISTEN)
    try:
        invite = atoll(one, "new", str(recipe))["invite"]
        joins = script.replace("join()", f"join({invite!r})")
        (tmp_path / "joins.py").write_text(joins)
        peers = [atoll(home, "id")["peer"] for home in homes]
        with plain(one, "same") as first, plain(two, "joins") as second:
            found = dict[int, dict[str, str]]()
            ends = time.monotonic() + 300
            while len(found) < 2:
                assert time.monotonic() < ends, found
                found |= {at: said for at, home in enumerate(homes) if (said := verdicts(home))}
            for at, process in enumerate((first, second)):
                assert found[at].keys() == {peers[1 - at]}
                assert "3 rounds running were equal" in found[at][peers[1 - at]]
                until(process, "reads the same data in the same order as this member")
    finally:
        for home in homes:
            atoll(home, "down", "--scripts")
