"""What stands between an invite and a run: where the invite is taken from, what is shown, what the
shell completes, and what `atoll rm` leaves.
"""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from atoll.collectives.errors import ConfigError
from atoll.node.bases.own import fetched_folder
from atoll.node.cli import completing, run
from atoll.node.cli.basing import base_lines
from atoll.node.cli.consent import agree, check_fit, describe_run, preview, target_of
from atoll.node.cli.runs import PRIVACY_FILE
from atoll.node.home.config import NodeConfig
from atoll.node.home.output import Terminal
from atoll.node.home.paths import find_paths
from atoll.node.manifest import Manifest, parse_manifest, save_run, sign_manifest
from atoll.node.manifest.signed import SignedManifest
from atoll.node.manifest.tables import BaseTable
from atoll.node.run.invite import Invite, make_invite
from atoll.security.identity import Identity

RUN = """
schema = 1
name = "tide"
contact = "ada@example.org"
[model]
config = { width = 32, layers = 1, heads = 2, context = 16 }
"""
OWNER = Identity(bytes(31) + b"\x01")
NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWDzMngWyanCrpqTHK4eTtc1Fy14yrqBAsJ2Rb8b5ZWeZM"


def signed(text: str = RUN) -> SignedManifest:
    return sign_manifest(parse_manifest(text), OWNER)


def invited(manifest: SignedManifest) -> Invite:
    return make_invite(manifest.run_id, [NOBODY], OWNER, now_s=time.time())


def terminal(home: Path, **more: Any) -> Terminal:
    return Terminal(
        home=str(home), environ={"ATOLL_HOME": str(home), **more.pop("environ", {})}, **more
    )


def test_an_invite_comes_from_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "invite.txt"
    file.write_text("  atoll2:ab\n cd \n")
    here = terminal(tmp_path, no_input=True)
    assert target_of(here, None, file) == "atoll2:abcd"  # mail breaks long lines
    assert target_of(here, "tide", None) == "tide"
    assert (
        target_of(terminal(tmp_path, environ={"ATOLL_INVITE": "atoll2:x "}), None, None)
        == "atoll2:x"
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("atoll2:y\n"))
    assert target_of(here, "-", None) == "atoll2:y"
    with pytest.raises(click.UsageError, match="both"):
        target_of(here, "tide", file)
    with pytest.raises(click.UsageError, match="no invite is given"):
        target_of(here, None, None)
    file.write_text(" \n")
    with pytest.raises(click.UsageError, match="there is no invite in"):
        target_of(here, None, file)


def test_a_stored_run_is_shown_without_asking_anybody(tmp_path: Path) -> None:
    here, manifest = terminal(tmp_path), signed()
    save_run(here.paths, manifest)
    assert preview(here, "tide", NodeConfig(), dry_run=False) == (None, manifest)
    invite = invited(manifest)
    found, shown = preview(here, invite.encode(), NodeConfig(), dry_run=False)
    assert (found, shown) == (invite, manifest)


def test_what_is_shown_before_joining_names_organiser_and_own_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = signed()
    script, data = tmp_path / "train.py", "data.py:load"
    assert agree(terminal(tmp_path, yes=True), manifest, invited(manifest), script, data)
    told = capsys.readouterr().err
    assert "signature ok, invite ends in" in told
    assert "ada@example.org" in told
    for own in (str(script), data):
        assert f"of this machine's own, {own!r} may be run" in told
    with pytest.raises(ConfigError, match="cannot ask"):
        agree(terminal(tmp_path, no_input=True), manifest, None, None, "")
    capsys.readouterr()
    describe_run(terminal(tmp_path, json=True), manifest.open(), manifest.run_id)
    assert json.loads(capsys.readouterr().out)["run_id"] == manifest.run_id


@pytest.mark.parametrize(
    ("entry", "source", "key"),
    [("local:mine", "", "$.model.entry"), ("", "local", "$.data.source")],
)
def test_a_run_that_needs_own_code_or_text_is_refused_without(
    entry: str, source: str, key: str
) -> None:
    text = 'schema = 1\nname = "own"\n[model]\n'
    text += (
        f'entry = "{entry}"\n'
        if entry
        else "config = { width = 32, layers = 1, heads = 2, context = 16 }\n"
    )
    text += f'[data]\nsource = "{source}"\n' if source else ""
    manifest = parse_manifest(text)
    with pytest.raises(ConfigError) as caught:
        check_fit(manifest, None, "")
    assert caught.value.key == key
    check_fit(manifest, Path("train.py"), "text.txt")


