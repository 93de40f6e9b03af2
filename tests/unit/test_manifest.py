"""The manifest: strict TOML in, canonical bytes out, a hash as identity, a signature beside it."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.arrivals import (
    ArrivalSettings,
    DynamicSteps,
    Fading,
    GraceWindow,
    Groups,
)
from atoll.collectives.codec_names import CODECS, REMOVED
from atoll.collectives.errors import (
    BadSignatureError,
    ConfigError,
    StorageError,
    VersionMismatchError,
)
from atoll.collectives.foreign import LINES, WORDS
from atoll.collectives.outer_rules import OUTER_RULES, OuterRule, OuterSettings
from atoll.collectives.seeded import BtardSettings
from atoll.collectives.swarm import (
    EvaluateSettings,
    PrivacySettings,
    RunSettings,
    SecureSettings,
    SiteSettings,
)
from atoll.node import manifest as m
from atoll.node.cli.costs import describe, describe_lines, explain_evaluate, explain_rule
from atoll.node.cli.needs import host_bytes, host_peak_bytes, state_bytes
from atoll.node.home.config import NodeConfig
from atoll.node.home.paths import find_paths
from atoll.node.manifest import tables
from atoll.node.manifest.form import as_toml
from atoll.node.manifest.optional_tables import LEAST_LEFT, LEAST_PEERS, liars_borne
from atoll.node.manifest.signed import DOMAIN
from atoll.node.manifest.tables import OuterTable
from atoll.optim.outer import OuterStep
from atoll.optim.outer.more_rules import RULES
from atoll.security.btard import AttemptSettings
from atoll.security.identity import Identity

EXAMPLE = """
schema = 1
name = "tide"
[model]
config = { width = 64, layers = 2, heads = 2 }
[train]
sync_every = 20
rounds = 35
[train.inner]
steps = 700
[train.outer]
lr = 0.9
momentum = 0.6
"""
names = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,20}\Z")
floats = st.floats(0.001, 9.0)


def texts(pattern: str, **size: int) -> st.SearchStrategy[str]:
    """Any text that a manifest takes."""
    return st.text(**size).filter(lambda text: re.search(pattern, text) is not None)


manifests = st.builds(
    m.Manifest,
    schema=st.just(1),
    name=names,
    description=texts(LINES, max_size=40),
    model=st.builds(
        tables.ModelTable,
        entry=names.map(lambda n: f"local:{n}"),
        config=st.dictionaries(
            names, st.integers(-5, 5) | st.booleans() | texts(WORDS, max_size=5), max_size=3
        ),
    ),
    data=st.builds(
        tables.DataTable,
        source=st.sampled_from(["builtin:stdlib-text", "local"]),
        seed=st.integers(0, 99),
    ),
    train=st.builds(
        tables.TrainTable,
        sync_every=st.integers(20, 999),
        local_after=st.integers(0, 9),
        overlap=st.sampled_from(["late", "eager"]),
        delay=st.none() | st.integers(0, 19),
        mixing=st.none() | st.floats(0, 1),
        outer=st.builds(
            tables.OuterTable,
            lr=floats,
            momentum=st.floats(0, 0.99),
            governor=st.booleans(),
            stretch=st.booleans(),
        ),
    ),
    exchange=st.builds(
        tables.ExchangeTable,
        codec=st.sampled_from(CODECS),
        codecs=st.dictionaries(names, st.sampled_from(CODECS), max_size=3),
        deadline_s=st.none() | floats,
        fragments=st.integers(1, 16),
    ),
    network=st.builds(
        tables.NetworkTable,
        bootstrap=st.lists(st.from_regex(r"\A[!-~]{1,9}\Z"), max_size=3).map(tuple),
    ),
)


def test_defaults_and_settings() -> None:
    manifest = m.parse_manifest(EXAMPLE)
    assert manifest.settings() == RunSettings(
        sync_every=20, rounds=35, outer=OuterSettings("nesterov", 0.9, 0.6), codec="int8_dither"
    )
    assert manifest.train.inner.batch == 8
    assert m.parse_manifest('schema = 1\nname = "x"').train.sync_every == 100
    mixed = m.parse_manifest(
        'schema = 1\nname = "x"\n[exchange]\ncodec = "int4"\n[exchange.codecs]\n"*.norm.*" = "bf16"'
    ).settings()
    assert (mixed.codec, mixed.codecs) == ("int4", {"*.norm.*": "bf16"})
    assert (
        m.parse_manifest(
            'schema = 1\nname = "x"\nmodel = { entry = "local:y" }\nexchange = { fragments = 3 }'
        )
        .settings()
        .fragments
        == 3
    )
    timed = m.parse_manifest('schema = 1\nname = "x"\ntrain = { round_s = 2.5 }').settings()
    assert (timed.sync_every, timed.round_s) == (None, 2.5)
    counted = m.parse_manifest(
        'schema = 1\nname = "x"\ntrain = { target_samples = 512 }'
    ).settings()
    assert (counted.sync_every, counted.round_s, counted.target_samples) == (None, None, 512)
    sparse = m.parse_manifest(
        'schema = 1\nname = "x"\nexchange = { codec = "sparse64", feedback_kept = 0.95 }'
    ).settings()
    assert (sparse.codec, sparse.feedback_kept) == ("sparse64", 0.95)
    late = m.parse_manifest(
        'schema = 1\nname = "x"\ntrain = { overlap = "late", delay = 3, mixing = 0.5 }\nexchange = { feedback = true }'
    )
    assert [
        getattr(late.settings(), name) for name in ("overlap", "delay", "mixing", "feedback")
    ] == ["late", 3, 0.5, True]
    adam = m.parse_manifest(
        'schema = 1\nname = "x"\ntrain.outer = { optimizer = "adam", lr = 0.1, momentum = 0.9, beta2 = 0.5, governor = true, stretch = true }'
    ).settings()
    assert adam.outer == OuterSettings("adam", 0.1, 0.9, 0.5, governor=True, stretch=True)


BUFFERED = "kind = 'federated'\nmodel = { entry = 'local:x' }\n"
SCAFFOLD = (
    "kind = 'federated'\nfederated = { method = 'scaffold' }\nmodel = { entry = 'local:x' }\n"
)
PRIVATE = "kind = 'federated'\nsecure = {}\nprivacy = { noise = 4.0, clip = 1.0, delta = 1e-5, stop_at_epsilon = 9.0 }\n"


SENTENCE = re.compile(r" (is|are|has|must|cannot|needs?|gives|lacks|names) ")


def refuses(text: str, key: str) -> None:
    """A manifest with these lines is refused: the error names the key and is a sentence."""
    with pytest.raises(ConfigError) as caught:
        m.parse_manifest(f'schema = 1\nname = "x"\n{text}')
    assert caught.value.key == key
    assert SENTENCE.search(caught.value.message), caught.value.message


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("train = { delay = 3 }", "$.train.delay"),
        (
            "train = { method = 'gradient_averaging', mixing = 0.5, outer = { optimizer = 'sgd', lr = 0.1 } }",
            "$.train.mixing",
        ),
        ("train = { overlap = 'late', sync_every = 4, delay = 4 }", "$.train.delay"),
        ("train = { sync_every = 4, target_samples = 9 }", "$.train.target_samples"),
        ("train = { method = 'local_sgd', outer = { stretch = true } }", "$.train.outer.stretch"),
        (
            "train = { method = 'gradient_averaging', outer = { lr = 0.1, momentum = 0.9, stretch = true } }",
            "$.train.outer.stretch",
        ),
    ],
)
def test_training_settings_that_mean_nothing_together(text: str, key: str) -> None:
    refuses(text, key)


OWN_MODEL = "model = { entry = 'local:x', buffers = { 'bank*' = 'same', '*.book' = 'mean' } }\n"


def test_classes_of_buffers_reach_the_script_and_who_joins() -> None:
    plain = m.parse_manifest("schema = 1\nname = 'x'\nmodel = { entry = 'local:x' }\n")
    told = m.parse_manifest(f"schema = 1\nname = 'x'\n{OWN_MODEL}")
    assert told.settings().buffers == {"bank*": "same", "*.book": "mean"}
    assert m.decode_manifest(told.encode()) == told
    assert b"buffers" not in plain.encode()
    assert "buffers  bank* same, *.book mean" in describe_lines(told)
    assert describe(told)["buffers"] == {"bank*": "same", "*.book": "mean"}
    assert not any(line.startswith("buffers") for line in describe_lines(plain))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("model = { buffers = { 'bank' = 'mean' } }", "$.model.buffers"),
        ("model = { entry = 'local:x', buffers = { 'bank' = 'max' } }", "$.model.buffers"),
        ("model = { entry = 'local:x', buffers = { '' = 'own' } }", "$.model.buffers"),
        ("model = { entry = 'local:x', buffers = 'mean' }", "$.model.buffers"),
        (f"{OWN_MODEL}exchange = {{ arrivals = {{}} }}", "$.model.buffers"),
        (f"{OWN_MODEL}kind = 'federated'\nsecure = {{}}", "$.model.buffers"),
        (f"{OWN_MODEL}kind = 'federated'\nfederated = {{ sample = 0.5 }}", "$.model.buffers"),
    ],
)
def test_classes_of_buffers_that_cannot_be(text: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        m.parse_manifest(f'schema = 1\nname = "x"\n{text}')
    assert caught.value.key.startswith(key)
    assert SENTENCE.search(caught.value.message), caught.value.message


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("mode = 'ffa'", "ffa: B trains, A stays as it was drawn"),
        ("mode = 'alternate'", "alternate: A and B train by turns of rounds"),
        ("base = 'shapes'", "plain: both factors train"),
    ],
)
def test_who_joins_reads_how_adapters_train_and_what_is_compared(table: str, words: str) -> None:
    text = f"schema = 1\nname = 'x'\nmodel = {{ entry = 'local:x' }}\nadapters = {{ {table} }}\n"
    told = m.parse_manifest(text + "train = { outer = { optimizer = 'sgd', lr = 1.0 } }\n")
    (line,) = (line for line in describe_lines(told) if line.startswith("adapters"))
    base = describe(told)["adapters"]["base"]
    compared = {"values": "names, shapes and values", "shapes": "names and shapes"}[base]
    assert line.startswith(f"adapters {words}; members compare by a digest {compared} of what is")
    plain = m.parse_manifest("schema = 1\nname = 'x'\nmodel = { entry = 'local:x' }\n")
    assert not any(line.startswith("adapters") for line in describe_lines(plain))


def test_what_others_may_take_of_a_machine_is_shown_before_it_joins() -> None:
    """Where a manifest asks for more than is usual, or for anything to be kept."""
    usual = 'schema = 1\nname = "x"\n[model]\nentry = "local:m"\n'
    asks = m.parse_manifest(
        f"{usual}[limits]\nmember_bytes = {1 << 40}\noperations = 128\n"
        "[audit]\nkeep_contributions = 9\n"
    )
    text = " ".join(" ".join(describe_lines(asks)).split())
    assert "operations of one other member may take 1.0 TiB of memory and disk" in text
    assert "of all others 4.0 TiB; 128 at once" in text
    assert "keeps those to the newest 9 entries of each log" in text
    assert describe(asks)["limits"]["member_bytes"] == 1 << 40
    assert describe(asks)["keep_contributions"] == 9
    plain = describe_lines(m.parse_manifest(usual))
    assert not any(line.startswith(("limits", "kept")) for line in plain)


PEERS = [Identity(bytes([index]) * 32).peer for index in range(5)]
SEEDS = f"kind = 'seeded'\nmodel = {{ entry = 'local:x' }}\nbtard = {{}}\njoin = {{ policy = 'allow', allow = {PEERS} }}\n"


def test_a_run_with_btard_has_the_peers_that_it_names_and_whole_vectors() -> None:
    settings = m.parse_manifest(f'schema = 1\nname = "x"\n{SEEDS}').settings()
    assert settings.btard == BtardSettings(tuple(sorted(PEERS)))
    cut = m.parse_manifest(
        f'schema = 1\nname = "x"\n{SEEDS.replace("btard = {}", "btard = { intervals = 4 }")}'
    )
    assert cut.settings().btard == BtardSettings(tuple(sorted(PEERS)), intervals=4)
    assert any("peers a round, one of 4 intervals of each" in line for line in describe_lines(cut))
    assert (settings.codec, settings.reducer) == ("bits", "copy")


def test_a_run_with_btard_says_how_many_liars_cannot_end_it() -> None:
    """Fewer than half, and with fewer than three others nothing goes on."""
    assert [liars_borne(peers) for peers in (3, 4, 5, 6, 7, 16, 32)] == [0, 1, 2, 2, 3, 7, 15]
    assert AttemptSettings(1.0).least == LEAST_LEFT
    assert liars_borne(LEAST_PEERS) == 1
    told = describe_lines(m.parse_manifest(f'schema = 1\nname = "x"\n{SEEDS}'))
    assert "2 that lie cannot end the run" in "\n".join(told)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("btard = {}", "$.btard"),
        ("kind = 'seeded'\nmodel = { entry = 'local:x' }", "$.join.allow"),
        (
            f"kind = 'seeded'\nmodel = {{ entry = 'local:x' }}\n"
            f"join = {{ policy = 'allow', allow = {PEERS[:3]} }}",
            "$.join.allow",
        ),
        (SEEDS.replace("local:x", "builtin:gpt"), "$.model.entry"),
        (f"{SEEDS}exchange = {{ codec = 'bf16' }}", "$.exchange"),
        (f"{SEEDS}robust = {{ rule = 'median', f = 1 }}", "$.robust"),
        (SEEDS.replace("btard = {}", "btard = { intervals = 1 }"), "$.btard.intervals"),
        (SEEDS.replace("btard = {}", "btard = { intervals = 64 }"), "$.btard.intervals"),
        (SEEDS.replace("'seeded'", "'federated'"), "$.btard"),
        (f"{SEEDS}train = {{ overlap = 'late' }}", "$.train.overlap"),
        (f"{SEEDS}train = {{ outer = {{ governor = true }} }}", "$.train.outer.governor"),
        (f"{SEEDS}audit = {{ keep_contributions = 3 }}", "$.audit"),
        (SEEDS.replace("{}", "{ validators = 0 }"), "$.btard.validators"),
    ],
)
def test_a_run_with_btard_that_cannot_be(text: str, key: str) -> None:
    refuses(text, key)


EVALUATED = "evaluate = {}\n"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("evaluate = { every = 0 }", "$.evaluate.every"),
        ("evaluate = { share = 0.0 }", "$.evaluate.share"),
        ("evaluate = { share = 0.6 }", "$.evaluate.share"),
        ("evaluate = { rounds = 1 }", "$.evaluate.rounds"),
        ("evaluate = { rounds = 101 }", "$.evaluate.rounds"),
        ("evaluate = { samples = 64 }", "$.evaluate.samples"),
        (
            f"{EVALUATED}train = {{ method = 'gradient_averaging', outer = {{ lr = 0.1, momentum = 0.9 }} }}",
            "$.train.method",
        ),
        (f"{EVALUATED}exchange = {{ arrivals = {{}} }}", "$.exchange.arrivals"),
        (f"{EVALUATED}kind = 'federated'\nsecure = {{}}", "$.secure.threshold"),
        (
            f"{EVALUATED}kind = 'federated'\nsecure = {{}}\ntrain = {{ rounds = 5 }}\n"
            "privacy = { noise = 5.0, clip = 1.0, delta = 1e-5, stop_at_epsilon = 12 }",
            "$.privacy.noise",
        ),
        (f"{EVALUATED}kind = 'federated'\nfederated = {{ sample = 0.5 }}", "$.federated.sample"),
        (
            f"{EVALUATED}kind = 'federated'\nfederated = {{ method = 'fedbuff' }}",
            "$.federated.method",
        ),
        (f"{EVALUATED}{SEEDS}", "$.evaluate"),
    ],
)
def test_evaluations_that_cannot_be(text: str, key: str) -> None:
    refuses(text, key)


def test_a_governor_goes_by_evaluations_where_the_run_has_both_and_nobody_may_lie() -> None:
    def found(evaluate: str, governor: str = "true", lying: int = 0) -> m.Manifest:
        return m.parse_manifest(
            f'schema = 1\nname = "x"\nquorum = {{ lying = {lying} }}\n'
            f"train = {{ outer = {{ lr = 0.9, momentum = 0.9, governor = {governor} }} }}\n{evaluate}"
        )

    asked = "evaluate = { every = 2, share = 0.02, rounds = 4 }"
    watched = found(asked)
    assert watched.settings().evaluate == EvaluateSettings(2, 0.02, 4)
    assert watched.settings().outer.watch == 4
    others = (found("", "true"), found(asked, "false"), found(asked, lying=1))
    assert [each.settings().outer.watch for each in others] == [0, 0, 0]
    assert m.parse_manifest(as_toml(watched)) == watched
    assert m.decode_manifest(watched.encode()) == watched
    assert found("evaluate = {}").settings().evaluate == EvaluateSettings()
    said = [explain_evaluate(each) for each in (watched, *others)]
    assert "every 2 rounds at most and for 2 % of their time" in said[0]
    assert said[0].endswith("the governor takes the plain mean, at all members from one entry")
    assert said[1].startswith("nobody evaluates")
    assert said[2].endswith("governor = true the outer step then takes the plain mean")
    assert said[3].endswith("the governor says so and changes nothing, since 1 member may lie")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("exchange = { fragments = 0 }", "$.exchange.fragments"),
        ("exchange = { fragments = 17 }", "$.exchange.fragments"),
        ("exchange = { fragments = 8 }\ntrain = { sync_every = 7 }", "$.exchange.fragments"),
        ("exchange = { codec = 'stat2', plan = 'ring' }", "$.exchange.plan"),
        ("exchange = { codec = 'stat2_both', plan = 'ring' }", "$.exchange.plan"),
        (
            "exchange = { codec = 'int8', codecs = { x = 'sparse64' }, plan = 'two-level' }",
            "$.exchange.plan",
        ),
        ("exchange = { plan = 'ring', check = true }", "$.exchange.check"),
        ("exchange = { codec = 'int4', feedback_kept = 0.9 }", "$.exchange.feedback_kept"),
        ("exchange = { codec = 'stat2', feedback_kept = 1.5 }", "$.exchange.feedback_kept"),
    ],
)
def test_an_exchange_that_cannot_be(text: str, key: str) -> None:
    refuses(text, key)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("robust = { rule = 'median' }", "$.robust.f"),
        ("robust = { f = 1 }", "$.robust.f"),
        ("robust = { rule = 'median', f = 0 }", "$.robust.f"),
        ("robust = { rule = 'median', f = 128 }", "$.robust.f"),
        ("robust = { rule = 'monna', f = 1 }", "$.robust.rule"),
        ("robust = { rule = 'mda', f = 3 }", "$.robust.rule"),
        ("robust = { rule = 'krum', f = 127, before = ['bucketing2'] }", "$.robust.rule"),
        ("robust = { before = ['nnm'] }", "$.robust.before"),
        ("robust = { rule = 'krum', f = 1, before = ['nnm', 'mean'] }", "$.robust.before"),
        ("robust = { rule = 'krum', f = 1, before = ['nnm', 'nnm'] }", "$.robust.before"),
        (
            "robust = { rule = 'krum', f = 1, before = ['bucketing2', 'bucketing3'] }",
            "$.robust.rule",
        ),
        ("robust = { momentum = 0.9 }", "$.robust.momentum"),
        ("robust = { rule = 'median', f = 1, momentum = 1.0 }", "$.robust.momentum"),
        (
            "robust = { rule = 'median', f = 1, momentum = 0.9 }\ntrain = { overlap = 'eager' }",
            "$.robust.momentum",
        ),
        (
            "kind = 'federated'\nmodel = { entry = 'local:x' }\nrobust = { rule = 'median', f = 1, momentum = 0.9 }",
            "$.robust.momentum",
        ),
        ("robust = { rule = 'krum', f = 1, keep = 'n-f' }", "$.robust.keep"),
        ("robust = { rule = 'multi_krum', f = 1, keep = '3' }", "$.robust.keep"),
        ("robust = { rule = 'median', f = 1, neighbours = 'n-f-1' }", "$.robust.neighbours"),
        ("robust = { rule = 'geometric_median', f = 1, radius = 'running' }", "$.robust.radius"),
        ("robust = { radius = 'running' }", "$.robust.radius"),
        ("robust = { rule = 'median', f = 1 }\nexchange = { plan = 'ring' }", "$.exchange.plan"),
        (
            "robust = { rule = 'median', f = 1 }\nexchange = { codecs = { x = 'sparse64' } }",
            "$.exchange.codecs",
        ),
        (
            "robust = { rule = 'median', f = 1 }\nexchange = { codec = 'sparse64_both' }",
            "$.exchange.codec",
        ),
        (
            "robust = { rule = 'meamed', f = 1 }\ntrain = { outer = { stretch = true } }",
            "$.train.outer.stretch",
        ),
        (
            "robust = { rule = 'meamed', f = 1 }\ntrain = { inner = { samples = 9 } }",
            "$.train.inner.samples",
        ),
    ],
)
def test_a_robust_rule_that_cannot_hold(text: str, key: str) -> None:
    refuses(text, key)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("join = { policy = 'allow' }", "$.join.allow"),
        (
            "join = { allow = ['12D3KooWGmMhkEcrdKBj9sqTYGDuiKMv1hDF5vjJoYk1uuheBuBS'] }",
            "$.join.allow",
        ),
        ("join = { policy = 'allow', allow = ['me'] }", "$.join.allow"),
        ("join = { policy = 'allowed' }", "$.join.policy"),
    ],
)
def test_who_may_enter_is_said_in_full(text: str, key: str) -> None:
    refuses(text, key)


def test_a_run_for_named_peers() -> None:
    found = m.parse_manifest(
        "schema = 1\nname = 'x'\njoin = { policy = 'allow', allow = ['12D3KooWGmMhkEcrdKBj9sqTYGDuiKMv1hDF5vjJoYk1uuheBuBS'] }"
    )
    assert m.decode_manifest(found.encode()).join.allow == (
        "12D3KooWGmMhkEcrdKBj9sqTYGDuiKMv1hDF5vjJoYk1uuheBuBS",
    )


def test_a_robust_rule_names_the_runs_reducer_and_leaves_other_runs_as_they_are() -> None:
    plain = m.parse_manifest('schema = 1\nname = "x"')
    robust = m.parse_manifest('schema = 1\nname = "x"\nrobust = { rule = "trimmed_mean", f = 2 }')
    assert (plain.settings().reducer, robust.settings().reducer) == ("mean", "trimmed_mean:2")
    assert m.decode_manifest(robust.encode()) == robust
    assert b"robust" not in plain.encode()
    assert any(
        "trimmed_mean, f = 2" in line and "needs 5" in line for line in describe_lines(robust)
    )
    steps = m.parse_manifest(
        'schema = 1\nname = "x"\nrobust = { rule = "krum", f = 1, before = ["bucketing2", "arc"] }'
    )
    assert steps.settings().reducer == "bucketing2+arc+krum:1"
    assert m.decode_manifest(steps.encode()) == steps
    assert any(
        "bucketing 2, arc, krum, f = 1" in line and "needs 9" in line
        for line in describe_lines(steps)
    )


def test_what_a_rule_is_told_beside_f() -> None:
    def found(text: str) -> m.Manifest:
        outer = 'train.outer = { preset = "auto" }'
        manifest = m.parse_manifest(
            f'schema = 1\nname = "x"\n{outer}\nrobust = {{ f = 1, {text} }}'
        )
        assert m.decode_manifest(manifest.encode()) == manifest
        return manifest

    names = {
        "rule = 'multi_krum'": "multi_krum:1",
        "rule = 'multi_krum', keep = 'n-f', neighbours = 'n-f-2'": "multi_krum:1",
        "rule = 'multi_krum', keep = 'n-f-2'": "multi_krum/k2:1",
        "rule = 'multi_krum', neighbours = 'n-f-1'": "multi_krum/n1:1",
        "rule = 'krum', neighbours = 'n-f-1'": "krum/n1:1",
        "rule = 'centred_clip', before = ['nnm']": "nnm+centred_clip/running:1",
        "rule = 'centred_clip', radius = 'round'": "centred_clip:1",
        "rule = 'median', momentum = 0.9": "median:1",
    }
    assert {text: found(text).settings().reducer for text in names} == names
    assert [found(text).settings().worker_momentum for text in names] == [0.0] * 7 + [0.9]
    byzfl = found("rule = 'multi_krum', neighbours = 'n-f-1'")
    assert any(
        "multi_krum, scored by n − f − 1 neighbours, f = 1" in line and "needs 3" in line
        for line in describe_lines(byzfl)
    )
    assert "byzfl's score" in explain_rule(byzfl)[0]
    assert explain_rule(found("rule = 'krum'")) == []
    running = found("rule = 'centred_clip', momentum = 0.8")
    assert [
        "until 3 of them do" in explain_rule(running)[0],
        "0.8 of the last and 0.2 of the new" in explain_rule(running)[1],
    ] == [
        True,
        True,
    ]
    assert any("of running means" in line for line in describe_lines(running))


def test_what_members_do_beside_plain_steps_is_the_manifests() -> None:
    def settings(text: str) -> RunSettings:
        return m.parse_manifest(
            f'schema = 1\nname = "x"\nkind = "federated"\nmodel = {{ entry = "local:x" }}\nfederated = {{ {text} }}'
        ).settings()

    for name in ("fedavg", "fedavgm", "fedadam", "fedyogi", "fedadagrad"):
        assert settings(f'method = "{name}"').site is None
    assert settings('method = "fedprox", mu = 0.5').site == SiteSettings("fedprox", mu=0.5)
    assert settings('personal = "ditto", pull = 0.3').site == SiteSettings("fedavg", pull=0.3)
    buffered, fixed = (
        settings('method = "fedbuff", buffer = 4, lr = 0.5'),
        settings('method = "fedfix", period_s = 90'),
    )
    assert (buffered.arrivals, buffered.reducer, buffered.outer.kind, buffered.outer.lr) == (
        ArrivalSettings(count=4),
        "mean",
        "sgd",
        0.5,
    )
    assert (fixed.arrivals, fixed.reducer, fixed.site) == (
        ArrivalSettings(period_s=90.0),
        "sum",
        None,
    )
    mixing = settings(
        'method = "fedasync", alpha = 0.6, staleness = "hinge", staleness_a = 2.0, staleness_b = 1'
    )
    assert (mixing.arrivals, mixing.reducer) == (
        ArrivalSettings(count=1, fading=Fading(0.6, "hinge", 2.0, 1)),
        "mean",
    )
    assert settings('method = "fedasync"').arrivals == ArrivalSettings(
        count=1, fading=Fading(0.9, "polynomial")
    )
    compass = settings('method = "fedcompass", alpha = 0.7, longest = 2.5, slack = 2.0')
    assert (compass.arrivals, compass.reducer) == (
        ArrivalSettings(fading=Fading(0.7), groups=Groups(100, 250, 100, 2.0)),
        "sum",
    )
    scaffold = settings('method = "scaffold_m", beta = 0.25')
    assert scaffold.site == SiteSettings("scaffold_m", beta=0.25)
    assert (scaffold.codec, scaffold.codecs) == (
        "int8_dither",
        {"atoll.controls": "fp32", "atoll.clients": "fp32"},
    )
    told = m.parse_manifest(f'schema = 1\nname = "x"\n{SCAFFOLD}')
    assert any("control variate" in line for line in describe_lines(told))
    assert scaffold.outer == OuterSettings("sgd", 1.0, 0.9, 0.99, 1e-3)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("federated = { method = 'fedadam' }", "$.federated"),
        ("secure = {}", "$.secure"),
        ("kind = 'federated'\nfederated = { method = 'fedsync' }", "$.federated.method"),
        (f"{BUFFERED}federated = {{ method = 'fedcompass', buffer = 2 }}", "$.federated.buffer"),
        (f"{BUFFERED}federated = {{ method = 'fedcompass', slack = 0.5 }}", "$.federated.slack"),
        (
            f"{BUFFERED}federated = {{ method = 'fedcompass' }}\ntrain = {{ round_s = 9.0 }}",
            "$.train.sync_every",
        ),
        (f"{BUFFERED}federated = {{ method = 'fedcompass' }}\nsecure = {{}}", "$.secure"),
        (f"{BUFFERED}federated = {{ method = 'fedasync', longest = 2 }}", "$.federated.longest"),
        (f"{BUFFERED}federated = {{ method = 'fedasync', lr = 0.5 }}", "$.federated.lr"),
        (
            f"{BUFFERED}federated = {{ method = 'fedasync', staleness = 'constant', staleness_a = 0.5 }}",
            "$.federated.staleness_a",
        ),
        (
            f"{BUFFERED}federated = {{ method = 'fedasync', staleness_b = 2 }}",
            "$.federated.staleness_b",
        ),
        (f"{BUFFERED}federated = {{ method = 'fedasync' }}\nsecure = {{}}", "$.secure"),
        (f"{BUFFERED}federated = {{ method = 'fedbuff', alpha = 0.5 }}", "$.federated.alpha"),
        (f"{BUFFERED}federated = {{ method = 'fedbuff', period_s = 9.0 }}", "$.federated.period_s"),
        (f"{BUFFERED}federated = {{ method = 'fedfix', sample = 0.5 }}", "$.federated.sample"),
        (
            f"{BUFFERED}federated = {{ method = 'fedfix', personal = 'ditto' }}",
            "$.federated.personal",
        ),
        (f"{BUFFERED}federated = {{ method = 'fedbuff' }}\nsecure = {{}}", "$.secure"),
        (
            f"{BUFFERED}federated = {{ method = 'fedbuff' }}\nrobust = {{ rule = 'median', f = 1 }}",
            "$.robust.rule",
        ),
        (
            f"{BUFFERED}federated = {{ method = 'fedbuff' }}\nquorum = {{ lying = 1 }}",
            "$.quorum.lying",
        ),
        (
            f"{BUFFERED}federated = {{ method = 'fedbuff' }}\njoin = {{ policy = 'open', probation = 3 }}",
            "$.join.probation",
        ),
        (
            "join = { policy = 'open', probation = 3 }\ntrain = { start_with = 2 }",
            "$.train.start_with",
        ),
        ("train = { start_with = 0 }", "$.train.start_with"),
        (
            f"{BUFFERED}federated = {{ method = 'fedbuff' }}\nexchange = {{ fragments = 2 }}",
            "$.exchange.fragments",
        ),
        (
            f"{BUFFERED}federated = {{ method = 'fedbuff' }}\nexchange = {{ feedback = true }}",
            "$.exchange.feedback",
        ),
        (
            f"{BUFFERED}federated = {{ method = 'fedbuff' }}\ntrain = {{ round_s = 9.0 }}",
            "$.train.sync_every",
        ),
        ("kind = 'federated'\nfederated = { buffer = 2 }", "$.federated.buffer"),
        ("kind = 'federated'\nfederated = { method = 'scaffold' }", "$.train.inner.optimizer"),
        (f"{SCAFFOLD}secure = {{}}", "$.secure"),
        (f"{SCAFFOLD}robust = {{ rule = 'median', f = 1 }}", "$.robust.rule"),
        (f"{SCAFFOLD}exchange = {{ fragments = 2 }}", "$.exchange.fragments"),
        (
            "kind = 'federated'\nfederated = { method = 'scaffold', beta = 0.3 }\nmodel = { entry = 'local:x' }",
            "$.federated.beta",
        ),
        ("kind = 'federated'\nfederated = { pull = 0.3 }", "$.federated.pull"),
        ("kind = 'federated'\nfederated = { method = 'fedprox', mu = -1.0 }", "$.federated.mu"),
        ("kind = 'federated'\nfederated = { momentum = 0.5 }", "$.federated.momentum"),
        (
            "kind = 'federated'\nfederated = { method = 'fedyogi', bias_correction = true }",
            "$.federated.bias_correction",
        ),
        ("kind = 'federated'\ntrain = { outer = { lr = 0.5 } }", "$.train.outer"),
        ("kind = 'federated'\ntrain = { method = 'local_sgd' }", "$.train.method"),
        ("kind = 'federated'\ntrain = { overlap = 'late' }", "$.train.overlap"),
        ("kind = 'federated'\nsecure = { threshold = 2 }", "$.secure.threshold"),
        (
            "kind = 'federated'\nfederated = { topology = 'coordinator' }\nexchange = { plan = 'ring' }",
            "$.exchange.plan",
        ),
        (
            f"kind = 'federated'\nsecure = {{ threshold = 5 }}\njoin = {{ policy = 'allow', allow = {PEERS[:3]} }}",
            "$.secure.threshold",
        ),
        ("kind = 'federated'\nsecure = { metrics = ['loss', 'loss'] }", "$.secure.metrics"),
        ("kind = 'federated'\nsecure = { metrics = ['a b'] }", "$.secure.metrics[0]"),
        (
            f"{PRIVATE}train = {{ rounds = 9 }}".replace(
                "secure = {}", "secure = { metrics = ['loss'] }"
            ),
            "$.secure.metrics",
        ),
        ("kind = 'federated'\nsecure = {}\nrobust = { rule = 'median', f = 1 }", "$.robust.rule"),
        ("kind = 'federated'\nsecure = { buckets = 3 }", "$.secure.buckets"),
        (
            "kind = 'federated'\nsecure = { buckets = 4 }\nrobust = { rule = 'median', f = 2 }",
            "$.secure.buckets",
        ),
        (
            "kind = 'federated'\nsecure = { buckets = 9 }\nrobust = { rule = 'krum', f = 1 }",
            "$.robust.rule",
        ),
        (
            "kind = 'federated'\nsecure = { buckets = 9 }\nrobust = { rule = 'median', f = 1, before = ['nnm'] }",
            "$.robust.rule",
        ),
        (
            "kind = 'federated'\nsecure = { buckets = 3, max_weight = 9 }\nrobust = { rule = 'median', f = 1 }",
            "$.secure.max_weight",
        ),
        (
            "kind = 'federated'\nsecure = { buckets = 3, metrics = ['loss'] }\nrobust = { rule = 'median', f = 1 }",
            "$.secure.metrics",
        ),
        ("kind = 'federated'\nsecure = {}\nexchange = { codec = 'fp32' }", "$.exchange.codec"),
        (
            "kind = 'federated'\nsecure = {}\nexchange = { codecs = { x = 'fp32' } }",
            "$.exchange.codecs",
        ),
        ("kind = 'federated'\nsecure = {}\nexchange = { feedback = true }", "$.exchange.feedback"),
        ("kind = 'federated'\nsecure = {}\nexchange = { plan = 'ring' }", "$.exchange.plan"),
        ("kind = 'federated'\nsecure = {}\nexchange = { fragments = 2 }", "$.exchange.fragments"),
        ("kind = 'federated'\nsecure = {}\njoin = { policy = 'open' }", "$.join.policy"),
        (
            "kind = 'federated'\nsecure = {}\ntrain = { target_samples = 9 }",
            "$.train.target_samples",
        ),
        (
            "kind = 'federated'\nsecure = {}\ntrain = { inner = { samples = 9 } }",
            "$.train.inner.samples",
        ),
        ("privacy = { noise = 4.0, clip = 1.0, delta = 1e-5, stop_at_epsilon = 9.0 }", "$.privacy"),
        (
            "kind = 'federated'\nprivacy = { noise = 4.0, clip = 1.0, delta = 1e-5, stop_at_epsilon = 9.0 }\ntrain = { rounds = 9 }",
            "$.privacy",
        ),
        (f"{PRIVATE}train = {{ sync_every = 9 }}", "$.train.rounds"),
        (f"{PRIVATE}train = {{ rounds = 1000 }}", "$.train.rounds"),
        (
            f"{PRIVATE}train = {{ rounds = 9 }}".replace(
                "secure = {}", "secure = { max_weight = 9 }"
            ),
            "$.secure.max_weight",
        ),
        (
            f"{PRIVATE}train = {{ rounds = 9 }}".replace("secure = {}", "secure = { reach = 9.0 }"),
            "$.secure.reach",
        ),
        (
            f"{PRIVATE}train = {{ rounds = 9 }}".replace("clip", "clip_rate = 0.5, clip"),
            "$.privacy.clip_rate",
        ),
        (
            f"{PRIVATE}train = {{ rounds = 9 }}".replace("clip", "count_noise = 9.0, clip"),
            "$.privacy.count_noise",
        ),
        (
            f"{PRIVATE}train = {{ rounds = 9 }}".replace(
                "clip", "quantile = 0.5, count_noise = 2.0, clip"
            ),
            "$.privacy.count_noise",
        ),
        (
            f"{PRIVATE}train = {{ rounds = 9 }}".replace("clip", "quantile = 1.0, clip"),
            "$.privacy.quantile",
        ),
        (
            f"{PRIVATE}train = {{ rounds = 9 }}".replace("clip", "colluding = 3, clip"),
            "$.privacy.colluding",
        ),
        (f"{PRIVATE}train = {{ rounds = 9 }}".replace("delta = 1e-5, ", ""), "$.privacy.delta"),
        (
            "kind = 'federated'\nsecure = {}\ntrain = { share = 0.9, inner = { samples = 9 } }",
            "$.train.inner.samples",
        ),
    ],
)
def test_a_federated_run_that_would_not_be_what_it_says(text: str, key: str) -> None:
    refuses(text, key)


ASYNCHRONOUS = "exchange = { arrivals = {} }\n"


def test_asynchronous_diloco_waits_for_a_quorum_or_for_groups() -> None:
    def manifest(text: str) -> m.Manifest:
        return m.parse_manifest(
            f'schema = 1\nname = "x"\ntrain = {{ sync_every = 40 }}\nexchange = {{ {text} }}'
        )

    plain = manifest("arrivals = {}")
    assert plain.settings().arrivals == ArrivalSettings(
        1, fading=Fading(1.0), window=GraceWindow(0.0)
    )
    assert (plain.settings().reducer, plain.settings().site) == ("mean", None)
    assert manifest("").settings().arrivals is None
    quorum = manifest(
        'arrivals = { quorum = 2, grace = "step", dylu = true, least = 4, staleness = "constant" }'
    )
    assert quorum.settings().arrivals == ArrivalSettings(
        2, fading=Fading(1.0, "constant"), window=GraceWindow(None), dynamic=DynamicSteps(40, 4)
    )
    groups = manifest('arrivals = { wait = "groups", longest = 2.5, slack = 2.0, alpha = 0.8 }')
    assert groups.settings().arrivals == ArrivalSettings(
        fading=Fading(0.8), groups=Groups(40, 100, 40, 2.0)
    )
    assert (groups.settings().reducer, groups.settings().outer.kind) == ("sum", "sgd")
    for found in (plain, quorum, groups):
        assert m.decode_manifest(found.encode()) == found
        assert m.parse_manifest(as_toml(found)) == found
        assert any("arrivals" in line or "groups" in line for line in describe_lines(found))
    line = next(line for line in describe_lines(quorum) if line.startswith("rounds"))
    assert "of 2 or more arrivals, held open for one inner step" in line
    assert "held open for 2.5 s" in "\n".join(
        describe_lines(manifest("arrivals = { grace = 2.5 }"))
    )


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("exchange = { arrivals = { quorum = 0 } }", "$.exchange.arrivals.quorum"),
        ("exchange = { arrivals = { grace = 'turn' } }", "$.exchange.arrivals.grace"),
        ("exchange = { arrivals = { grace = -1.0 } }", "$.exchange.arrivals.grace"),
        ("exchange = { arrivals = { least = 3 } }", "$.exchange.arrivals.least"),
        ("exchange = { arrivals = { dylu = true, least = 101 } }", "$.exchange.arrivals.least"),
        ("exchange = { arrivals = { longest = 3.0 } }", "$.exchange.arrivals.longest"),
        (
            "exchange = { arrivals = { wait = 'groups', quorum = 3 } }",
            "$.exchange.arrivals.quorum",
        ),
        ("exchange = { arrivals = { staleness_b = 2 } }", "$.exchange.arrivals.staleness_b"),
        (
            "exchange = { arrivals = { staleness = 'constant', staleness_a = 0.5 } }",
            "$.exchange.arrivals.staleness_a",
        ),
        (f"{ASYNCHRONOUS}kind = 'federated'", "$.exchange.arrivals"),
        (f"{ASYNCHRONOUS}train = {{ round_s = 60 }}", "$.train.sync_every"),
        (f"{ASYNCHRONOUS}train = {{ overlap = 'late' }}", "$.train.overlap"),
        (f"{ASYNCHRONOUS}train = {{ method = 'local_sgd' }}", "$.train.method"),
        (f"{ASYNCHRONOUS}train = {{ local_after = 3 }}", "$.train.local_after"),
        (f"{ASYNCHRONOUS}robust = {{ rule = 'median', f = 1 }}", "$.robust.rule"),
        (f"{ASYNCHRONOUS}robust = {{ momentum = 0.9 }}", "$.robust.momentum"),
        (f"{ASYNCHRONOUS}quorum = {{ lying = 1 }}", "$.quorum.lying"),
        ("robust = { rule = 'krum', f = 1 }\nquorum = { lying = 1 }", "$.robust.rule"),
        (
            "robust = { rule = 'geometric_median', f = 1 }\nquorum = { lying = 1 }",
            "$.robust.rule",
        ),
        (
            "robust = { rule = 'median', f = 1, before = ['nnm'] }\nquorum = { lying = 1 }",
            "$.robust.rule",
        ),
        (
            f"{ASYNCHRONOUS}join = {{ policy = 'open', probation = 3 }}",
            "$.join.probation",
        ),
        ("exchange = { arrivals = {}, fragments = 2 }", "$.exchange.fragments"),
        ("exchange = { arrivals = {}, codec = 'stat2' }", "$.exchange.feedback"),
        (
            f"{ASYNCHRONOUS}model = {{ entry = 'local:x' }}\ntrain = {{ outer = {{ optimizer = 'sgd', lr = 1.0 }} }}"
            "\nadapters = { mode = 'alternate' }",
            "$.exchange.arrivals",
        ),
        ("train = { outer = { every = 3 } }", "$.train.outer.every"),
        (
            "train = { outer = { optimizer = 'heloco', lr = 1.0, momentum = 0.6, spread = 0.5 } }",
            "$.train.outer.spread",
        ),
        ("train = { outer = { agreement = 0.2 } }", "$.train.outer.agreement"),
        ("train = { outer = { momentum_dtype = 'fp16' } }", "$.train.outer.momentum_dtype"),
        (
            "train = { outer = { optimizer = 'sgd', lr = 1.0, momentum_dtype = 'bf16' } }",
            "$.train.outer.momentum_dtype",
        ),
        (
            "train = { method = 'local_sgd', outer = { momentum_dtype = 'bf16' } }",
            "$.train.outer.momentum_dtype",
        ),
    ],
)
def test_asynchronous_diloco_that_cannot_be(text: str, key: str) -> None:
    refuses(text, key)


def test_a_federated_manifest_says_what_its_rounds_are_and_who_sees_what() -> None:
    plain = m.parse_manifest('schema = 1\nname = "x"')
    open_ = m.parse_manifest(
        'schema = 1\nname = "x"\nkind = "federated"\nfederated = { method = "fedavgm", momentum = 0.5 }'
    )
    secure = m.parse_manifest('schema = 1\nname = "x"\nkind = "federated"\nsecure = {}')
    assert not any(word in plain.encode() for word in (b"mode", b"federated", b"secure"))
    assert (
        open_.settings().outer.kind,
        open_.settings().outer.lr,
        open_.settings().outer.momentum,
    ) == ("momentum", 1.0, 0.5)
    assert (open_.settings().codec, open_.settings().reducer, open_.settings().secure) == (
        "int8_dither",
        "mean",
        None,
    )
    assert (secure.settings().codec, secure.settings().reducer, secure.settings().outer.kind) == (
        "bits",
        "copy",
        "sgd",
    )
    assert secure.settings().secure == SecureSettings(3, 16.0, 1)
    private = m.parse_manifest(f'schema = 1\nname = "x"\n{PRIVATE}train = {{ rounds = 40 }}')
    assert private.settings().privacy == PrivacySettings(4.0, 1.0, 1e-5, 9.0, 1)
    assert any(
        "spends epsilon 8" in line and "delta 1e-05" in line for line in describe_lines(private)
    )
    for manifest in (open_, secure, private):
        assert m.decode_manifest(manifest.encode()) == manifest
    assert any("sees that part of your update" in line for line in describe_lines(open_))
    assert any("nobody sees your update" in line for line in describe_lines(secure))
    assert not any("sees that part of your update" in line for line in describe_lines(secure))


def test_run_id_is_the_hash_of_everything() -> None:
    run_id = m.parse_manifest(EXAMPLE).run_id
    assert re.fullmatch(r"[a-z2-7]{26}", run_id)
    assert m.parse_manifest(EXAMPLE + "# a comment").run_id == run_id
    assert (
        m.parse_manifest(EXAMPLE.replace('name = "tide"', 'description = ""\nname = "tide"')).run_id
        == run_id
    )
    assert m.parse_manifest(EXAMPLE.replace("0.6", "0.61")).run_id != run_id


@settings(max_examples=60, deadline=None)
@given(manifests)
def test_round_trip(manifest: m.Manifest) -> None:
    data = manifest.encode()
    assert m.decode_manifest(data) == manifest
    assert m.decode_manifest(data).encode() == data


@settings(max_examples=60, deadline=None)
@given(manifests)
def test_a_manifest_as_text_is_the_same_manifest(manifest: m.Manifest) -> None:
    assert m.parse_manifest(as_toml(manifest)) == manifest


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_bytes_are_refused(data: bytes) -> None:
    for decode in (m.decode_manifest, m.decode_signed):
        with pytest.raises((ConfigError, VersionMismatchError)):
            decode(data)


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("[train.outer]\nlrr = 1.0", "$.train.outer.lrr", "Did you mean `lr`?"),
        ("[trian]\nx = 1", "$.trian", "Did you mean `train`?"),
        (
            "[train.inner]\nlearning_rate = 1e-4",
            "$.train.inner.learning_rate",
            "Did you mean `lr`?",
        ),
        ("[train.inner]\nwarmup_steps = 4", "$.train.inner.warmup_steps", "Did you mean `warmup`?"),
        ("[model]\nmax_seq_length = 8", "$.model.max_seq_length", "here it is [data] length"),
        ("[train]\nnum_epochs = 3", "$.train.num_epochs", "a run lasts [train] rounds"),
        ("[model]\nload_in_4bit = true", "$.model.load_in_4bit", "qlora"),
        ('[train.outer]\nlr = "big"', "$.train.outer.lr", "Change $.train.outer.lr"),
        (
            "[train.outer]\nmomentum = 1.0",
            "$.train.outer.momentum",
            "Change $.train.outer.momentum",
        ),
        ('[exchange]\ncodec = "int7"', "$.exchange.codec", ", ".join(CODECS)),
        ('[exchange]\nplan = "star"', "$.exchange.plan", "butterfly, ring, two-level"),
        (
            '[exchange.codecs]\n"*.norm.*" = "half"',
            "$.exchange.codecs.*.norm.*",
            ", ".join(CODECS),
        ),
        ("[train]\nsync_every = 0", "$.train.sync_every", "Change $.train.sync_every"),
        ("[model.config]\nwidht = 8", "$.model.config.widht", "Did you mean `width`?"),
        ("[model.config]\nwidth = 100\nheads = 3", "$.model.config.heads", "heads = 2"),
        ("[model]\nparameters = 7", "$.model.parameters", "parameters = 865024"),
        ("[train]\nsync_every = 1\nround_s = 1.0", "$.train.round_s", "Leave it out"),
    ],
)
def test_what_is_wrong_is_named(text: str, key: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        m.parse_manifest(f'schema = 1\nname = "x"\n{text}')
    assert caught.value.key == key
    assert key in caught.value.message
    assert words in f"{caught.value.why}\n{caught.value.hint}"


@pytest.mark.parametrize(("removed", "instead"), REMOVED.items())
def test_a_codec_that_was_removed_is_refused_with_another(removed: str, instead: str) -> None:
    words = f"codec '{removed}' was removed: use {instead}"
    for table, key in (
        (f'codec = "{removed}"', "$.exchange.codec"),
        (f'codecs = {{ "*.norm.*" = "{removed}" }}', "$.exchange.codecs.*.norm.*"),
    ):
        with pytest.raises(ConfigError) as caught:
            m.parse_manifest(f'schema = 1\nname = "x"\n[exchange]\n{table}', "run.toml")
        assert caught.value.message == f"run.toml: {key}: {words}"
        assert (caught.value.key, caught.value.code) == (key, "E413")
    manifest = m.parse_manifest('schema = 1\nname = "x"')
    older = msgspec.structs.replace(
        manifest, exchange=msgspec.structs.replace(manifest.exchange, codec=removed)
    )
    with pytest.raises(VersionMismatchError) as told:
        m.decode_manifest(older.encode())
    assert told.value.message == f"the run's {words}"


def test_a_value_that_its_type_describes_is_described() -> None:
    with pytest.raises(ConfigError) as caught:
        m.parse_manifest('schema = 1\nname = "my run"')
    assert (caught.value.key, caught.value.hint) == (
        "$.name",
        'Write 1 to 64 letters, digits, dots, dashes, underscores, such as `name = "my-run"`.',
    )


@pytest.mark.parametrize(
    ("text", "key"),
    [("schema = 1", "$.name"), ('name = "x"', "$.schema"), ('schema = 2\nname = "x"', "$.schema")],
)
def test_required_keys(text: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        m.parse_manifest(text)
    assert caught.value.key == key


def test_toml_errors_have_a_line() -> None:
    with pytest.raises(ConfigError, match=r"run\.toml is not valid TOML: .*line 2"):
        m.parse_manifest("schema = 1\nname = tide", "run.toml")


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        m.load_manifest(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        m.load_manifest(tmp_path / "binary.toml")
    (tmp_path / "huge.toml").write_bytes(b"#" * 70_000)
    for endless in (tmp_path / "huge.toml", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="more than"):
            m.load_manifest(endless)
    (tmp_path / "deep.toml").write_text("schema = 1\nname = " + 5000 * "[")
    with pytest.raises(ConfigError, match=r"deep\.toml is not valid TOML"):
        m.load_manifest(tmp_path / "deep.toml")


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b'\xef\xbb\xbfschema = 1\r\nname = "tide"\r\n')
    assert m.load_manifest(tmp_path / "run.toml") == m.parse_manifest('schema = 1\nname = "tide"\n')


def test_newer_schema_is_a_version_mismatch() -> None:
    newer = msgspec.msgpack.encode({"schema": 9, "name": "x", "novelty": 1})
    with pytest.raises(VersionMismatchError):
        m.decode_manifest(newer)


@pytest.mark.parametrize(
    ("exchange", "swarm", "federated"),
    [
        ("", "butterfly", "butterfly"),
        ('plan = "ring"', "ring", "ring"),
        ('plan = "two-level"', "two-level", "checked"),
        ('plan = "three-level"', "three-level", "three-level"),
        ('plan = "two-level"\ncheck = true', "checked", "checked"),
        ('plan = "two-level"\ncheck = false', "two-level", "two-level"),
    ],
)
def test_heads_of_sites_are_checked_where_the_manifest_says_so_and_in_federated_runs(
    exchange: str, swarm: str, federated: str
) -> None:
    for kind, ways in (("swarm", swarm), ("federated", federated)):
        assert (
            m.parse_manifest(f'schema = 1\nname = "x"\nkind = "{kind}"\n[exchange]\n{exchange}\n')
            .settings()
            .plan
            == ways
        )


EARLIER = json.loads((Path(__file__).parents[1] / "earlier_manifests.json").read_text())
"""What releases before wrote for these two texts, every field they knew; ``added``: by what the
release was newer than the one above.
"""
PLAIN = 'schema = 1\nname = "tide"\n'
EXCHANGE_AS_RELEASED = '[exchange]\ncodec = "int8"\nexact = false\n'
OUTER_AS_RELEASED = '[train.outer]\noptimizer = "nesterov"\nlr = 0.7\nmomentum = 0.9\n'
"""Outer values of bytes that leave them out. A text that leaves them out has others."""
RICH = (
    PLAIN
    + """
