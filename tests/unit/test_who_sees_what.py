"""What `atoll validate --explain` says of who can see what, for every combination that a manifest
can ask for: word for word.

The words are in `who_sees_what.txt`. To change them: python tests/unit/test_who_sees_what.py >
tests/unit/who_sees_what.txt, and read what changed.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from atoll.collectives.errors import ConfigError
from atoll.node.cli.costs import describe_lines
from atoll.node.manifest import parse_manifest
from atoll.node.manifest.federated import (
    noise_text,
    privacy_lines,
    site_lines,
    too_few_sites,
)
from atoll.optim.federated.methods import ARRIVING

GOLDEN = Path(__file__).with_name("who_sees_what.txt")
TOPOLOGIES = ("serverless", "coordinator")
SECURE = {
    "members see contributions": "",
    "masked": "[secure]\n",
    "masked, weighted": "[secure]\nmax_weight = 1000\n",
    "masked, in buckets": '[robust]\nrule = "median"\nf = 1\n[secure]\nbuckets = 4\n',
}
METRICS = {"": "", "means of metrics": 'metrics = ["loss", "accuracy"]\n'}
NOISE = "[privacy]\nnoise = 5.0\nclip = 1.0\ndelta = 1e-5\nstop_at_epsilon = 12\n"
PRIVACY = {"": "", "private": NOISE, "private, bound follows": NOISE + "quantile = 0.5\n"}


def combinations() -> dict[str, str]:
    """The manifest of every combination, by its name; also of those that are refused."""
    found = dict[str, str]()
    for topology, (secure, tables), (metrics, names), (privacy, noise) in product(
        TOPOLOGIES, SECURE.items(), METRICS.items(), PRIVACY.items()
    ):
        if names and not tables:
            continue  # the key is one of [secure]
        name = ", ".join(part for part in (topology, secure, metrics, privacy) if part)
        head = f'schema = 1\nname = "x"\nkind = "federated"\n[train]\nrounds = 50\n[federated]\ntopology = "{topology}"\n'
        found[name] = head + tables + names + noise
    for topology, method in product(TOPOLOGIES, ARRIVING):
        text = f'schema = 1\nname = "x"\nkind = "federated"\n[federated]\nmethod = "{method}"\ntopology = "{topology}"\n'
        found[f"{topology}, {method}"] = text
    found["serverless, evaluated"] = 'schema = 1\nname = "x"\nkind = "federated"\n[evaluate]\n'
    return found


def explained() -> str:
    """All of them."""
    told: list[str] = []
    for name, text in combinations().items():
        try:
            lines = privacy_lines(parse_manifest(text))
        except ConfigError as error:
            lines = [f"refused: {error.key}: {error.why} {error.hint}"]
        told += [f"== {name}", *lines, ""]
    return "\n".join(told)


def test_the_words_are_those_that_were_read() -> None:
    assert explained() == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", combinations())
def test_the_words_say_what_is_so(name: str) -> None:
    """Of each combination that there is: who sees a contribution, a metric, and what bounds the
    rest.
    """
    try:
        told = " ".join(privacy_lines(parse_manifest(combinations()[name])))
    except ConfigError:
        assert "private" in name or "in buckets, means" in name
        assert any(
            part in name
            for part in (
                "members see contributions",
                "weighted",
                "means of metrics",
                "buckets, private, bound follows",
            )
        )
        return
    assert ("nobody sees your update" in told) == ("masked" in name)
    assert ("outvotes" in told) == ("in buckets" in name)
    assert ("coordinator" in told) == ("coordinator" in name)
    assert ("of loss, accuracy everybody sees the mean" in told) == ("means of metrics" in name)
    assert ("spends epsilon" in told) == ("private" in name)
    assert ("there is no [privacy]" in told) == ("masked" in name and "private" not in name)
    assert "no sample of them" in told
    assert "in the DHT" in told
    assert ("of your update alone" in told) == name.endswith(ARRIVING)
    assert ("how long a step takes" in told) == name.endswith("fedcompass")


@pytest.mark.parametrize("secure", ["", "[secure]\n"])
def test_lanes_without_encryption_are_told(secure: str) -> None:
    """Also of a run that is not federated; and nothing is told there that is not so."""
    plain = f'schema = 1\nname = "x"\nkind = "federated"\n[lanes]\nencrypt = false\n{secure}'
    told = " ".join(privacy_lines(parse_manifest(plain)))
    assert (
        f"exchange in bulk, that is {'masked updates, their sums' if secure else 'updates'} and the model"
        in told
    )
    assert "nobody outside the run can read what travels" not in told
    (line,) = [
        line
        for line in describe_lines(
            parse_manifest(plain.replace("federated", "swarm").replace(secure or "-", ""))
        )
        if "privacy" in line
    ]
    assert "in bulk ([lanes] encrypt = false)" in line
    assert "are encrypted" not in line


def test_whose_two_thirds_a_sum_is_of() -> None:
    text = 'schema = 1\nname = "x"\nkind = "federated"\n[secure]\n[federated]\n'
    assert "more than two thirds of the members" in privacy_lines(parse_manifest(text))[0]
    assert (
        "more than two thirds of those drawn for the round"
        in privacy_lines(parse_manifest(text + "sample = 5\n"))[0]
    )


def test_how_large_the_noise_is_is_told() -> None:
    """The deviation of the mean: noise times clip on the sum of those that are sure to add theirs,
    more where more do, over how many there are.
    """
    text = (
        'schema = 1\nname = "x"\nkind = "federated"\n[model.config]\nwidth = 8\nlayers = 1\nheads = 1\n[train]\nrounds = 50\n[secure]\n'
        + NOISE
    )
    told = noise_text(parse_manifest(text), 30)
    parameters, deviation = parse_manifest(text).parameters, 5 * (30 / (21 - 1)) ** 0.5 / 30
    assert parameters is not None
    assert told is not None
    assert told.startswith(
        f"about {deviation:.2g} in every value of the mean of 30 sites, whose updates are 1 long at most: it is {deviation * parameters**0.5:.3g} times"
    )
    assert "mean of 3 sites" in str(noise_text(parse_manifest(text), 1))
    assert (
        noise_text(parse_manifest('schema = 1\nname = "x"\nkind = "federated"\n[secure]\n'), 9)
        is None
    )


if __name__ == "__main__":
    print(explained(), end="")


@pytest.mark.parametrize(
    ("peers", "says"),
    [
        (3, "of 3 sites none may be away: a sum needs 3"),
        (4, "of 4 sites 1 may be away: a sum needs 3"),
        (6, "of 6 sites 1 may be away: a sum needs 5"),
        (7, "of 7 sites 2 may be away: a sum needs 5"),
        (2, "2 sites are too few: a sum needs 3"),
    ],
)
def test_how_many_sites_may_be_away(peers: int, says: str) -> None:
    run = parse_manifest(
        'schema = 1\nname = "x"\nkind = "federated"\n[secure]\n[federated]\n'
        'work = { epochs = 1 }\nweights = "equal"\n'
    )
    assert site_lines(run, peers) == [says]
    assert bool(too_few_sites(run, peers)) == (peers == 2)


@pytest.mark.parametrize(
    ("less", "says"), [(0, "no contribution may be lost"), (2, "2 contributions may be lost")]
)
def test_how_many_contributions_may_be_lost(less: int, says: str) -> None:
    terms = "noise = 3.0\nclip = 1.0\ndelta = 1e-5\nstop_at_epsilon = 4.0\n"
    run = parse_manifest(
        f'schema = 1\nname = "x"\nkind = "federated"\n[train]\nrounds = {6 - less}\n[secure]\n'
        f'[privacy]\n{terms}[federated]\nwork = {{ steps = 9 }}\nweights = "equal"\n'
    )
    assert says in site_lines(run, 5)[1]