def test_the_shell_is_offered_plain_names_and_ids_only(tmp_path: Path) -> None:
    paths = find_paths(str(tmp_path))
    tide, twin, other = (
        signed(),
        signed(RUN + "[train]\nsync_every = 7\n"),
        signed(RUN.replace("tide", "ebb")),
    )
    for each in (tide, other):
        save_run(paths, each)
    assert sorted(completing.runs(paths, "")) == [
        ("ebb", other.run_id[:8]),
        ("tide", tide.run_id[:8]),
    ]
    assert list(completing.runs(paths, tide.run_id[:5])) == [(tide.run_id, "tide")]
    save_run(paths, twin)  # two of one name: only ids tell them apart
    assert sorted(completing.runs(paths, "")) == sorted(
        [("ebb", other.run_id[:8]), (tide.run_id, "tide"), (twin.run_id, "tide")]
    )
    (paths.run_dir(other.run_id) / "manifest").write_bytes(
        msgspec.msgpack.encode([msgspec.msgpack.encode({"name": "$(reboot)"})])
    )
    assert ("$(reboot)", other.run_id[:8]) not in list(completing.runs(paths, ""))
    (paths.run_dir(other.run_id) / "manifest").write_bytes(b"\xff")
    assert list(completing.runs(paths, other.run_id)) == [(other.run_id, "")]


def test_rm_forgets_a_run_but_not_what_its_privacy_has_cost(
    atoll_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths, manifest = find_paths(str(atoll_home)), signed()
    save_run(paths, manifest)
    folder = paths.run_dir(manifest.run_id)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "1").write_bytes(bytes(1000))
    (folder / PRIVACY_FILE).write_bytes(b"spent")
    assert run(["rm", "tide", "--no-input"]) == 2  # nobody can be asked
    assert (folder / "checkpoints" / "1").exists()
    capsys.readouterr()
    assert run(["rm", "tide", "--yes", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kept"] == [str(folder / PRIVACY_FILE)]
    assert [path.name for path in folder.rglob("*")] == [PRIVACY_FILE]
    assert run(["rm", "tide", "--yes"]) != 0  # there is none any more


def based(where: dict[str, str], **base: Any) -> Manifest:
    """The manifest of a run of a pretrained model."""
    (entry,) = where
    made = parse_manifest(
        f'schema = 1\nname = "tuned"\n[model]\n{entry} = "{where[entry]}"\n'
        '[data]\nsource = "local"\n'
    )
    files = {"config.json": "0" * 64, "model.safetensors": "1" * 64}
    sizes = {"config.json": 1 << 20, "model.safetensors": 9 << 20}
    table = BaseTable(files, 10 << 20, 1, sizes=sizes)
    model = msgspec.structs.replace(made.model, base=msgspec.structs.replace(table, **base))
    return msgspec.structs.replace(made, model=model)


def test_before_yes_it_is_said_where_the_base_comes_from(tmp_path: Path) -> None:
    paths = find_paths(str(tmp_path))

    def lines(manifest: Manifest, given: Path | None = None, *, share: bool = True) -> list[str]:
        return base_lines(paths, str(manifest.run_id), manifest.model, given, share=share)

    folder = based({"folder": "tiny"})
    assert folder.model.base is not None
    target = fetched_folder(paths.cache_dir, folder.model.base)
    where, into, hands_on = lines(folder)
    assert where == "base     10.0 MiB from members of the run, by sha256"
    assert into.strip().startswith(f"into {target}, where ")
    assert into.endswith(" are free")
    assert "hands it on to members that lack it" in hands_on
    assert "does not hand it on" in lines(folder, share=False)[2]
    assert lines(folder, tmp_path)[0] == f"base     on this machine: {tmp_path}"
    hub = based({"hub": "org/none"}, gated=False)
    assert lines(hub)[0].endswith("by sha256, else from the hub")
    for gated in (True, None):
        (only,) = lines(based({"hub": "org/none"}, gated=gated))
        assert only.endswith("from the hub, by this machine's own login; no member hands it on")
    (unknown,) = lines(based({"gguf": "tiny.gguf"}, sizes={}))
    assert unknown == "base     10.0 MiB, not known on this machine: --model PATH"
    target.mkdir(parents=True)
    for name in folder.model.base.files:
        (target / name).touch()
    assert lines(folder)[0] == f"base     on this machine: {target}"
    assert lines(parse_manifest('schema = 1\nname = "plain"\n')) == []
