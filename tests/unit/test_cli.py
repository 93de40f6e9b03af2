"""The command line in this process: what goes to stdout and stderr, JSON, exit statuses, errors."""

from __future__ import annotations

import importlib
import io
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from atoll.collectives.codec_costs import most_exact, round_bytes_per_value
from atoll.collectives.codec_names import CODECS
from atoll.collectives.errors import AtollError, ConfigError
from atoll.collectives.swarm import RunSettings
from atoll.node.cli import COMMANDS, GROUPS, cli, run, take_any_text
from atoll.node.cli.child import ChildCommand
from atoll.node.cli.join import tell_ending
from atoll.node.control.protocol import RunInfo
from atoll.node.home.durations import duration_s
from atoll.node.home.names import FIRST, SECOND, name_of
from atoll.node.home.output import (
    Terminal,
    as_json,
    bytes_text,
    count_text,
    error_object,
    iso_time,
    painted,
    short_peer,
    show_error,
    span_text,
)
from atoll.node.home.paths import find_paths
from atoll.node.manifest import load_run, parse_manifest
from atoll.node.run.capability import capability_name
from atoll.node.run.events import RoundCommittedEvent, read_event
from atoll.node.run.invite import make_invite
from atoll.node.run.status import RunStatus, read_run_status
from atoll.node.views.documents import (
    peers_table,
    run_lines,
    run_state,
    runs_table,
    status_text,
    too_few,
)
from atoll.node.views.live import RunProgress, TrainingView, sparkline
from atoll.security.identity import Identity, encode_base58
from atoll.security.key_file import load

RUN = 'schema = 1\nname = "tide"\n[model]\nconfig = { width = 32, layers = 1, heads = 2, context = 16 }\n'
ADDRESS = "/ip4/127.0.0.1/tcp/4150/p2p/12D3KooWBootPeer"
PEER_ADDRESS = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWDzMngWyanCrpqTHK4eTtc1Fy14yrqBAsJ2Rb8b5ZWeZM"


