"""A run under a key of its own: nothing of the machine's key, or of another run's, is in it, and
the run finds it again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.collectives.errors import ConfigError
from atoll.collectives.identifiers import RunId
from atoll.node.cli.identity import identity_of
from atoll.node.cli.join import use_separate_home
from atoll.node.home.output import Terminal
from atoll.node.run.invite import make_invite
from atoll.security.identity import Identity

ORGANISER = Identity(b"o" * 32)
ADDRESS = f"/ip4/127.0.0.1/tcp/4150/p2p/{ORGANISER.peer}"
ONE, OTHER = (
    make_invite(RunId(letter * 26), [ADDRESS], ORGANISER, now_s=1000).encode() for letter in "ab"
)


def key_in(home: Path, invite: str) -> str:
    """Under which peer id a command joins with --fresh-key."""
    terminal = Terminal(home=str(home), quiet=True)
    assert identity_of(terminal).peer
    use_separate_home(terminal, invite)
    assert home in terminal.paths.identity_file.parents
    terminal.paths.ensure()
    return identity_of(terminal).peer


def test_each_run_has_a_key_of_its_own_and_finds_it_again(tmp_path: Path) -> None:
    usual = Terminal(home=str(tmp_path), quiet=True)
    usual.paths.ensure()
    mine = identity_of(usual).peer
    one, other = key_in(tmp_path, ONE), key_in(tmp_path, OTHER)
    assert len({mine, one, other}) == 3
    assert key_in(tmp_path, ONE) == one
    assert identity_of(Terminal(home=str(tmp_path), quiet=True)).peer == mine
    key = next((tmp_path / "apart").rglob("identity.key"))
    assert key.stat().st_mode & 0o777 == 0o600
    assert key.parent.stat().st_mode & 0o777 == 0o700


def test_a_run_that_is_named_without_its_invite_is_known_under_the_usual_key(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="needs the invite"):
        use_separate_home(Terminal(home=str(tmp_path), quiet=True), "tide")