description = "four words in here"
[model]
entry = "builtin:gpt"
config = { width = 64, layers = 2 }
[train]
round_s = 30
[train.outer]
momentum = 0.6
lr = 1
[exchange]
codec = "bf16"
"""
)


@pytest.mark.parametrize("form", EARLIER, ids=lambda form: f"{form['settings']}, {form['added']}")
def test_a_run_made_by_an_earlier_release_can_be_joined(
    form: dict[str, str], tmp_path: Path
) -> None:
    """And means what it did: its outer values are those that it was made with, though a new text
    without any has others; so are codecs. The number of lanes has another default since then.
    """
    data = base64.b64decode(form["bytes"])
    manifest = m.decode_manifest(data)
    now = m.parse_manifest({"plain": PLAIN + OUTER_AS_RELEASED, "rich": RICH}[form["settings"]])
    told = msgspec.msgpack.decode(data)
    lanes = msgspec.structs.replace(now.lanes, **told.get("lanes", {}))
    codec = told.get("exchange", {}).get("codec", "int8")
    exchange = msgspec.structs.replace(now.exchange, codec=codec, exact=False)
    assert manifest == msgspec.structs.replace(now, lanes=lanes, exchange=exchange)
    organiser, paths = Identity.generate(), find_paths(tmp_path)
    signed = m.SignedManifest(data, organiser.peer, organiser.sign(DOMAIN, data))
    paths.ensure()
    m.save_run(paths, m.decode_signed(signed.encode()))
    kept = m.load_run(paths, "tide")
    assert kept.open() == manifest
    assert kept.run_id == m.run_id_of(data) != manifest.run_id  # the run keeps its id


def test_defaults_are_left_out_of_the_canonical_form() -> None:
    """So these bytes, and the ids of all runs that use nothing new, are the same in every later
    release.
    """
    plain = m.parse_manifest(PLAIN + OUTER_AS_RELEASED + EXCHANGE_AS_RELEASED)
    assert plain.encode() == msgspec.msgpack.encode(
        {"schema": 1, "name": "tide", "train": {"sync_every": 100}}
    )
    said = m.parse_manifest(
        f"{PLAIN}[train]\nsync_every = 100\n{EXCHANGE_AS_RELEASED}fragments = 1\n"
        + OUTER_AS_RELEASED
    )
    assert said.encode() == plain.encode()
    chosen_by_nobody = {"lr": 0.9, "momentum": 0.6, "warmup": 40, "hold": 40}
    assert m.parse_manifest(PLAIN).encode() == msgspec.msgpack.encode(
        {
            "schema": 1,
            "name": "tide",
            "train": {"sync_every": 100, "growth": 20, "outer": chosen_by_nobody},
            "exchange": {"codec": "int8_dither", "exact": True},
        }
    )


def test_a_run_goes_on_with_the_codec_that_its_bytes_mean() -> None:
    """Those of a text without a codec were int8 for all tensors, and leave it out; today's say
    int8_dither. Both read the same again from the text that is written of them.
    """
    plain = {"schema": 1, "name": "tide", "train": {"sync_every": 100}}
    earlier = m.decode_manifest(msgspec.msgpack.encode(plain))
    assert (earlier.settings().codec, earlier.settings().exact) == ("int8", False)
    assert 'codec = "int8"\nexact = false\n' in as_toml(earlier)
    now = m.parse_manifest(PLAIN)
    assert (now.settings().codec, now.settings().exact) == ("int8_dither", True)
    masked = f"{PLAIN}kind = 'federated'\nsecure = {{}}\n"
    secured = m.parse_manifest(masked)
    assert not secured.exchange.exact
    assert secured.exchange.codec == "int8"  # as in bytes that say nothing of it
    for found in (earlier, now, secured):
        assert m.parse_manifest(as_toml(found)) == found
        assert m.decode_manifest(found.encode()) == found
    for key in ("codec = 'bf16'", "error = 0.05"):
        partly = m.parse_manifest(f"{PLAIN}exchange = {{ {key} }}")
        assert partly.settings().exact
        assert m.parse_manifest(as_toml(partly)) == partly
    with pytest.raises(ConfigError, match=r"\$\.exchange\.exact") as caught:
        m.parse_manifest(masked + "[exchange]\nexact = true\n")
    assert caught.value.key == "$.exchange.exact"


@pytest.mark.parametrize(
    ("later", "words"),
    [
        ({"novelty": 1}, "newer atoll"),
        ({"train": {"method": "magic", "sync_every": 100}}, "newer atoll"),
        ({"exchange": {"codec": "int3"}}, "codec 'int3' is not known"),
        ({"exchange": {"codecs": {"x": "int3"}}}, "codec 'int3' is not known"),
    ],
)
def test_what_only_a_later_release_knows_asks_for_that_release(
    later: dict[str, Any], words: str
) -> None:
    with pytest.raises(VersionMismatchError, match=words) as told:
        m.decode_manifest(
            msgspec.msgpack.encode(
                {"schema": 1, "name": "tide", "train": {"sync_every": 100}, **later}
            )
        )
    assert told.value.hint == "pip install -U atoll"


@pytest.mark.parametrize(
    "plain",
    [
        {"name": "x", "schema": 1, "train": {"sync_every": 100}},  # keys in another order
        {
            "schema": 1,
            "name": "x",
            "train": {"sync_every": 100, "outer": {"lr": 1}},
        },  # another number than the one that is read
        {
            "schema": 1,
            "name": "x",
            "train": {"sync_every": 100},
            "exchange": {"codecs": {"b": "fp32", "a": "fp32"}},
        },  # these are sorted
        {"schema": 1, "name": "x"},  # what ends a round is not a default
    ],
)
def test_other_bytes_of_the_same_meaning_are_refused(plain: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="canonical"):
        m.decode_manifest(msgspec.msgpack.encode(plain))


def test_a_key_that_comes_twice_is_refused() -> None:
    once = msgspec.msgpack.encode({"schema": 1, "name": "x", "train": {"sync_every": 100}})
    assert m.decode_manifest(once).name == "x"
    with pytest.raises(ConfigError, match="canonical"):
        m.decode_manifest(bytes([once[0] + 1]) + once[1:9] + once[1:])


def test_only_canonical_bytes_count() -> None:
    plain = msgspec.msgpack.decode(m.parse_manifest(EXAMPLE).encode())
    backwards = msgspec.msgpack.encode(dict(reversed(list(plain.items()))))
    with pytest.raises(ConfigError, match="canonical"):
        m.decode_manifest(backwards)
    with pytest.raises(ConfigError, match="canonical"):
        m.decode_manifest(msgspec.msgpack.encode({"schema": 1, "name": "x"}))


def test_signature_binds_organiser_and_bytes() -> None:
    organiser, manifest = Identity.generate(), m.parse_manifest(EXAMPLE)
    signed = m.sign_manifest(manifest, organiser)
    again = m.decode_signed(signed.encode())
    assert again == signed
    assert again.open() == manifest
    assert again.run_id == manifest.run_id
    other = Identity.generate()
    forged = msgspec.structs.replace(signed, organiser=other.peer)
    changed = msgspec.structs.replace(
        signed, manifest=m.parse_manifest(EXAMPLE + "# ").encode()[:-1]
    )
    for bad in (forged, changed, msgspec.structs.replace(signed, signature=bytes(64))):
        with pytest.raises(BadSignatureError):
            bad.open()


def test_runs_are_kept_and_found(tmp_path: Path) -> None:
    paths = find_paths(tmp_path)
    paths.ensure()
    signed = m.sign_manifest(m.parse_manifest(EXAMPLE), Identity.generate())
    folder = m.save_run(paths, signed)
    assert (folder / "manifest").stat().st_mode & 0o777 == 0o600
    assert (
        m.load_run(paths, signed.run_id)
        == m.load_run(paths, signed.run_id[:5])
        == m.load_run(paths, "tide")
        == signed
    )
    with pytest.raises(ConfigError, match="no run 'ebb'"):
        m.load_run(paths, "ebb")
    second = m.sign_manifest(m.parse_manifest(EXAMPLE.replace("0.6", "0.5")), Identity.generate())
    m.save_run(paths, second)
    with pytest.raises(ConfigError, match="fits 2 runs"):
        m.load_run(paths, "tide")
    (folder / "manifest").write_bytes(b"garbage")
    with pytest.raises(StorageError, match="damaged"):
        m.list_runs(paths)


def test_limits_of_operations_are_the_runs_and_leave_no_byte_where_they_are_the_defaults() -> None:
    plain = m.parse_manifest(EXAMPLE)
    same = m.parse_manifest(EXAMPLE + "[limits]\noperations = 64\nmember_bytes = 268435456\n")
    other = m.parse_manifest(EXAMPLE + "[limits]\nmember_bytes = 1000\n")
    assert plain.encode() == same.encode()
    assert b"limits" not in plain.encode()
    assert other.run_id != plain.run_id
    assert m.decode_manifest(other.encode()).settings().limits.member_bytes == 1000
    assert plain.settings().limits.operation_elements == 1 << 32


@pytest.mark.parametrize(
    "line", ["operations = 3", "operation_elements = 0", "member_bytes = -1", "disk = 5"]
)
def test_limits_out_of_range_are_refused_by_name(line: str) -> None:
    with pytest.raises(ConfigError) as told:
        m.parse_manifest(EXAMPLE + f"[limits]\n{line}\n")
    assert told.value.key is not None
    assert told.value.key.startswith("$.limits")


def test_wrong_values_and_unknown_and_missing_keys_are_told_together() -> None:
    text = (
        'schema = 1\n[train]\nstart_with = 0\nsync_evry = 3\nrounds = "x"\n[model]\nentry = "mlp"\n'
        '[federated]\nsample = true\n[network]\nbootstrap = ["a b"]\n[robust]\nkeep = "all"\n'
    )
    with pytest.raises(ConfigError) as caught:
        m.parse_manifest(text, "run.toml")
    told = caught.value
    assert told.key == "$.train.start_with"
    first = "run.toml: $.train.start_with must be a whole number of at least 1"
    assert told.message == f"{first} (the first of 9 faults)"
    for other in (
        "run.toml has an unknown key $.train.sync_evry. Did you mean `sync_every`?",
        "run.toml: $.train.rounds must be a whole number or left out, and is a text.",
        'run.toml: $.model.entry must be "builtin:gpt", or "local:NAME" with a name of your own.',
        "run.toml: $.federated.sample must be a whole number or a number or left out, and is true or false.",
        "run.toml: $.network.bootstrap[0] must be an address, such as /ip4/",
        "run.toml: $.robust.keep cannot be 'all'. Leave it out.",
        "run.toml lacks $.name.",
    ):
        assert f"Also, {other}" in told.why


def test_a_wrong_value_of_a_free_table_is_told_by_its_key() -> None:
    begin = 'schema = 1\nname = "x"\n[model]\nentry = "local:x"\n'
    for said, told, hint in (
        ('buffers = { "a.*" = "men", b = "own" }', "$.model.buffers.\"a.*\" cannot be 'men'", None),
        ("buffers = { a = 3 }", '$.model.buffers."a" must be a text, and is a whole number', None),
        (
            'buffers = { "" = "own" }',
            'the key of $.model.buffers."" must be a pattern of tensors\' names, without control '
            "characters",
            "Write a pattern of tensors' names, without control characters, or leave it out.",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            m.parse_manifest(begin + said, "run.toml")
        assert caught.value.message == f"run.toml: {told}"
        assert caught.value.hint == (hint or "Choose one of: mean, same, own")


def _patterns(kind: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The texts with a pattern in a type, each with where it is."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        for field in msgspec.structs.fields(kind):
            yield from _patterns(field.type, f"{path}.{field.encode_name}")
        return
    for meta in getattr(kind, "__metadata__", ()):
        if meta.pattern is not None:
            yield path, meta
    for inner in get_args(kind):
        yield from _patterns(inner, path)


def test_no_error_shows_a_regular_expression() -> None:
    found = dict(_patterns(m.Manifest, "$")) | dict(_patterns(NodeConfig, "$"))
    assert {"$.model.entry", "$.model.init", "$.name", "$.node.site"} <= found.keys()
    for path, meta in found.items():
        assert meta.description, path
    with pytest.raises(ConfigError) as caught:
        m.parse_manifest('schema = 1\nname = "x"\nmodel = { config = { a = "\\u0007" } }')
    assert caught.value.message.endswith('"a" must be one line without control characters')


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[robust]\nrule = 'median'\nf = 1\n[exchange]\nplan = 'ring'",
            '$.exchange.plan = "ring" cannot be combined with $.robust.rule = "median"',
        ),
        ("kind = 'seeded'", "$.join.allow cannot be combined with [btard]"),
        (PRIVATE, "$.train.rounds is missing, and [privacy] needs it"),
        (
            "kind = 'federated'\nsecure = {}\n[exchange]\nfragments = 2",
            "$.exchange.fragments = 2 cannot be combined with [secure]",
        ),
        (
            "kind = 'federated'\n[train]\noverlap = 'late'",
            '$.train.overlap is given, and a run of kind = "federated" has no such setting',
        ),
    ],
)
def test_settings_that_exclude_each_other_are_a_sentence(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        m.parse_manifest(f'schema = 1\nname = "x"\n{text}', "run.toml")
    assert caught.value.message.removesuffix(" (the first of 2 faults)") == f"run.toml: {words}"


def test_memory_and_disk_that_a_run_asks_for() -> None:
    def sized(more: str = "") -> m.Manifest:
        model = '[model]\nentry = "local:x"\nparameters = 1_000_000_000\n'
        return m.parse_manifest(f'schema = 1\nname = "x"\n{model}{more}')

    plain = sized('[train]\nsync_every = 100\n[exchange]\ncodec = "int8"\nexact = false\n')
    found = describe(plain)
    # of a run of two with 2 million: 37.4 after 45 rounds, and a third state while one is written
    assert found["disk_bytes"] == round(10**9 * (3 * 8 + 21 * (1 + 4 / 256)))
    assert (found["join_bytes"], found["join_s"]) == (8 * 10**9, 640.0)
    assert describe(plain, 1e8)["join_s"] == 80.0
    assert found["gpu_bytes"] is None
    assert found["host_bytes"] == round(10**9 * host_bytes(plain.settings()))
    assert any(line.startswith("memory   about 7.5 GiB between") for line in describe_lines(plain))
    # scripts/bench/bench_memory.py, 20 million parameters: 6.07 in the node, 2.04 in the script
    assert host_bytes(plain.settings()) == pytest.approx(8.11, rel=0.05)
    assert found["host_peak_bytes"] == round(10**9 * host_peak_bytes(plain.settings()))
    assert host_peak_bytes(plain.settings()) == pytest.approx(17.82, rel=0.05)  # the same bench
    kept = sized('[exchange]\ncodec = "int8"\nfeedback = true\n').settings()
    assert host_bytes(kept) == host_bytes(plain.settings()) + 4
    adam = sized('[train.outer]\noptimizer = "adam"\nlr = 0.1\nmomentum = 0.9\n').settings()
    assert state_bytes(adam) == 12
    assert host_bytes(adam) == host_bytes(plain.settings()) + 4


def test_momenta_in_bf16_take_two_bytes_and_an_old_member_refuses_them() -> None:
    text = 'schema = 1\nname = "x"\n[model]\nentry = "local:x"\nparameters = 1_000_000\n'
    plain = m.parse_manifest(text + '[train.outer]\npreset = "published"\n')
    halved = m.parse_manifest(
        text + '[train.outer]\npreset = "published"\nmomentum_dtype = "bf16"\n'
    )
    assert halved.run_id != plain.run_id
    assert b"momentum_dtype" not in plain.encode()
    assert halved.settings().outer.momentum_dtype == "bf16"
    assert describe(halved)["join_bytes"] == 6_000_000
    assert host_bytes(plain.settings()) - host_bytes(halved.settings()) == 2
    for kind, rule in RULES.items():
        outer = OuterSettings(kind=kind, lr=0.1, momentum_dtype="bf16")
        if rule.momenta:
            step = OuterStep(outer)
            rest = rule.numbers
            assert state_bytes(RunSettings(outer=outer)) == 4 + 4 * (step.state_numel(2) - rest) / 2

    # to a release without the field it is a name as unknown as this one is to us
    unknown = halved.encode().replace(b"momentum_dtype", b"momentum_dtypf")
    with pytest.raises(VersionMismatchError, match="newer atoll"):
        m.decode_manifest(unknown)


def test_state_vectors_are_those_of_the_rules() -> None:
    assert get_args(OuterRule) == tuple(OUTER_RULES)
    assert RULES.keys() - {"momentum"} == OUTER_RULES.keys()  # that one is of a federated method
    for kind, facts in OUTER_RULES.items():
        assert (facts.vectors, facts.momenta) == (RULES[kind].vectors, RULES[kind].momenta), kind
        assert {*facts.reads} <= {*OuterTable.__struct_fields__}


@pytest.mark.parametrize(
    ("tree", "plan"),
    [
        ('"full"', "butterfly"),
        ('"ring"', "ring"),
        ("{ lab = 4, home = 1 }", "two-level"),
        ("{ lab = { box-1 = 4, box-2 = 4 }, home = 1 }", "three-level"),
    ],
)
def test_a_tree_is_compiled_to_a_plan(tree: str, plan: str) -> None:
    found = m.parse_manifest(f"{PLAIN}[exchange]\ntree = {tree}\n")
    assert (found.exchange.plan, found.settings().plan) == (plan, plan)
    assert m.decode_manifest(found.encode()) == found
    if plan != "butterfly":
        m.parse_manifest(f'{PLAIN}[exchange]\ntree = {tree}\nplan = "{plan}"\n')
    other = "two-level" if plan != "two-level" else "ring"
    with pytest.raises(ConfigError, match="cannot be combined with its tree") as caught:
        m.parse_manifest(f'{PLAIN}[exchange]\ntree = {tree}\nplan = "{other}"\n')
    assert caught.value.key == "$.exchange.plan"
    lied = msgspec.structs.replace(
        found, exchange=msgspec.structs.replace(found.exchange, plan=other)
    )
    with pytest.raises(ConfigError):
        m.decode_manifest(lied.encode())


@pytest.mark.parametrize(
    ("settings", "key", "says"),
    [
        ("[exchange]\ntree = { a = { b = { c = 1 } } }", "$.exchange.tree", "within a host"),
        ("[exchange]\ntree = { a = 4096, b = 1 }", "$.exchange.tree", "4,097 peers"),
        ("[train]\nstart_with = 257", "$.train.start_with", "at most 256 members"),
        (
            "[exchange.arrivals]\nquorum = 257",
            "$.exchange.arrivals.quorum",
            "at most 256 members",
        ),
    ],
)
def test_members_beyond_what_a_plan_bears_are_refused(settings: str, key: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        m.parse_manifest(f"{PLAIN}{settings}\n")
    assert caught.value.key == key
    assert says in f"{caught.value.message} {caught.value.why}"
    m.parse_manifest(f'{PLAIN}[train]\nstart_with = 4096\n[exchange]\nplan = "three-level"\n')


@pytest.mark.parametrize("sync", ["all", "votes", "none"])
def test_no_run_chooses_how_much_a_power_cut_takes(sync: str) -> None:
    with pytest.raises(ConfigError, match=r"\[durability\] was removed") as caught:
        m.parse_manifest(f'{PLAIN}[durability]\nsync = "{sync}"\n')
    assert (caught.value.key, caught.value.code) == ("$.durability", "E411")


FINETUNE = """
schema = 1
name = "chats"
[model]
entry = "local:chats"
[data]
source = "local"
format = "messages"
length = 1024
loss = "all"
packing = false
held_out = 0.05
[train.inner]
optimizer = "adamw8bit"
tokens_per_step = 4096
micro_batch = 2
[prompts]
texts = ["What is a swarm?", "Two lines:\\nand another"]
"""


def test_data_and_prompts_of_a_run_that_fine_tunes() -> None:
    manifest = m.parse_manifest(FINETUNE)
    assert manifest.prompts is not None
    assert manifest.prompts.texts[1] == "Two lines:\nand another"
    assert (manifest.data.length, manifest.data.held_out) == (1024, 0.05)
    assert m.parse_manifest(as_toml(manifest)) == manifest
    assert m.decode_manifest(manifest.encode()) == manifest


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ('"local:chats"', '"builtin:gpt"', "$.data.format"),
        ('source = "local"', 'source = "shared"', "$.data.sha256"),
        ("held_out = 0.05", f'sha256 = "{"0" * 64}"', "$.data.sha256"),
        ("held_out = 0.05", 'path = "/etc/passwd"', "$.data.path"),
        ("held_out = 0.05", 'files = ["a.jsonl"]', "$.data.files"),
        ("held_out = 0.05", "held_out = 0.6", "$.data.held_out"),
        ("length = 1024", "length = 8", "$.data.length"),
        ('format = "messages"', 'format = "sharegpt"', "$.data.format"),
        ("micro_batch = 2", "micro_batch = 2\nin_backward = true", "$.train.inner.clip"),
        (
            "micro_batch = 2",
            "micro_batch = 2\nin_backward = true\nclip = 0",
            "$.train.inner.tokens_per_step",
        ),
        ('entry = "local:chats"\n[data]\nsource = "local"', 'hub = "a/b"\n[data]', "$.data.source"),
        ("texts = [", "texts = [5, ", "$.prompts.texts"),
        ("texts = [", "texts = []\nmore = [", "$.prompts"),
    ],
)
def test_data_that_a_run_cannot_say(old: str, new: str, key: str) -> None:
    assert old in FINETUNE
    with pytest.raises(ConfigError) as caught:
        m.parse_manifest(FINETUNE.replace(old, new))
    assert key in str(caught.value)


MASKED = (
    'schema = 1\nname = "x"\nkind = "federated"\nmodel = { entry = "builtin:gpt", config = { width = '
    "32, layers = 1, heads = 2, context = 16 } }\n"
)


@pytest.mark.parametrize(("sites", "weight", "bytes_"), [(3, 10_922, 12), (3, 10_923, 20)])
def test_bytes_of_a_round_go_by_the_words_of_the_masked_sum(
    sites: int, weight: int, bytes_: int
) -> None:
    found = describe(
        m.parse_manifest(
            f"{MASKED}[federated]\nwork = {{ epochs = 1 }}\n[train]\nstart_with = {sites}\n"
            f"[secure]\nmax_weight = {weight}\n"
        )
    )
    assert found["bytes_up_per_round"] == bytes_ * found["parameters"]


@pytest.mark.parametrize(
    ("work", "more", "room"),
    [
        ("epochs = 1", "", 4096.0),
        ("steps = 5000", "", 10_000.0),
        ("epochs = 1", 'reaches = { "atoll.steps" = 1e6 }', 1e6),
    ],
)
def test_masked_fednova_has_room_for_the_number_of_steps(work: str, more: str, room: float) -> None:
    text = f'{MASKED}[federated]\nmethod = "fednova"\nwork = {{ {work} }}\n'
    secure = f"[secure]\nmax_weight = 1000\n{more}\n"
    found = m.parse_manifest(text + secure).settings().secure
    assert found is not None
    assert found.reaches == {"atoll.steps": room}
    noisy = "[train]\nrounds = 2\n[privacy]\nnoise = 4.0\nclip = 1.0\ndelta = 1e-5\n"
    with pytest.raises(ConfigError, match="privacy"):
        m.parse_manifest(text + "[secure]\n" + noisy + "stop_at_epsilon = 9.0\n")
