"""A refused manifest names all of its faults at once, and a file in which every hint was followed
is a manifest: of 200 random files with two to six planted faults each. The hints are followed by
their words alone, as a reader would.
"""

from __future__ import annotations

import copy
import json
import random
import re
import tomllib
from typing import Any, NamedTuple

import pytest

from atoll.collectives.errors import ConfigError
from atoll.node.cli.templates import TEMPLATES
from atoll.node.manifest import Manifest, parse_manifest
from atoll.node.manifest.reading import examine_table
from atoll.security.identity import Identity

PEERS = [Identity(bytes([number]) * 32).peer for number in range(1, 6)]


class PlantedFault(NamedTuple):
    """Settings that make a fault, and the key that it is named by. Settings with None must be absent
    for it to be one.
    """

    key: str
    given: dict[str, Any]
    more: dict[str, Any] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return self.given | (self.more or {})

    @property
    def held(self) -> dict[str, Any]:
        return {path: value for path, value in self.settings.items() if value is not None}

    @property
    def missing(self) -> set[str]:
        return self.settings.keys() - self.held.keys()


SWARM: dict[str, Any] = {"kind": None}
FEDERATED = {"kind": "federated"}
SEEDED = {
    "kind": "seeded",
    "model.entry": "local:x",
    "join.policy": "allow",
    "join.allow": PEERS,
}
OUTER = {"train.outer.optimizer": "nesterov", "train.outer.lr": 0.7, "train.outer.momentum": 0.5}
SECURE = {**FEDERATED, "secure.threshold": 3}
NOISE = {
    **SECURE,
    "train.rounds": 3,
    **{f"privacy.{key}": value for key, value in (("noise", 9.0), ("clip", 1.0), ("delta", 1e-5))},
    "privacy.stop_at_epsilon": 9.0,
}
MEDIAN = {"robust.rule": "median", "robust.f": 1}
GRADIENTS = {
    "train.method": "gradient_averaging",
    "train.outer.optimizer": "adamw",
    "train.outer.lr": 0.1,
    "train.outer.momentum": 0.9,
}
ARRIVALS = {**SWARM, "exchange.arrivals.quorum": 2}

