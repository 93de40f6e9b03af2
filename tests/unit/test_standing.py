"""What is kept of an invite: the secret only where it is needed again, for nobody else's eyes."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.collectives.errors import NotAdmittedError
from atoll.collectives.identifiers import RunId
from atoll.node.home.paths import find_paths
from atoll.node.run.invite import Invite, make_invite
from atoll.node.run.standing import FILE, Standing, load_standing, save_standing, standing_by
from atoll.security.identity import Identity

RUN = RunId("a" * 26)
ORGANISER, MEMBER = Identity(b"o" * 32), Identity(b"m" * 32)


def kept(home: Path, invite: Invite) -> tuple[Standing, bytes]:
    paths = find_paths(str(home))
    paths.ensure()
    save_standing(paths, RUN, standing_by(invite, invite.certify(MEMBER, 1000)))
    file = paths.run_dir(RUN) / FILE
    assert file.stat().st_mode & 0o777 == 0o600
    return load_standing(paths, RUN), file.read_bytes()


@pytest.mark.parametrize("uses", [0, 2])
def test_of_an_invite_for_many_the_secret_is_kept_and_invites_others(
    tmp_path: Path, uses: int
) -> None:
    invite = make_invite(RUN, ["/ip4/10.0.0.1/tcp/1"], ORGANISER, now_s=1000, uses=uses)
    found, _ = kept(tmp_path, invite)
    again = found.invite(("/ip4/10.0.0.2/tcp/2",))
    assert (again.secret, again.capability) == (invite.secret, invite.capability)
    assert again.bootstrap == ("/ip4/10.0.0.2/tcp/2",)


@pytest.mark.parametrize("options", [{"uses": 1}, {"peer": MEMBER.peer}])
def test_of_an_invite_for_one_the_secret_is_forgotten(
    tmp_path: Path, options: dict[str, object]
) -> None:
    invite = make_invite(RUN, ["/ip4/10.0.0.1/tcp/1"], ORGANISER, now_s=1000, **options)
    found, data = kept(tmp_path, invite)
    assert invite.secret not in data
    assert found.certificate == invite.certify(MEMBER, 1000).encode()
    with pytest.raises(NotAdmittedError, match="cannot invite"):
        found.invite(())


def test_nothing_kept_or_damaged_is_nothing(tmp_path: Path) -> None:
    paths = find_paths(str(tmp_path))
    assert load_standing(paths, RUN) == Standing()
    paths.ensure()
    save_standing(paths, RUN, Standing(b"x"))
    (paths.run_dir(RUN) / FILE).write_bytes(b"\x00\xff{")
    assert load_standing(paths, RUN) == Standing()
    with pytest.raises(NotAdmittedError, match="cannot invite"):
        Standing().invite(())