class Cli:
    """Runs commands in this process and keeps what they printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *argv: str) -> int:
        status = run(argv)
        self.out, self.err = self._capsys.readouterr()
        return status

    def json(self, *argv: str, status: int = 0) -> dict[str, Any]:
        assert self(*argv, "--json") == status, self.out + self.err
        assert len(self.out.splitlines()) == 1
        found: dict[str, Any] = json.loads(self.out)
        assert found["schema"] == 1
        return found


@pytest.fixture
def atoll(
    capsys: pytest.CaptureFixture[str],
    atoll_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Cli:
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run.toml").write_text(RUN)
    return Cli(capsys)


def test_init_is_idempotent_and_private(atoll: Cli, atoll_home: Path) -> None:
    first = atoll.json("init")
    assert first["created"] is True
    assert (atoll_home / "identity.key").stat().st_mode & 0o777 == 0o600
    again = atoll.json("init")
    assert (again["created"], again["peer"]) == (False, first["peer"])
    assert atoll.json("id") == {
        "schema": 1,
        "peer": first["peer"],
        "name": name_of(first["peer"]),
        "created": False,
    }
    assert atoll("id") == 0
    assert (atoll.out, atoll.err) == (first["peer"] + "\n", "")


def test_id_makes_the_key_that_every_other_command_uses(atoll: Cli, atoll_home: Path) -> None:
    assert atoll("id") == 0
    peer, key = atoll.out.strip(), atoll_home / "identity.key"
    assert atoll.err == f"A new key, in {key}; keep a copy\n"
    assert key.stat().st_mode & 0o777 == 0o600
    assert (atoll("id"), atoll.out, atoll.err) == (0, peer + "\n", "")
    again = atoll.json("init")
    assert (again["created"], again["peer"]) == (False, peer)


def test_a_readable_key_is_refused(atoll: Cli, atoll_home: Path) -> None:
    atoll("init")
    (atoll_home / "identity.key").chmod(0o640)
    for command in (("id",), ("init",), ("new", "run.toml"), ("up",)):
        assert atoll(*command) == 77
        assert atoll.out == ""
        assert atoll.err.startswith("E210 ")
    (atoll_home / "identity.key").chmod(0o600)
    (atoll_home / "identity.key").write_bytes(b"garbage")
    assert atoll.json("id", status=77)["error"]["code"] == "E210"


def test_new_stores_signs_and_invites(atoll: Cli, atoll_home: Path) -> None:
    found = atoll.json("new", "run.toml", "--bootstrap", ADDRESS, "--expires", "2h")
    signed = load_run(find_paths(atoll_home), "tide")
    made = signed.open()
    assert msgspec.structs.replace(made, nonce="") == parse_manifest(RUN)
    assert re.fullmatch("[0-9a-f]{16}", made.nonce)  # another organiser's is another run
    assert signed.organiser == load(atoll_home / "identity.key").peer == found["organiser"]
    assert found["run_id"] == signed.run_id
    shown = atoll.json("invite", "inspect", found["invite"])
    assert (shown["run_id"], shown["bootstrap"], shown["valid"]) == (signed.run_id, [ADDRESS], True)
    assert atoll("new", "run.toml") == 0
    assert "invite  none yet" in atoll.out
    assert "atoll up --background" in atoll.err
    assert [entry["name"] for entry in atoll.json("ls")["runs"]] == ["tide"]


def test_two_organisers_of_the_same_settings_have_two_runs(atoll: Cli, tmp_path: Path) -> None:
    ids = [
        atoll.json("new", "run.toml", "--home", str(tmp_path / home))["run_id"]
        for home in ("a", "b", "a")
    ]
    assert ids[0] != ids[1]
    assert ids[0] == ids[2]  # the same organiser's is the same run


def test_inspect_shows_all_that_is_in_an_invite_but_its_seed(atoll: Cli, atoll_home: Path) -> None:
    atoll("new", "run.toml")
    for_peer = Identity.generate().peer
    relay = f"/ip4/203.0.113.7/tcp/4150/p2p/{Identity.generate().peer}"
    addresses = [ADDRESS, f"{relay}/p2p-circuit/p2p/{for_peer}"]
    for more in ({}, {"peer": for_peer, "role": "observe"}, {"uses": 3}):
        invite = make_invite(
            load_run(find_paths(atoll_home), "tide").run_id,
            addresses,
            load(atoll_home / "identity.key"),
            now_s=time.time(),
            **more,  # pyright: ignore[reportArgumentType]
        )
        line, said = invite.encode(), invite.capability
        shown = atoll.json("invite", "inspect", line)
        assert shown == {
            "schema": 1,
            "run_id": invite.run_id,
            "organiser": invite.organiser,
            "id": capability_name(said.id),
            "issued": iso_time(said.issued_s),
            "expires": iso_time(invite.expires_s),
            "for": more.get("peer"),
            "role": more.get("role", "train"),
            "uses": more.get("uses"),
            "site": None,
            "bootstrap": addresses,
            "valid": True,
        }
        assert atoll("invite", "inspect", line) == 0
        values = [value for value in shown.values() if isinstance(value, str)]
        assert [value for value in [*values, *addresses] if value not in atoll.out] == []
        for secret in (line[7:40], invite.secret.hex(), encode_base58(invite.secret)):
            assert secret not in atoll.out + atoll.err + str(shown)


def test_an_invite_is_inspected_and_revoked_where_nobody_else_reads_it(
    atoll: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = atoll.json("new", "run.toml", "--bootstrap", ADDRESS)["invite"]
    Path("invite").write_text(line + "\n")
    shown = atoll.json("invite", "inspect", "--invite-file", "invite")
    monkeypatch.setattr(sys, "stdin", io.StringIO(line))
    assert atoll.json("invite", "inspect", "-") == shown
    assert atoll("invite", "inspect") == 2
    monkeypatch.setenv("ATOLL_INVITE", line)
    assert atoll.json("invite", "inspect") == shown
    revoked = atoll.json("invite", "revoke", "--invite-file", "invite")
    assert (revoked["id"], revoked["revoked"]) == (shown["id"], True)


def test_new_does_not_take_over_somebody_elses_run(atoll: Cli, atoll_home: Path) -> None:
    from atoll.node.manifest import save_run, sign_manifest

    paths = find_paths(atoll_home)
    paths.ensure()
    text = RUN.replace("schema = 1", 'schema = 1\nnonce = "same"')
    Path("run.toml").write_text(text)
    theirs = sign_manifest(parse_manifest(text), Identity.generate())
    save_run(paths, theirs)
    assert atoll("new", "run.toml") == 78
    assert "another organiser" in atoll.err
    assert load_run(paths, "tide") == theirs


def test_a_template_is_a_valid_manifest_whose_explanation_says_who_sees_what(
    atoll: Cli, tmp_path: Path
) -> None:
    assert atoll("new", "--template", "federated-hospital") == 0
    (tmp_path / "hospital.toml").write_text(atoll.out)
    found = atoll.json("validate", "--explain", "hospital.toml")
    assert (found["kind"], found["secure"]["threshold"], found["privacy"]["colluding"]) == (
        "federated",
        4,
        1,
    )
    assert any("spends epsilon 7" in line for line in found["explained"]["who_sees_what"])


def test_example_is_a_valid_manifest(atoll: Cli, tmp_path: Path) -> None:
    assert atoll("new", "--example") == 0
    (tmp_path / "example.toml").write_text(atoll.out)
    found = atoll.json("validate", "example.toml")
    assert (found["valid"], found["name"], found["parameters"]) == (True, "my-run", 865_024)
    one, exact = 1 + 4 / 256, most_exact("int8_dither", 865_024)  # at most, in fp32
    assert found["bytes_up_per_round"] == round(2 * (865_024 * one + exact * (4 - one)))


def test_validate_says_who_may_enter_and_how_an_open_run_begins(atoll: Cli, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    assert atoll("validate", "run.toml") == 0
    assert "join  " not in atoll.out
    file.write_text(RUN + '[join]\npolicy = "open"\nprobation = 4\nper_hour = 9\n')
    assert atoll("validate", "run.toml") == 0
    assert (
        "whoever has the run's id, on probation for 4 rounds; at most 9 become members in an hour"
        in atoll.out
    )
    assert "atoll trust" not in atoll.out
    file.write_text(
        RUN + '[join]\npolicy = "open"\nprobation = 4\n[robust]\nrule = "median"\nf = 1\n'
    )
    assert atoll("validate", "run.toml") == 0
    assert "the first round takes 3 members: let 2 in yourself (atoll trust PEER" in atoll.out


@pytest.mark.parametrize("codec", CODECS)
def test_validate_knows_all_codecs(atoll: Cli, tmp_path: Path, codec: str) -> None:
    (tmp_path / "run.toml").write_text(
        RUN + f'[exchange]\ncodec = "{codec}"\n[exchange.codecs]\n"*.norm.*" = "bf16"\n'
    )
    found = atoll.json("validate", "run.toml")
    assert (found["codec"], found["codecs"]) == (codec, {"*.norm.*": "bf16"})
    parameters, one = found["parameters"], round_bytes_per_value(codec)
    exact = most_exact(codec, parameters)  # of small tensors, in fp32
    assert found["bytes_up_per_round"] == round(2 * (parameters * one + exact * (4 - one)))
    assert atoll("validate", "run.toml") == 0
    assert f"({codec}, bf16 for *.norm.*)" in atoll.out
    assert atoll("new", "--example") == 0
    assert codec in atoll.out


def test_validate_explains_the_outer_values(atoll: Cli, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        RUN + '[train]\nsync_every = 20\nrounds = 500\n[train.outer]\npreset = "published"\n'
    )
    assert atoll("validate", "run.toml", "--explain") == 0
    assert 'why      outer values: preset "published": many rounds: as published' in atoll.out
    assert '"auto" takes "cold" for this run, nesterov with lr 0.9 and momentum 0.6 ' in atoll.out
    (tmp_path / "run.toml").write_text(RUN)
    found = atoll.json("validate", "run.toml", "--explain")
    assert found["explained"]["outer"].startswith(
        'preset "cold", which "auto" takes for this run: 40 short rounds of the plain mean, then'
    )
    assert found["outer"] == {
        "kind": "nesterov",
        "lr": 0.9,
        "momentum": 0.6,
        "momentum_dtype": "fp32",
        "warmup": 40,
        "hold": 40,
    }
    (tmp_path / "run.toml").write_text(RUN + "[train]\nrounds = 10\n")
    assert atoll("validate", "run.toml") == 0
    assert "outer nesterov lr 0.9 momentum 0.6 after 40 rounds of the plain mean" in atoll.out
    assert "; the first 115 shorter, from one step on, 1000 steps in all" in atoll.out
    assert "explained" not in atoll.json("validate", "run.toml")
    own = '[train.outer]\noptimizer = "nesterov"\nlr = 0.9\nmomentum = 0.6\nhold = 40\n'
    (tmp_path / "run.toml").write_text(RUN + f"[train]\nrounds = 40\n{own}")
    assert atoll("validate", "run.toml") == 0
    assert "momentum 0.6 after 40 rounds, which are all: the plain mean throughout" in atoll.out


def test_validate_names_the_key(atoll: Cli, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(RUN + "[train.outer]\nlrr = 1.0\n")
    assert atoll("validate", "bad.toml") == 78
    assert atoll.out == ""
    assert "$.train.outer.lrr" in atoll.err
    assert "Did you mean `lr`?" in atoll.err
    arrivals = (
        "[exchange.arrivals]\nquorom = 3\nwait = 'groop'\n"  # a table that is None if left out
    )
    (tmp_path / "worse.toml").write_text(RUN + arrivals)
    assert atoll("validate", "worse.toml") == 78
    assert "Did you mean `quorum`?" in atoll.err
    assert "Choose one of: quorum, groups" in " ".join(atoll.err.split())
    error = atoll.json("validate", "bad.toml", status=78)["error"]
    assert (error["code"], error["slug"], error["key"], error["exit"]) == (
        "E411",
        "unknown-key",
        "$.train.outer.lrr",
        78,
    )
    assert atoll.err == ""


def test_invites_are_checked(atoll: Cli) -> None:
    identity = Identity.generate()
    fresh, stale = (
        make_invite(parse_manifest(RUN).run_id, [ADDRESS], identity, now_s=now).encode()
        for now in (time.time(), time.time() - 9e6)
    )
    changed = fresh[:200] + ("a" if fresh[200] != "a" else "b") + fresh[201:]
    assert atoll("invite", "inspect", stale) == 77
    assert "EXPIRED" in atoll.out
    assert "E201" in atoll.err
    assert atoll.json("invite", "inspect", stale, status=77)["valid"] is False
    for invite in (stale, changed, "atoll2:nonsense", fresh[:-40]):
        assert atoll("join", invite, "--yes") == 77
        assert atoll.out == ""
        assert re.match(r"E20[12] ", atoll.err)


def test_a_new_federated_run_says_its_sites_work(atoll: Cli) -> None:
    plain = RUN.replace('name = "tide"', 'name = "tide"\nkind = "federated"', 1)
    Path("fed.toml").write_text(plain + "[train]\nsync_every = 50\n")
    for command in (("validate", "fed.toml"), ("new", "fed.toml"), ("join", "fed.toml", "--yes")):
        error = atoll.json(*command, status=78)["error"]
        assert error["key"] == "$.federated.work"
        assert error["hints"] == ["work = { steps = 50 } and leave [train] sync_every out"]
    Path("fed.toml").write_text(plain + "[federated]\nwork = { steps = 50 }\n")
    assert atoll("validate", "fed.toml") == 0, atoll.err
    assert atoll("new", "fed.toml") == 0, atoll.err


def test_an_invite_of_a_private_run_is_for_one_site_by_name(atoll: Cli) -> None:
    text = atoll.json("new", "--template", "federated-hospital")["text"]
    Path("private.toml").write_text(text)
    made = atoll.json("new", "private.toml", "--bootstrap", ADDRESS)
    assert made["invite"] is None
    assert "an invite of this run is for one site, by name" in atoll.err
    assert atoll("invite", "new", made["run_id"], "--bootstrap", ADDRESS) == 78
    assert "atoll invite new" in atoll.err
    assert "--name site-a" in atoll.err
    given = ("invite", "new", made["run_id"], "--bootstrap", ADDRESS, "--name")
    for wrong in ("Site A", "-a", "x" * 33):
        assert atoll(*given, wrong) == 2
    line = atoll.json(*given, "clinic-7")["invite"]
    assert atoll.json("invite", "inspect", line)["site"] == "clinic-7"
    assert atoll("invite", "inspect", line) == 0
    assert "site       clinic-7" in atoll.out
    atoll("new", "run.toml")
    assert atoll("invite", "new", "tide", "--bootstrap", ADDRESS, "--name", "clinic-7") == 2
    assert "--name is for runs with [privacy]" in atoll.err


def test_invite_new_needs_a_run_and_an_address(atoll: Cli) -> None:
    assert atoll("invite", "new") == 2
    atoll("new", "run.toml")
    assert atoll("invite", "new", "tide") == 78
    assert "there is no address" in atoll.err
    assert atoll("invite", "new", "tide", "--bootstrap", "here") == 78
    assert atoll("invite", "new", "--bootstrap", ADDRESS) == 0
    assert atoll.out.startswith("atoll2:")


@pytest.mark.parametrize(
    "command", [["peers"], ["leave"], ["recertify", "--without", "p", "--yes"]]
)
def test_commands_that_need_a_node(atoll: Cli, command: list[str]) -> None:
    assert atoll(*command) == 3
    assert (atoll.out, atoll.err.split()[0]) == ("", "E003")
    assert "atoll up" in atoll.err


def test_status_and_down_without_a_node(atoll: Cli) -> None:
    assert atoll.json("status", status=3) == {"schema": 1, "running": False}
    assert atoll("status") == 3
    assert atoll.out == "no node is running\n"
    assert atoll("status", "-q") == 3
    assert atoll.err == ""
    assert atoll.json("down") == {"schema": 1, "stopped": False}


def test_config(
    atoll: Cli, atoll_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert atoll.json("config", "show")["settings"]["node.port"] == 4150
    atoll.json("config", "set", "node.port", "4160")
    atoll.json("config", "set", "node.bootstrap", f"{PEER_ADDRESS}, /dnsaddr/boot.example.org")
    shown = atoll.json("config", "show")
    assert shown["settings"]["node.bootstrap"] == [PEER_ADDRESS, "/dnsaddr/boot.example.org"]
    assert shown["origins"]["node.port"] == str(atoll_home / "config.toml")
    (tmp_path / "atoll.toml").write_text("[node]\nport = 4170\n")
    assert atoll.json("config", "trust", "--yes")["trusted"] is True
    assert atoll.json("config", "show")["settings"]["node.port"] == 4170
    monkeypatch.setenv("ATOLL_NODE__PORT", "4180")
    assert atoll.json("config", "show")["origins"]["node.port"] == "ATOLL_NODE__PORT"
    assert atoll("config", "show", "--origin") == 0
    assert "node.port = 4180    # ATOLL_NODE__PORT" in atoll.out
    assert atoll.json("config", "path")["socket"] == str(atoll_home / "run" / "control.sock")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("node.prot", "1"), "node.port"),
        (("node.port", "many"), "whole number"),
        (("node.port", "99999"), "node.port"),
        (("port", "1"), "node.port"),
        (("node.max_up", "banana"), "not a bandwidth"),
        (("node.max_down", "1kbit/s"), "not enough"),
        (("node.bootstrap", "notanaddress"), "not the address of a peer"),
        (("node.bootstrap", "/dnsaddr/-x"), "not a name for addresses"),
        (("node.listen", "/ip4/example.org/tcp/4150"), "not an address to listen on"),
        (("node.announce", "/ip4/0.0.0.0/tcp/4150"), "not an address to announce"),
    ],
)
def test_config_refuses(
    atoll: Cli, atoll_home: Path, arguments: tuple[str, str], words: str
) -> None:
    assert atoll("config", "set", *arguments) == 78
    assert words in atoll.err
    assert not (atoll_home / "config.toml").exists()


def test_what_a_node_does_unasked_can_be_turned_off(
    atoll: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATOLL_NETWORK__LAN_DISCOVERY")  # the suite's own
    shown = atoll.json("config", "show")["settings"]
    assert (shown["network.lan_discovery"], shown["network.port_mapping"]) == (True, True)
    atoll.json("config", "set", "network.port_mapping", "false")
    monkeypatch.setenv("ATOLL_NETWORK__LAN_DISCOVERY", "false")
    shown = atoll.json("config", "show")["settings"]
    assert (shown["network.lan_discovery"], shown["network.port_mapping"]) == (False, False)
    assert (
        "neither true nor false"
        in atoll.json("config", "set", "network.lan_discovery", "no", status=78)["error"]["message"]
    )


def test_a_misspelt_setting_in_a_file_or_the_environment(
    atoll: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "atoll.toml").write_text("[node]\nprot = 1\n")
    assert (
        atoll.json("config", "show", "--config", "atoll.toml", status=78)["error"]["key"]
        == "$.node.prot"
    )
    (tmp_path / "atoll.toml").unlink()
    monkeypatch.setenv("ATOLL_NODE__PROT", "1")
    assert "ATOLL_NODE__PORT" in atoll.json("up", status=78)["error"]["hints"][0]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("jion",), "atoll join"),
        (("status", "--foo"), "--foo"),
        (("validate",), "RUN.toml"),
        (("demo", "--peers", "1"), "--peers"),
    ],
)
def test_usage_errors(atoll: Cli, argv: tuple[str, ...], words: str) -> None:
    assert atoll(*argv) == 2
    assert atoll.out == ""
    assert words in atoll.err
    assert atoll.json(*argv, status=2)["error"]["code"] == "E002"


@pytest.mark.parametrize("blank", ["", "  "])
@pytest.mark.parametrize(
    "argv",
    [
        "join _",
        "leave _",
        "leave _ --now",
        "status _",
        "peers _",
        "new _",
        "new run.toml --bootstrap _",
        "validate _",
        "invite new _",
        "invite new --bootstrap _",
        "invite inspect _",
        "export _ out",
        "export tide _",
        "config set _ 1",
        "explain _",
        "up --listen _",
        "up --bootstrap _",
        "status --home _",
        "demo --out _",
        "join tide --script _",
        "join tide --data _",
    ],
)
def test_an_empty_argument_is_refused(atoll: Cli, argv: str, blank: str) -> None:
    """It is a variable that is not set, most likely: never a run, a folder or an address."""
    atoll("new", "run.toml")
    assert atoll(*(blank if word == "_" else word for word in argv.split())) == 2
    assert atoll.out == ""
    assert atoll.err.startswith("E002 ")
    assert ("is empty" in atoll.err) == ("--script" not in argv and "--data" not in argv)
    assert "--help" in atoll.err


def test_a_setting_may_be_emptied(atoll: Cli) -> None:
    assert atoll.json("config", "set", "node.bootstrap", "")["value"] == []


def test_explain(atoll: Cli) -> None:
    for word in ("E110", "e110", "no-bootstrap"):
        assert atoll.json("explain", word)["code"] == "E110"
    assert atoll("explain") == 0
    assert "E301  76    your model is not the run's model" in atoll.out
    assert atoll("explain", "E999") == 2


def test_every_command_stands_under_one_heading_of_help(atoll: Cli) -> None:
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(listed) == sorted(COMMANDS)
    assert list(GROUPS) == ["Start", "Train", "Look", "Network", "Organise", "Research"]
    assert atoll("--help") == 0
    places = [atoll.out.index(f"\n{group}:\n") for group in GROUPS]
    assert places == sorted(places)


def test_all_faults_of_a_manifest_are_told_at_once(atoll: Cli, tmp_path: Path) -> None:
    faults = (
        'schema = 1\nname = "x"\n[exchange]\nfeedback_kept = 0.5\n[train]\nmax_steps = 9\n'
        '[join]\npolicy = "allow"\n'
    )
    (tmp_path / "bad.toml").write_text(faults)
    error = atoll.json("validate", "bad.toml", status=78)["error"]
    assert (error["code"], error["slug"]) == ("E414", "settings-exclude")
    assert error["key"] == "$.train.max_steps"
    assert error["message"].endswith("(the first of 3 faults)")
    for key in ("$.exchange.feedback_kept", "$.join.policy"):
        assert f"Also, bad.toml: {key}" in error["why"]
    assert error["hints"] == ["Mend all 3, then try again."]
    assert [(fault["key"], fault["hint"]) for fault in error["faults"]] == [
        ("$.train.max_steps", "Leave it out."),
        ("$.exchange.feedback_kept", "feedback = true, or leave it out"),
        ("$.join.allow", 'allow = ["PEER", "PEER"], or policy = "invite"'),
    ]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("schema = 1\nname = x", "E410"),
        ('schema = 1\nname = "x"\n[trian]\nrounds = 1', "E411"),
        ("schema = 1", "E412"),
        ('schema = 1\nname = "x"\n[train]\nrounds = "many"', "E413"),
        ('schema = 1\nname = "x"\n[train]\nround_s = 1.0\nsync_every = 1', "E414"),
        ('schema = 9\nname = "x"', "E413"),
        ('schema = 1\nname = "x"\n[train.outer]\npreset = "best"', "E413"),
        ('schema = 1\nname = "x"\n[train.outer]\npreset = "auto"\npeers = 0', "E413"),
        ('schema = 1\nname = "x"\n[train.outer]\npreset = "auto"\nlr = 0.1', "E414"),
        ('schema = 1\nname = "x"\n[data]\nfactory = "a.py:b"', "E411"),
    ],
)
def test_what_a_manifest_gets_wrong_has_a_code_with_a_page(
    atoll: Cli, tmp_path: Path, text: str, code: str
) -> None:
    (tmp_path / "bad.toml").write_text(text)
    assert atoll.json("validate", "bad.toml", status=78)["error"]["code"] == code
    assert atoll("explain", code) == 0


def test_version_and_completion(atoll: Cli) -> None:
    found = atoll.json("version")
    assert found["protocol"] == 1
    assert found["torch"]
    assert atoll.json("--version") == found
    for shell in ("bash", "zsh", "fish"):
        assert "_ATOLL_COMPLETE" in atoll.json("completion", shell)["script"]


def test_the_table_of_commands_is_true() -> None:
    for name, (module, text) in COMMANDS.items():
        command = getattr(importlib.import_module(f"atoll.node.cli.{module}"), f"{name}_command")
        assert isinstance(command, click.Command)
        assert command.name == name
        assert " ".join((command.help or "").split()).startswith(text.rstrip(".")), name
        assert {"--json", "--home", "--quiet"} <= {
            flag for option in command.params for flag in option.opts
        }, name
    assert set(COMMANDS) == set(cli.list_commands(click.Context(cli)))


def test_errors_have_three_parts(atoll: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    error = AtollError(
        "what happened " * 12,
        code="E110",
        why="why",
        hint="what to type",
        exit_code=69,
        retryable=True,
    )
    show_error(Terminal(environ={"COLUMNS": "80"}), error)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("E110 what happened")
    assert all(line.startswith("     ") for line in lines[1:])
    assert [line.strip() for line in lines[-3:]] == [
        "why",
        "what to type",
        "More: atoll explain E110   [exit 69]",
    ]
    assert error_object(error)["error"] == {
        "code": "E110",
        "slug": "no-bootstrap",
        "message": error.message,
        "why": "why",
        "hints": ["what to type"],
        "retryable": True,
        "exit": 69,
    }


def test_a_defect_shows_no_traceback_unless_asked(
    atoll: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(code: str | None) -> None:
        raise RuntimeError("no such luck")

    from atoll.node.cli.meta import explain_command

    monkeypatch.setattr(explain_command, "callback", broken)
    assert atoll("explain", "E110") == 1
    assert "E000 RuntimeError: no such luck" in atoll.err
    assert "Traceback" not in atoll.err
    assert atoll("explain", "E110", "-vv") == 1
    assert "Traceback" in atoll.err


def test_a_stream_without_utf8_takes_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, "ascii", "strict")
    take_any_text(stream)
    print("round 7 ▁█ – \udc80", file=stream, flush=True)
    assert written.getvalue() == b"round 7 ?? ? ?\n"
    take_any_text(None)
    monkeypatch.setattr(sys, "stdout", stream)
    text = as_json({"name": "é–\U0001f600"})
    assert text.isascii()
    assert json.loads(text)["name"] == "é–\U0001f600"


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
        (OSError(28, "No space left on device", "/x"), 73),
    ],
)
def test_interruptions_and_the_system(
    atoll: Cli, monkeypatch: pytest.MonkeyPatch, raised: BaseException, status: int
) -> None:
    def broken(code: str | None) -> None:
        raise raised

    from atoll.node.cli.meta import explain_command

    monkeypatch.setattr(explain_command, "callback", broken)
    assert atoll("explain") == status
    assert "Traceback" not in atoll.err
    assert atoll("explain", "--json") == status
    assert json.loads(atoll.out).get("interrupted", False) == (status == 130)


def test_colour_and_live(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen:
        def isatty(self) -> bool:
            return True

    screen: Any = Screen()
    assert Terminal(environ={}).colour(screen)
    for environ in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert not Terminal(environ=environ).colour(screen)
    assert not Terminal(environ={"FORCE_COLOR": "1"}, no_color=True).colour(screen)
    assert (
        painted(
            Terminal(environ={"FORCE_COLOR": "1", "TERM": "dumb"}).style("x", screen, bold=True)
        )
        == "\x1b[1mx\x1b[0m"
    )
    monkeypatch.setattr("sys.stderr", screen)
    assert Terminal(environ={}).live
    assert not Terminal(environ={"CI": "true"}).live
    assert not Terminal(environ={}, json=True).live


def test_asking_where_nobody_answers() -> None:
    assert Terminal(yes=True).confirm("Join?")
    with pytest.raises(ConfigError, match="cannot ask") as caught:
        Terminal(no_input=True).confirm("Join?")
    assert "--yes" in caught.value.hint


def test_texts() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1536, 5 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 TiB",
    ]
    assert [count_text(n) for n in (12, 865_024, 86_039_040)] == ["12", "0.87M", "86.0M"]
    assert [span_text(s) for s in (0.25, 42, 90, 7300, 604_800)] == [
        "0.2 s",
        "42 s",
        "1 min 30 s",
        "2 h 1 min",
        "7 d",
    ]
    assert iso_time(0) == "1970-01-01T00:00:00Z"
    assert [duration_s(t) for t in ("90s", "30min", "12h", "7d")] == [90, 1800, 43_200, 604_800]
    for bad in ("7", "d", "-1h", "0s"):
        with pytest.raises(ConfigError):
            duration_s(bad)
    assert sparkline([3.0, 1.0, 2.0]) == "█▁▄"
    assert len(set(FIRST)) == len(FIRST) > 50
    assert len(set(SECOND)) == len(SECOND) > 50


def test_a_seal_is_told_with_whom_it_waits_for() -> None:
    run = {
        "name": "tide",
        "phase": "running",
        "script": True,
        "quorum": {"reachable": 1, "members": 3, "needed": 2, "held": False},
    }
    peer = "12D3KooWKuMcVm9bvaJLLNC9a2QbpAEsWPUuKJ4pNujQPxKNg5hC"
    told = status_text(
        Terminal(), {"runs": [{**run, "seal": {"removed": ["a", "b"], "awaited": [peer]}}]}
    )
    assert "training; recertifying without 2 members: waits for" in told
    assert peer[-8:] in told
    assert "no quorum" not in told
    done = status_text(Terminal(), {"runs": [{**run, "seal": None}]})
    assert "recertifying" not in done
    assert "no quorum" in done


def test_views_take_documents_that_lack_things() -> None:
    terminal = Terminal(no_color=True)
    assert "no runs" in status_text(terminal, {})
    run_ = {
        "run_id": "a" * 26,
        "name": "tide",
        "round": 4,
        "rounds": 9,
        "phase": "running",
        "script": True,
        "member": True,
        "members": ["p", "q"],
        "metrics": {"loss": 1.5},
        "last_round": {
            "event": "round.committed",
            "round": 4,
            "contributors": {"p": 8, "q": 16},
        },
        "bytes_sent": 2048,
        "disk_bytes": 3 << 20,
        "trouble": {"code": "E501", "message": "disk full", "hint": "free some space"},
    }
    text = status_text(
        terminal,
        {
            "peer": "p",
            "uptime_s": 3,
            "network": {
                "addresses": ["/a", "/b"],
                "connected": ["q"],
                "bootstrap": {"z": "refused"},
            },
            "runs": [run_],
        },
    )
    for words in (
        "round 4/9",
        "connected to 1 peer\n",
        "2 contributed, 24 samples",
        "loss 1.5",
        "2.0 KiB sent",
        "disk     3.0 MiB\n",
        "disk full",
        "z  refused",
        "training",
    ):
        assert words in text
    masked = {**run_, "secure": {"threshold": 4}}
    assert "training; no sum yet: 2 more sites must join\n" in status_text(
        terminal, {"runs": [masked]}
    )
    assert "no sum yet" not in status_text(
        terminal, {"runs": [{**masked, "members": list("pqrs")}]}
    )
    assert "–" in runs_table(terminal, [{"run_id": "b" * 26, "name": "x", "phase": "stored"}])
    cut = {
        **run_,
        "round": -1,
        "fragments": [4, -1, 5],
        "last_round": {
            "event": "round.committed",
            "round": 5,
            "fragment": 2,
            "contributors": {"p": 8},
        },
    }
    assert "  3.0 MiB  " in runs_table(terminal, [run_])
    assert "  4+–+5/9  " in runs_table(terminal, [cut])
    assert "round 5 of fragment 2: 1 contributed" in status_text(terminal, {"runs": [cut]})
    assert runs_table(terminal, []) == "no runs"
    assert "fetching state 50%" in runs_table(
        terminal, [{"phase": "fetching", "progress": ["fetching state", 1, 2]}]
    )
    assert "no lane" in peers_table(terminal, [{"peer": "p", "path": ""}])
    rows = [{"peer": "p", "path": "lan", "round": 62, "completed": 60}, {"peer": "q", "round": 7}]
    first, second = peers_table(terminal, rows).splitlines()[1:3]
    assert (" 60 " in first, " 62 " in first, " 7 " in second) == (True, False, True)
    for part, says in ((0.0, True), (0.1, False), (None, False)):
        assert (
            "adds up no part"
            in peers_table(terminal, [{"peer": "p", "path": "relay", "part": part}])
        ) is says
        assert (
            "  part     none: this node's link is too slow"
            in status_text(terminal, {"runs": [{**run_, "part": part}]})
        ) is says


def test_progress_of_a_run() -> None:
    progress = RunProgress("tide", 9)
    progress.take_round(
        RoundCommittedEvent(
            round=3, contributors={"p": 1, "q": 2}, members=("p", "q", "r"), bytes_sent=1024
        )
    )
    progress.take_metrics({"step": 30.0, "loss": 2.0})
    progress.take_metrics({"step": 30.0, "loss": 2.0})
    progress.take_status(RunStatus(round=2, phase="running", script=True, members=["p", "q", "r"]))
    assert progress.round_line() == "round 3/9  2 of 3 members  loss 2.0000  step 30  1.0 KiB sent"
    assert list(progress.losses) == [2.0]
    progress.take_status(RunStatus(privacy={"epsilon": 1.2567}))
    progress.take_status(RunStatus())  # the node has left the run
    assert (
        progress.round_line()
        == "round 3/9  2 of 0 members  loss 2.0000  step 30  epsilon 1.26  1.0 KiB sent"
    )


def test_a_site_that_waits_for_others_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    alone = {"phase": "running", "script": True, "members": ["p"], "secure": {"threshold": 3}}
    with TrainingView(Terminal(), RunProgress("tide", 9)) as view:
        for run_ in (
            {**alone, "members": []},
            alone,
            alone,
            {**alone, "members": ["p", "q"]},
            {**alone, "members": ["p", "q", "r"]},
        ):
            view.take_status(read_run_status(run_), draining=False)
    told = [line for line in capsys.readouterr().err.splitlines() if "sum" in line]
    assert told == ["no sum yet: 2 more sites must join", "no sum yet: one more site must join"]


def test_a_site_of_the_last_sum_that_is_gone_is_named_until_the_run_is_finished() -> None:
    secure = {"threshold": 3, "last": {"members": ["p", "q", "12D3KooWgone"]}}
    run = {"phase": "running", "script": True, "members": ["p", "q"], "secure": secure}
    told = too_few(read_run_status(run))
    assert told.startswith(
        f"no sum without {short_peer('12D3KooWgone')}: a sum needs 3 sites, and 2"
    )
    assert told.endswith("goes on when it is back")
    assert too_few(read_run_status({**run, "finished": True})) == ""
    assert too_few(read_run_status({**run, "members": ["p", "q", "r"]})) == ""


def test_rounds_that_a_newcomer_catches_up_with_are_told_by_their_own_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with TrainingView(Terminal(), RunProgress("tide", 9)) as view:
        view.take_status(read_run_status({"phase": "running", "round": 4}), draining=False)
        for number in (3, 4):
            event = {"event": "round.committed", "round": number, "contributors": {"p": 1}}
            view.take_event(read_event(event))
    told = [line for line in capsys.readouterr().err.splitlines() if "round" in line]
    assert [line.split("  ")[0] for line in told] == ["round 3/9", "round 4/9"]


def test_nobody_is_advised_to_begin_where_no_sum_would_come_about() -> None:
    starting = {"phase": "running", "starting": {"there": 2, "wanted": 3}, "members": ["p", "q"]}
    assert "begin without: atoll begin" in run_state(read_run_status(starting))
    told = run_state(read_run_status({**starting, "secure": {"threshold": 3}}))
    assert told.endswith("(2 of 3 are there); no sum yet: one more site must join")


def test_contributions_behind_masks_are_no_samples() -> None:
    last = {"round": 4, "contributors": {"p": 1, "q": 1, "r": 1}}
    of = {"phase": "running", "members": ["p", "q", "r"], "last_round": last}
    shown = run_lines(Terminal(no_color=True), read_run_status(of))
    assert "  last     round 4: 3 contributed, 3 samples" in shown
    masked = run_lines(Terminal(no_color=True), read_run_status({**of, "secure": {"threshold": 3}}))
    assert "  last     round 4: 3 contributed" in masked


@pytest.mark.parametrize(("round_", "over"), [(7, "2 of 3 sites have spent it"), (9, "")])
def test_a_run_that_ends_before_its_last_round_is_finished_for_who_trained_in_it(
    round_: int, over: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    progress = RunProgress("tide", 9)
    status = {"phase": "running", "round": round_, "finished": True, "over": over}
    progress.take_status(read_run_status(status))
    info = RunInfo("abc", "tide", "p", RunSettings(rounds=9))
    terminal = Terminal(home=str(tmp_path))
    assert tell_ending(terminal, info, progress, 0, 0, 60.0, "atoll join tiny") == 0
    told = capsys.readouterr().err
    assert f"tide is finished: {over or 'all its 9 rounds are committed'}, " in told
    assert "Again: atoll join" not in told


def test_a_lost_member_is_told_by_what_was_decided(capsys: pytest.CaptureFixture[str]) -> None:
    with TrainingView(Terminal(), RunProgress("tide", 9)) as view:
        for kind in ("round.committed", "entry.committed"):
            view.take_event(read_event({"event": kind, "round": 1, "lost": ["12D3KooWgone"]}))
    told = [line for line in capsys.readouterr().err.splitlines() if "lost" in line]
    name = short_peer("12D3KooWgone")
    assert told == [
        f"lost {name}; the round was decided without it, nothing to do",
        f"lost {name}; it is no member until it is back",
    ]


@pytest.mark.parametrize(
    ("own_script", "why"),
    [(True, "does its loop call optimizer.step()?"), (False, "a first step may take minutes")],
)
def test_only_who_has_a_loop_is_asked_about_it(
    own_script: bool, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with TrainingView(Terminal(), RunProgress("tide", 9), own_script=own_script) as view:
        view.take_event(read_event({"event": "script.idle", "seconds": 130.0}))
    assert f"the script has made no step in the 2 min 10 s since it attached; {why}" in (
        capsys.readouterr().err
    )


def test_a_run_that_is_paused_is_said_to_be_once_and_when_it_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_ = {"phase": "running", "script": True, "members": ["p"]}
    with TrainingView(Terminal(), RunProgress("tide", 9)) as view:
        for paused in ("", "paused by its owner", "paused by its owner", ""):
            view.take_status(read_run_status({**run_, "paused": paused}), draining=False)
    assert capsys.readouterr().err.splitlines() == [
        "training is paused by its owner; the node serves the run",
        "training may go on",
    ]


def test_a_script_that_loads_is_not_said_to_be_missing() -> None:
    view = TrainingView(Terminal(), RunProgress("tide", 9))
    shown = list[str]()
    for script in (False, True):
        view.take_status(read_run_status({"phase": "running", "script": script}), draining=False)
        shown.append(str(view._block()).splitlines()[0])
    assert "the script that was started here loads" in shown[0]
    assert "training" in shown[1]


def test_child_output_and_status() -> None:
    lines: list[str] = []
    import os
    import sys

    command = [
        sys.executable,
        "-c",
        "import sys; print('out'); print('err', file=sys.stderr); sys.exit(5)",
    ]
    with ChildCommand(command, dict(os.environ), lines.append, to_stderr=False) as child:
        assert child.wait(60) == 5
    assert sorted(lines) == ["err", "out"]
    with pytest.raises(ConfigError, match="cannot start"):
        ChildCommand(["/nonexistent"], {}, None, to_stderr=False)


def test_a_line_that_a_child_writes_over_is_no_new_line() -> None:
    """As progress bars do, of tqdm for one: \\r before each state, \\n after the last."""
    import os
    import sys

    lines, redrawn = list[str](), list[str]()
    script = (
        "import sys; print('begins', flush=True)\n"
        "for step in range(4): print(f'\\r{step}/3', end='', file=sys.stderr, flush=True)\n"
        "print(file=sys.stderr, flush=True); print('ends\\r\\nhere')"
    )
    command = [sys.executable, "-c", script]
    with ChildCommand(
        command, dict(os.environ), lines.append, redraw=redrawn.append, to_stderr=False
    ) as child:
        assert child.wait(60) == 0
    assert redrawn == ["", "0/3", "1/3", "2/3"]
    assert lines == ["begins", "3/3", "ends", "here"]


def test_the_live_view_has_one_line_of_the_scripts_progress() -> None:
    def block(view: TrainingView) -> list[str]:
        return str(view._block()).splitlines()

    view = TrainingView(Terminal(), RunProgress("tide", 9))
    plain = block(view)
    for text in ("", " 10%|# | 1/10", " 20%|\x1b[31m## | 2/10", ""):
        view.redraw(text)
    (line,) = [line for line in block(view) if line not in plain]
    assert "2/10" in line
    assert "\x1b" not in line
    view.redraw("x" * 1000)
    assert max(len(line) for line in block(view)) <= 120
    view.say("the bar ended")
    assert block(view) == plain


# ── plan ──


def test_a_plan_says_settings_and_why(atoll: Cli, tmp_path: Path) -> None:
    arguments = [
        "plan",
        "run.toml",
        "--step-ms",
        "200",
        "--parameters",
        "10000000",
        "--peers",
        "8",
        "--up",
        "20Mbit/s",
    ]
    found = atoll.json(*arguments)
    assert found["settings"] == {
        "train": {"sync_every": 21, "overlap": "late", "delay": 4},
        "exchange": {"codec": "stat2_both", "fragments": 5},
        "train.outer": {"preset": "auto"},
    }
    assert found["reached"] is True
    assert found["predicted"]["bound"] == "p0's uplink"
    assert 0.95 < found["predicted"]["training_share"] < 1
    assert found["present"]["training_share"] > 0.5  # of the manifest as it is: 100 steps, waiting
    # Rounds as the manifest has them begin short, which late ones do not.
    assert 1 < found["present"]["price"]["loss"] < found["predicted"]["price"]["loss"] < 1.1
    assert atoll(*arguments) == 0
    tables = atoll.out[atoll.out.index("[train]") :].rpartition("as run.toml is")[0]
    assert parse_manifest(RUN + tables).train.delay == 4  # what it prints can be pasted
    assert "int4, waiting for each round" not in atoll.out
    assert atoll(*arguments, "--explain") == 0
    assert "int4, waiting for each round" in atoll.out


def test_a_plan_of_unequal_peers(atoll: Cli) -> None:
    rows = [
        "--peer",
        "100Mbit/s/100Mbit/s",
        "--peer",
        "20 Mbit/s/12.5MB/s/250",
        "--peer",
        "0.5Mbit/s/0.5Mbit/s",
    ]
    found = atoll.json("plan", "run.toml", "--step-ms", "200", "--parameters", "10000000", *rows)
    assert [(peer["up"], peer["down"], peer["step_s"]) for peer in found["peers"]] == [
        (12_500_000, 12_500_000, 0.2),
        (2_500_000, 12_500_000, 0.25),
        (62_500, 62_500, 0.2),
    ]
    assert found["group"] == ["p0", "p1"]


def test_a_plan_says_what_else_there_is_and_what_a_join_costs(atoll: Cli, tmp_path: Path) -> None:
    rows = [word for step in ("250", "250", "5000") for word in ("--peer", f"1Gbit/1Gbit/{step}")]
    given = ["plan", "run.toml", "--step-ms", "250", "--parameters", "10000000", *rows]
    found = atoll.json(*given)
    assert found["group"] == ["p0", "p1", "p2"]  # which makes one step while they make 20
    kinds = [row["what"] for row in found["rejected"]]
    assert sorted(kinds) == ["gradients in every step", "p0 alone", "without p2"]
    assert all(row["long"] > 1 for row in found["rejected"])
    needs = found["needs"]
    assert needs["join_costs_s"] > needs["join_s"]
    assert atoll(*given) == 0
    assert len(atoll.out.split("INSTEAD")[1].split("\n\n")[0].splitlines()) == 1 + 3
    assert "and keeps the others from rounds for up to" in atoll.out


def test_a_plan_of_another_size_takes_nothing_of_the_manifest_s_model(
    atoll: Cli, tmp_path: Path
) -> None:
    given = ["--step-ms", "250", "--parameters", "7000000"]
    found = atoll.json("plan", "run.toml", *given)  # whose model is built in, and a GPU's concern
    assert found["needs"]["gpu_bytes"] is None
    assert found["needs"]["join_bytes"] == 8 * 7_000_000
    assert atoll("plan", "run.toml", *given) == 0
    assert "but for a model of 7,000,000 parameters in place of its own" in atoll.out


def test_a_step_is_shared_among_unequal_peers(atoll: Cli) -> None:
    """p0 takes 100 ms for an equal share and holds 64 samples; p2 is twice as fast as p1."""
    rows = ["100Mbit/s/100Mbit/s/100/64", "20Mbit/s/100Mbit/s/400", "50Mbit/s/50Mbit/s/200"]
    words = [word for row in rows for word in ("--peer", row)]
    given = ["plan", "run.toml", "--step-ms", "200", "--parameters", "1000000", "--batch", "256"]
    found = atoll.json(*given, *words)
    assert found["samples"] == {"p0": 64, "p1": 64, "p2": 128}
    assert [peer["step_s"] for peer in found["peers"]] == pytest.approx([0.075, 0.3, 0.3])
    assert atoll(*given, *words) == 0
    assert "p0 64, p1 64, p2 128 in a step" in atoll.out
    full = ("--peer", "50Mbit/s/50Mbit/s/200/0")  # a memory that holds none
    assert atoll.json(*given, *words, *full)["samples"]["p3"] == 0
    assert atoll(*given, *words, *full) == 0
    assert "p3 none in a step" in atoll.out


def test_a_plan_for_thin_uplinks_can_be_pasted(atoll: Cli) -> None:
    """Sparse contributions go with SGD, and with the steps that unequal machines make."""
    rows = ["1Gbit/s/1Gbit/s", *["1Mbit/s/100Mbit/s"] * 2, "1Mbit/s/100Mbit/s/400"]
    words = [word for row in rows for word in ("--peer", row)]
    given = ["plan", "run.toml", "--step-ms", "200", "--parameters", "100000000", *words]
    found = atoll.json(*given)
    assert found["settings"]["exchange"]["codec"].startswith("sparse")
    assert found["settings"]["train.outer"] == {"preset": "auto"}
    assert found["predicted"]["bytes_up_per_round"] > found["predicted"]["bytes_down_per_round"]
    steps = found["settings"]["train"]["sync_every"]
    assert list(found["steps"].values()) == [steps, steps, steps, steps // 2]
    assert atoll(*given) == 0
    assert f"p3 {steps // 2} of each round" in atoll.out
    tables = atoll.out[atoll.out.index("[train]") :].rpartition("as run.toml is")[0]
    assert parse_manifest(RUN + tables).train.outer.optimizer == "sgd"


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ([], "step"),
        (["--step-ms", "0"], "step"),
        (["--step-ms", "9", "--peers", "0"], "peers"),
        (["--step-ms", "9", "--peers", "-3"], "peers"),
        (["--step-ms", "9", "--peers", "257"], "peers"),
        (["--step-ms", "9", "--up", "fast"], "up"),
        (["--step-ms", "9", "--peer", "20Mbit/s"], "peer"),
        (["--step-ms", "9", "--peer", "20Mbit/s/20Mbit/s/soon"], "peer"),
        (["--step-ms", "9", "--share", "1"], "share"),
        (["--step-ms", "9", "--batch", "0"], "batch"),
        (["--step-ms", "9", "--batch", "9" * 20], "batch"),
        (["--step-ms", "9", "--batch", "9", "--peer", "1MB/s/1MB/s/9/8"], "batch"),
        (["--step-ms", "9", "--peer", "1MB/s/1MB/s/9/few"], "peer"),
        (["--step-ms", "9", "--batch", "9", "--peer", "1MB/s/1MB/s/9/-8"], "peer"),
        (["--step-ms", "9", "--peer", "1MB/s/1MB/s/9/8"], "batch"),  # of no batch
        (["--step-ms", "9", "--parameters", "-1"], "parameters"),
    ],
)
def test_what_cannot_be_planned_is_a_coded_error(atoll: Cli, options: list[str], key: str) -> None:
    error = atoll.json("plan", "run.toml", *options, status=78)["error"]
    assert (error["code"], error["key"].removeprefix("$.")) == ("E400", key)


@pytest.mark.parametrize("number", [257, 100_000_000, 10**30])
def test_a_plan_of_more_peers_than_a_run_has_says_how_many(atoll: Cli, number: int) -> None:
    given = ("--step-ms", "9", "--parameters", "1000", "--peers", str(number))
    error = atoll.json("plan", "run.toml", *given, status=78)["error"]
    assert error["message"] == f"{number:,} peers: a run with this plan has at most 256 members"
    assert '"three-level" bear 4,096' in error["why"]
    assert error["hints"] == ["At most --peers 256; more machines are several runs."]


FLEET = """schema = 1
name = "fleet"
[exchange]
tree = { lab = { box-1 = 3, box-2 = 5 }, attic = 2 }
"""


def test_validate_draws_the_tree_of_a_part(
    atoll: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.toml").write_text(FLEET)
    tree = atoll.json("validate", "run.toml", "--draw")["tree"]
    assert tree["plan"] == "three-level"
    roles = Counter(node["role"] for node in tree["nodes"])
    assert roles == {"owner": 1, "head": 2, "peer": 7}
    assert len(tree["edges"]) == 9
    assert ["attic#2", "attic#1"] in tree["edges"]
    atoll("validate", "run.toml", "--draw")
    assert (
        atoll.out.partition("\n\n")[2]
        == """three-level: one part of 10 peers', 2 hops up
Each part has another owner; heads of a place take turns.
lab/box-1#1  (owner)
|-- lab/box-2#1  (adds up)
|   `-- lab/box-2#2 ... lab/box-2#5  (4 peers)
|-- attic#1  (adds up)
|   `-- attic#2
|-- lab/box-1#2
`-- lab/box-1#3
"""
    )
    monkeypatch.setenv("COLUMNS", "30")
    atoll("validate", "run.toml", "--draw")
    assert max(map(len, atoll.out.partition("\n\n")[2].splitlines())) == 30


@pytest.mark.parametrize(("plan", "hops"), [("butterfly", 1), ("ring", 5), ("two-level", 1)])
def test_without_a_tree_so_many_peers_are_drawn(
    atoll: Cli, tmp_path: Path, plan: str, hops: int
) -> None:
    text = f'schema = 1\nname = "x"\n[exchange]\nplan = "{plan}"\n'
    (tmp_path / "run.toml").write_text(text)
    atoll("validate", "run.toml", "--draw", "--peers", "6")
    assert f"one part of 6 peers', {hops} hop" in atoll.out
    many = atoll("validate", "run.toml", "--draw", "--peers", "257")
    assert many == (0 if plan == "two-level" else 78)