FAULTS = [
    # keys, and types and ranges of values
    PlantedFault("$.train.sync_evry", {"train.sync_evry": 20}, {"train.sync_every": None}),
    PlantedFault("$.zephyr", {"zephyr": 3}),
    PlantedFault("$.durability", {"durability.sync": "all"}),
    PlantedFault("$.lanes.encrypt", {"lanes.encrypt": "yes"}),
    PlantedFault("$.lanes.per_peer", {"lanes.per_peer": 9}),
    PlantedFault("$.checkpoint.every", {"checkpoint.every": "often"}),
    PlantedFault("$.train.start_with", {"train.start_with": 0}),
    PlantedFault("$.train.rounds", {"train.rounds": -1}),
    PlantedFault("$.data.seed", {"data.seed": 1.5}),
    PlantedFault("$.data.factory", {"data.factory": "site.py:make"}),
    PlantedFault("$.network.bootstrap[0]", {"network.bootstrap": ["a b"]}),
    PlantedFault("$.adapters.mode", {"adapters.mode": "both"}),
    PlantedFault("$.limits.operations", {"limits.operations": 1}),
    PlantedFault("$.exchange.codec", {"exchange.codec": "int7"}, {"secure": None, **SWARM}),
    PlantedFault("$.exchange.codec", {"exchange.codec": "codebook8"}, {"secure": None, **SWARM}),
    PlantedFault("$.exchange.codecs.*.norm", {"exchange.codecs": {"*.norm": "half"}}),
    PlantedFault("$.model.config.widht", {"model.config.widht": 8}, {"model.entry": None}),
    PlantedFault(
        "$.model.config.heads",
        {"model.config.width": 100, "model.config.heads": 3},
        {"model.entry": None},
    ),
    PlantedFault("$.evaluate.share", {"evaluate.share": 0.6}),
    # tables and settings of another kind
    PlantedFault("$.secure", {"secure.threshold": 3}, SWARM),
    PlantedFault("$.federated", {"federated.method": "fedadam"}, SWARM),
    PlantedFault("$.privacy", {"privacy.noise": 9.0}, SWARM),
    PlantedFault("$.btard", {"btard.validators": 2}, SWARM),
    PlantedFault("$.train.outer", {"train.outer.lr": 0.5, **FEDERATED}),
    PlantedFault("$.train.method", {"train.method": "local_sgd", **FEDERATED}),
    PlantedFault("$.train.overlap", {"train.overlap": "late", **FEDERATED}),
    PlantedFault("$.exchange.arrivals", {"exchange.arrivals.quorum": 2, **FEDERATED}),
    PlantedFault("$.exchange", {"exchange.codec": "bf16", **SEEDED}),
    PlantedFault("$.robust", {**MEDIAN, **SEEDED}),
    PlantedFault("$.evaluate", {"evaluate.every": 2, **SEEDED}),
    PlantedFault("$.train.share", {"train.share": 0.9, **SEEDED}),
    PlantedFault("$.btard.intervals", {"btard.intervals": 1, **SEEDED}),
    # settings of what was not chosen
    PlantedFault("$.train.delay", {"train.delay": 3}, {"train.overlap": None, **SWARM}),
    PlantedFault("$.train.mixing", {"train.mixing": 0.5, **GRADIENTS}, SWARM),
    PlantedFault("$.train.overlap", {"train.overlap": "late", **GRADIENTS}, SWARM),
    PlantedFault("$.train.outer.stretch", {"train.outer.stretch": True, **GRADIENTS}, SWARM),
    PlantedFault("$.train.outer.every", {"train.outer.every": 3, **OUTER}, SWARM),
    PlantedFault("$.train.outer.spread", {"train.outer.spread": 0.5, **OUTER}, SWARM),
    PlantedFault("$.train.outer.beta2", {"train.outer.beta2": 0.9, **OUTER}, SWARM),
    PlantedFault(
        "$.train.outer.momentum_dtype",
        {
            "train.outer.momentum_dtype": "bf16",
            "train.outer.optimizer": "sgd",
            "train.outer.lr": 1.0,
        },
        {"train.outer.momentum": None, **SWARM},
    ),
    PlantedFault("$.train.max_steps", {"train.max_steps": 500}, {"train.share": None}),
    PlantedFault("$.robust.keep", {"robust.keep": "n-f", **MEDIAN}, SWARM),
    PlantedFault("$.robust.f", {"robust.f": 1}, {"robust.rule": None, **SWARM}),
    PlantedFault("$.federated.mu", {"federated.mu": 0.5, **FEDERATED}, {"federated.method": None}),
    PlantedFault("$.federated.pull", {"federated.pull": 0.5, **FEDERATED}),
    PlantedFault(
        "$.federated.buffer",
        {"federated.buffer": 2, "federated.method": "fedasync", **FEDERATED},
        {"secure": None},
    ),
    PlantedFault("$.exchange.arrivals.longest", {"exchange.arrivals.longest": 3.0, **ARRIVALS}),
    PlantedFault("$.exchange.arrivals.least", {"exchange.arrivals.least": 3, **ARRIVALS}),
    PlantedFault("$.exchange.check", {"exchange.check": True}, {"exchange.plan": None, **SWARM}),
    PlantedFault("$.privacy.clip_rate", {"privacy.clip_rate": 0.5, **NOISE}),
    PlantedFault("$.train.inner.beta1", {"train.inner.beta1": 0.5, "train.inner.optimizer": "sgd"}),
    # choices that are not complete
    PlantedFault(
        "$.train.outer.lr", {"train.outer.optimizer": "heloco"}, {"train.outer.lr": None, **SWARM}
    ),
    PlantedFault("$.robust.f", {"robust.rule": "median"}, {"robust.f": None, **SWARM}),
    PlantedFault("$.join.allow", {"join.policy": "allow"}, {"join.allow": None}),
    PlantedFault("$.join.allow", {"join.allow": PEERS[:2]}, {"join.policy": None}),
    # settings that mean nothing together
    PlantedFault("$.train.round_s", {"train.sync_every": 50, "train.round_s": 9.0}),
    PlantedFault(
        "$.exchange.plan", {"exchange.plan": "ring", **MEDIAN}, {"exchange.tree": None, **SWARM}
    ),
    PlantedFault(
        "$.exchange.plan",
        {"exchange.plan": "ring", "exchange.codec": "stat2"},
        {"exchange.tree": None, **SWARM},
    ),
    PlantedFault(
        "$.exchange.plan",
        {"exchange.plan": "two-level", "exchange.tree": "ring"},
        {"secure": None, **SWARM},
    ),
    PlantedFault("$.exchange.fragments", {"exchange.fragments": 8, "train.sync_every": 5}, SWARM),
    PlantedFault(
        "$.exchange.feedback_kept",
        {"exchange.feedback_kept": 0.9},
        {**ARRIVALS, "exchange.feedback": None},
    ),
    PlantedFault("$.exchange.feedback", {"exchange.feedback": True, **ARRIVALS}),
    PlantedFault("$.train.local_after", {"train.local_after": 3, **ARRIVALS}),
    PlantedFault("$.quorum.lying", {"quorum.lying": 1, **ARRIVALS}),
    PlantedFault("$.quorum.bans", {"quorum.bans": "quorum"}, {"quorum.lying": None}),
    PlantedFault("$.join.policy", {"join.probation": 3}, {"join.policy": None}),
    PlantedFault("$.train.outer.stretch", {"train.outer.stretch": True, **MEDIAN}, SWARM),
    PlantedFault(
        "$.train.outer.momentum",
        {"robust.momentum": 0.9, **MEDIAN, **OUTER, "train.outer.momentum": 0.9},
        SWARM,
    ),
    PlantedFault("$.exchange.feedback", {"exchange.feedback": True, **SECURE}),
    PlantedFault("$.join.policy", {"join.policy": "open", **SECURE}),
    PlantedFault("$.secure.buckets", {"secure.buckets": 3, **SECURE}, {"robust": None}),
    PlantedFault("$.secure.threshold", {"evaluate.every": 2, **SECURE}),
    PlantedFault("$.secure", {"audit.keep_contributions": 3, **SECURE}),
    PlantedFault("$.secure", {"quorum.lying": 1, **SECURE}),
    PlantedFault("$.secure.metrics", {"secure.metrics": ["loss"], **NOISE}),
    PlantedFault("$.privacy.colluding", {"privacy.colluding": 3, **NOISE}),
    PlantedFault("$.train.rounds", {**NOISE, "train.rounds": 5000}),
    PlantedFault("$.model.buffers", {"model.buffers": {"a": "mean"}}, {"model.entry": None}),
]


def drawn(rng: random.Random) -> tuple[dict[str, Any], set[str]]:
    """The settings of a file with two to six faults, by their paths, and the faults' keys."""
    wanted, given, absent, keys = rng.randint(2, 6), dict[str, Any](), set[str](), set[str]()
    for fault in rng.sample(FAULTS, len(FAULTS)):
        held = fault.held
        clash = (
            fault.key in keys
            or any(given.get(path, value) != value for path, value in held.items())
            or any(_is_under(path, absent) for path in held)
            or any(_is_under(path, fault.missing) for path in given)
        )
        if not clash and len(keys) < wanted:
            given |= held
            absent |= fault.missing
            keys.add(fault.key)
    return given, keys


def _is_under(path: str, tops: set[str]) -> bool:
    return any(path == top or path.startswith(f"{top}.") for top in tops)


def nested(given: dict[str, Any]) -> dict[str, Any]:
    table: dict[str, Any] = {"schema": 1, "name": "x"}
    for path, value in given.items():
        inside = table
        *folders, last = path.split(".")
        for step in folders:
            inside = inside.setdefault(step, {})
        inside[last] = copy.deepcopy(value)
    return table


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    return "[" + ", ".join(map(toml, value)) + "]" if isinstance(value, list) else json.dumps(value)


def read(table: dict[str, Any]) -> Manifest:
    return parse_manifest("".join(f"{key} = {toml(value)}\n" for key, value in table.items()))


def followed(table: dict[str, Any], fault: ConfigError, which: int = 0) -> dict[str, Any]:
    """The table after somebody has followed a hint's alternative, by its words."""
    table = copy.deepcopy(table)
    *folders, last = steps(fault.key)
    hint = re.sub(r" \([^()]*\)", "", fault.hint).removesuffix(".")
    if found := re.fullmatch(r"Did you mean `(\w+)`\?", hint):
        parent = at(table, folders)
        parent[found[1]] = parent.pop(last)
        return table
    if found := re.fullmatch(r"Choose one of: (.+)", hint):
        at(table, folders)[last] = found[1].split(", ")[which]
        return table
    hint = re.sub(r"^(Change|Write) [^`]*, or (leave it out)$", r"\2", hint)
    hint = re.sub(r"^(Add|Write .*, such as) `(.*)`$", r"\2", hint)
    for part in re.split(r" and (?=[l\[]|\w+ = )", re.split(r", or ", hint)[which]):
        if found := re.fullmatch(r"[Ll]eave (it|\[([\w.]+)\])?( ?\w+)? out", part):
            path = found[2].split(".") if found[2] else [*folders]
            path += [last] if found[1] == "it" else []
            path += [found[3].strip()] if found[3] else []
            parent = at(table, path[:-1])
            if isinstance(parent, list) or path[-1] in parent:
                del parent[path[-1]]
            continue
        found = re.fullmatch(r"(?:\[([\w.]+)\] )?(\w+) = (.*)", part)
        assert found, f"nobody can follow {fault.hint!r} of {fault.key}"
        path = found[1].split(".") if found[1] else [*folders] if found[2] != "kind" else []
        value = tomllib.loads(f"v = {found[3]}")["v"]
        if isinstance(value, list):
            value = [PEERS[i] if item == "PEER" else item for i, item in enumerate(value)]
        at(table, path)[found[2]] = value
    return table


def steps(key: str) -> list[Any]:
    """A key's path. Those of free tables are known here."""
    if key.startswith("$.exchange.codecs."):
        return ["exchange", "codecs", key.removeprefix("$.exchange.codecs.")]
    found = re.findall(r"[\w]+|\[\d+\]", key)
    return [int(step[1:-1]) if step.startswith("[") else step for step in found]


def at(table: Any, path: list[Any]) -> Any:
    for step in path:
        table = table[step] if isinstance(step, int) else table.setdefault(step, {})
    return table


def told(table: dict[str, Any]) -> list[ConfigError]:
    with pytest.raises(ConfigError) as caught:
        read(table)
    return list(caught.value.faults or (caught.value,))


@pytest.mark.parametrize("seed", range(200))
def test_all_faults_are_named_and_a_file_with_all_hints_followed_is_valid(seed: int) -> None:
    given, keys = drawn(random.Random(seed))
    table = nested(given)
    faults = told(table)
    assert 2 <= len(keys) <= 6
    assert keys <= {fault.key for fault in faults}
    mended = table
    for fault in faults:
        mended = followed(mended, fault)
    read(mended)


@pytest.mark.parametrize("seed", range(200, 230))
def test_each_alternative_of_a_hint_holds_beside_the_others(seed: int) -> None:
    table = nested(drawn(random.Random(seed))[0])
    faults = told(table)
    for index, fault in enumerate(faults):
        words_only = fault.hint.startswith(("Change", "Write"))
        alternatives = re.sub(r" \([^()]*\)", "", fault.hint).split(", or ")
        for which in () if words_only else range(1, len(alternatives)):
            mended = table
            for other, each in enumerate(faults):
                mended = followed(mended, each, which if other == index else 0)
            read(mended)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.key)
def test_each_planted_fault_is_one(fault: PlantedFault) -> None:
    table = nested(fault.held)
    faults = told(table)
    assert fault.key in [each.key for each in faults]
    for each in faults:
        table = followed(table, each)
    read(table)


@pytest.mark.parametrize(
    ("lines", "keys"),
    [
        (
            'delay = 30\nmethod = "gradient_averaging"\nmixing = 0.5\n[train.outer]\n'
            'stretch = true\nmomentum_dtype = "bf16"\noptimizer = "sgd"\nevery = 3\n',
            {"delay", "mixing", "outer.stretch", "outer.momentum_dtype", "outer.every"},
        ),
        (
            "[robust]\nrule = 'median'\nf = 1\n[exchange]\nplan = 'ring'\ncodec = 'stat2'\n"
            "[no_quorum]\npolicy = 'branch'\n",
            {"exchange.plan", "exchange.codec", "no_quorum"},
        ),
    ],
)
def test_files_whose_faults_were_once_named_one_by_one(lines: str, keys: set[str]) -> None:
    text = (
        f'schema = 1\nname = "x"\n[model]\nentry = "local:mlp"\n[train]\nsync_every = 20\n{lines}'
    )
    with pytest.raises(ConfigError) as caught:
        parse_manifest(text)
    named = {fault.key.removeprefix("$.").removeprefix("train.") for fault in caught.value.faults}
    assert keys <= named
    for key in keys:
        assert key in f"{caught.value.message}\n{caught.value.why}"


def test_a_faultless_text_has_none_and_its_table_stays_as_it_is() -> None:
    table = {"schema": 1, "name": "x", "train": {"outer": {"preset": "published"}}}
    before = copy.deepcopy(table)
    assert examine_table(table, "run.toml").faults == []
    assert table == before


def test_the_files_that_people_start_from_have_no_faults() -> None:
    from atoll.node.cli.runs import EXAMPLE
    from atoll.node.cli.templates import TEMPLATES

    for text in (EXAMPLE, *TEMPLATES.values()):
        parse_manifest(text)


@pytest.mark.parametrize("key", ["noise", "clip", "delta", "stop_at_epsilon"])
def test_a_wrong_value_that_its_table_needs_is_named(key: str) -> None:
    """Without it the table does not even convert, and the rest of the file is looked at all the
    same.
    """
    values = {"clip": "1.0", "noise": "1.0", "delta": "1e-5", "stop_at_epsilon": "8.0"}
    lines = [f"{each} = {value}" for each, value in (values | {key: '"x"'}).items()]
    text = "\n".join(
        [
            'schema = 1\nname = "x"\nkind = "federated"\n[train]\ndelay = -1\n[secure]\n[privacy]',
            *lines,
        ]
    )
    with pytest.raises(ConfigError) as caught:
        parse_manifest(text)
    assert {f"$.privacy.{key}", "$.train.delay"} <= {fault.key for fault in caught.value.faults}


def test_a_wrong_value_that_its_table_needs_gets_a_right_one_as_its_hint() -> None:
    """Not the advice to leave its table out, nor further faults by what that leads to."""
    table = {
        "schema": "a",
        "name": "x",
        "kind": "federated",
        "model": {"entry": "local:x"},
        "federated": {"work": {"steps": 5}, "weights": "equal"},
        "secure": {"threshold": 3},
        "train": {"rounds": 3},
        "privacy": {"clip": "much", "noise": 9.0, "delta": 1e-5},
    }
    hints = {fault.key: fault.hint for fault in told(table)}
    assert hints == {
        "$.schema": "Write another value, such as `schema = 1`.",
        "$.privacy.clip": "Write another value, such as `clip = 1.0`.",
        "$.privacy.stop_at_epsilon": "Add `stop_at_epsilon = 12.0`.",
    }


def test_a_value_out_of_range_does_not_make_its_table_absent() -> None:
    """A private run's weights need no ``max_weight``; said to lack its privacy it would."""
    text = TEMPLATES["federated-hospital"].replace("noise = ", "noise = -")
    with pytest.raises(ConfigError) as caught:
        parse_manifest(text)
    assert "$.privacy.noise must be" in str(caught.value)
    assert "max_weight" not in str(caught.value)
