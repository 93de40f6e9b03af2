"""Who gets into a run, given what is known to whom: attackers with all they can make of what they
hold, against the gates of all members.

As in the model of Dolev and Yao an attacker sees everything that ever travels (certificates,
capabilities, announcements), signs with every key it holds, and combines and alters the rest as it
likes; it cannot forge signatures of keys it does not hold, nor speak as a peer whose key it does
not hold, since every channel proves the peer id. What is checked is the code that nodes run: gate,
ban lists, announcements' registry, and the doors of the log, at which a convener that lies proposes
the attacker in an entry. Planted bugs show that the model finds them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from seeds import seeds

from atoll.collectives.errors import AtollError, NotAdmittedError
from atoll.collectives.group import Admitted
from atoll.collectives.identifiers import PeerId, RunId
from atoll.node.composing.announced import read_invite
from atoll.node.net.announcements import Registry, announce
from atoll.node.run import capability
from atoll.node.run.banning import Ban, Bans
from atoll.node.run.capability import (
    CAPABILITY_DOMAIN,
    CERTIFICATE_DOMAIN,
    ROLES,
    Capability,
    Certificate,
    genuine,
)
from atoll.node.run.doors import RunDoors, right_of
from atoll.node.run.gate import Gate, Policy
from atoll.node.run.inner_doors import doors_of
from atoll.node.run.invite import Invite, make_invite
from atoll.security.identity import Identity, public_key_of

RUN = RunId("abcdefghijklmnopqrstuvwxyz")
HERE = "/ip4/10.0.0.1/tcp/1"
NOW_S = 1_800_000_000.0
ATTACKERS = ("stranger", "ex-member", "revoked holder", "thief of a certificate", "thief of a home")
POLICIES: tuple[Policy, ...] = ("invite", "open", "allow")


@dataclass
class Attacker:
    """``keys``: identities it can speak as; ``shown``: certificates it has seen; ``invites``: whole
    invites, with their secrets.
    """

    keys: list[Identity]
    shown: list[Certificate]
    invites: list[Invite] = field(default_factory=list)

    def forgeries(self, rng: random.Random) -> list[tuple[Identity, bytes]]:
        """Under which of its keys it shows what."""
        made = list[tuple[Identity, bytes]]()
        for key in self.keys:
            made += [(key, b""), *((key, seen.encode()) for seen in self.shown)]
            for invite in self.invites:
                try:
                    made.append((key, invite.certify(key, NOW_S).encode()))
                except NotAdmittedError:  # for another peer: the invite key signs all the same
                    freed = msgspec.structs.replace(invite.capability, only=b"")
                    around = msgspec.structs.replace(invite, capability=freed)
                    signed = around.certify(key, NOW_S)
                    made += [
                        (key, signed.encode()),
                        (
                            key,
                            msgspec.structs.replace(signed, capability=invite.capability).encode(),
                        ),
                    ]
            for seen in self.shown:
                made += [(key, self._altered(rng, key, seen).encode()) for _ in range(4)]
        return made

    def _altered(self, rng: random.Random, key: Identity, seen: Certificate) -> Certificate:
        """A certificate for ``key`` made of one of another, with any fields changed and any
        signatures of its own.
        """
        said, signer = seen.capability, rng.choice(self.keys)
        changes = {
            "bearer": public_key_of(signer.peer),
            "expires_s": said.expires_s + 10**6,
            "role_index": rng.randrange(len(ROLES)),
            "uses": 0,
            "only": rng.choice([b"", public_key_of(key.peer)]),
            "organiser_key": public_key_of(rng.choice(self.keys).peer),
        }
        chosen = rng.sample(sorted(changes), rng.randint(0, 3))
        said = msgspec.structs.replace(said, **{name: changes[name] for name in chosen})
        if rng.random() < 0.5:
            by = rng.choice(self.keys)
            said = msgspec.structs.replace(
                said, signature=by.sign(CAPABILITY_DOMAIN, said.signed_bytes())
            )
        made = msgspec.structs.replace(seen, capability=said, peer_key=public_key_of(key.peer))
        if rng.random() < 0.8:
            made = msgspec.structs.replace(
                made, signature=signer.sign(CERTIFICATE_DOMAIN, made.signed_bytes())
            )
        return made


@dataclass
class World:
    """A run with three members beside its organiser, whose gates know the same configuration and
    bans, and a hop that knows nothing.
    """

    gates: list[Gate]
    hop: Registry
    organiser: Identity
    members: list[Identity]
    certificates: list[Certificate]
    invite: Invite
    newcomer: Identity


def world(
    rng: random.Random, folder: Path, policy: Policy, attacker: str
) -> tuple[World, Attacker]:
    """The run as it is once the attacker is outside: banned, and its capability revoked, where it
    was ever inside.
    """
    keys = [Identity(rng.randbytes(32)) for _ in range(8)]
    organiser, *members = keys[:4]
    newcomer, former, *fresh = keys[4:]
    life = {"now_s": NOW_S - 1000, "life_s": 10_000.0}
    general = make_invite(RUN, [], organiser, **life)
    leaked = make_invite(RUN, [], organiser, **life)
    alone = make_invite(RUN, [], organiser, peer=former.peer, **life)
    certificates = [general.certify(member, NOW_S) for member in members]
    bans = Bans(folder, RUN, organiser.peer)
    held = Attacker(fresh, [*certificates, general.certify(newcomer, NOW_S)])
    if attacker == "stranger":
        held.shown = []
    elif attacker == "ex-member":
        held.keys = [former, *fresh]
        held.shown.append(leaked.certify(former, NOW_S))
        bans.change(Ban(former.peer, "why", 1), former.peer, organiser)
        bans.revoke(leaked.capability.id, organiser)
        held.invites = [leaked]
    elif attacker == "revoked holder":
        held.invites = [leaked]
        bans.revoke(leaked.capability.id, organiser)
    elif (
        attacker == "thief of a home"
    ):  # of one that came by an invite for it alone, and was banned
        held.keys, held.invites = [former, *fresh], [alone]
        held.shown.append(alone.certify(former, NOW_S))
        bans.change(Ban(former.peer, "its key was stolen", 1), former.peer, organiser)
    config = [who.peer for who in (organiser, *members)]
    gates = list[Gate]()
    for _ in config:
        gate = Gate(RUN, organiser.peer, bans, lambda: config)
        gate.policy, gate.allow = policy, frozenset([newcomer.peer, former.peer])
        gates.append(gate)
    return World(
        gates, Registry((), read_invite), organiser, members, certificates, general, newcomer
    ), held


def admitted(gate: Gate, peer: PeerId, shown: bytes) -> bool:
    try:
        gate.admit(peer, shown, NOW_S)
    except NotAdmittedError:
        return False
    return True


def heard(world: World, who: Identity, shown: bytes, sender: PeerId) -> bool:
    """Whether a hop that knows nothing of the run passes it on to whoever asks under its organiser,
    and all members believe it.
    """
    news = announce(who, RUN, [HERE], NOW_S, world.organiser.peer, shown)
    try:
        taken = world.hop.accept(news, sender, 0.0, NOW_S)
    except AtollError:
        taken = False
    listed = who.peer in {each.peer for each in world.hop.members(RUN, 0.0, world.organiser.peer)}
    return (taken or listed) and any(gate.hears_of(who.peer, shown, NOW_S) for gate in world.gates)


def proposed(gate: Gate, peer: PeerId, shown: bytes) -> bool:
    """Whether an acceptor votes for an entry in which a lying convener lets this peer in, with this
    certificate, whatever it says of it, or without.
    """
    doors = doors_of(gate, lambda: NOW_S)
    found = genuine(shown)
    words = [right_of(found).admitted] if found is not None else []
    words = [msgspec.structs.replace(word, peer=peer) for word in words]
    lies = [msgspec.structs.replace(word, uses=0, invite=b"another invite!!") for word in words]
    return any(
        doors.valid([peer], said) and not doors.objection([peer], said)
        for said in ([], words, lies, [Admitted(peer, shown)])
    )


def trespasses(rng: random.Random, there: World, held: Attacker, policy: Policy) -> list[str]:
    """Where an attacker got to that it should not."""
    found = list[str]()
    for key, shown in held.forgeries(rng):
        banned = key.peer in there.gates[0]._bans.peers
        if policy == "open" and not banned:
            continue  # whoever knows the run is let in
        if any(admitted(gate, key.peer, shown) for gate in there.gates):
            found.append("gate")
        if policy != "open" and heard(there, key, shown, held.keys[0].peer):
            found.append("announcements")
        if any(proposed(gate, key.peer, shown) for gate in there.gates):
            found.append("entry")
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("attacker", ATTACKERS)
@pytest.mark.parametrize("seed", seeds(2, 10))
def test_no_attacker_enters_and_the_honest_always_do(
    tmp_path: Path, seed: int, attacker: str, policy: Policy
) -> None:
    rng = random.Random(f"{seed} {attacker} {policy}")
    there, held = world(rng, tmp_path, policy, attacker)
    members = {there.organiser.peer, *(who.peer for who in there.members)}
    assert members.isdisjoint(key.peer for key in held.keys)
    assert trespasses(rng, there, held, policy) == []
    for key in held.keys:
        banned = key.peer in there.gates[0]._bans.peers
        entered = [admitted(gate, key.peer, b"") for gate in there.gates]
        assert entered == [policy == "open" and not banned] * len(there.gates)
    # A flood under the run's own name, and the honest newcomer's one announcement among it.
    for _ in range(20):
        fake = Identity(rng.randbytes(32))
        for organiser, shown in (("", b""), (fake.peer, b""), (there.organiser.peer, b"x")):
            news = announce(fake, RUN, [HERE], NOW_S, organiser, shown)
            try:
                there.hop.accept(news, held.keys[0].peer, 0.0, NOW_S)
            except AtollError:
                assert organiser == there.organiser.peer
    mine = there.invite.certify(there.newcomer, NOW_S).encode()
    assert all(admitted(gate, there.newcomer.peer, mine) for gate in there.gates)
    assert heard(there, there.newcomer, mine, there.newcomer.peer)
    for gate in there.gates:
        doors = doors_of(gate, lambda: NOW_S)
        doors.note(there.newcomer.peer, mine)
        word = doors.warrant(there.newcomer.peer)
        assert word is not None
        said = [word] if policy == "invite" else []
        assert doors.valid([there.newcomer.peer], said)
        assert doors.objection([there.newcomer.peer], said) == ""
    for member, certificate in zip(there.members, there.certificates, strict=True):
        for shown in (certificate.encode(), b""):
            assert all(admitted(gate, member.peer, shown) for gate in there.gates)
        assert heard(there, member, certificate.encode(), member.peer)
    found = there.hop.members(RUN, 0.0, there.organiser.peer)
    honest = {there.newcomer.peer, *(who.peer for who in there.members)}
    assert honest <= {news.peer for news in found}


# ---- planted bugs
def _organiser_not_verified(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Capability, "genuine", lambda self: True)


def _invite_key_not_verified(patch: pytest.MonkeyPatch) -> None:
    verify = capability.verify

    def careless(peer: PeerId, domain: str, data: bytes, signature: bytes) -> bool:
        return domain == CERTIFICATE_DOMAIN or verify(peer, domain, data, signature)

    patch.setattr(capability, "verify", careless)


def _certificate_of_anybody(patch: pytest.MonkeyPatch) -> None:
    """Like a token: whoever shows it is let in."""
    patch.setattr(Certificate, "peer", property(lambda self: _Anybody()))


class _Anybody(str):
    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


def _revocation_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Bans, "check_invite", lambda self, nonce: None)


def _ban_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Bans, "refuse", lambda self, peer: None)


def _entry_not_checked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunDoors, "valid", lambda self, new, admitted: True)


def _entry_of_a_revoked_invite(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunDoors, "objection", lambda self, new, admitted: "")


PLANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, Policy]] = {
    "the organiser's signature is not verified": (
        _organiser_not_verified,
        "thief of a certificate",
        "invite",
    ),
    "the invite key's signature is not verified": (
        _invite_key_not_verified,
        "thief of a certificate",
        "invite",
    ),
    "a certificate lets in whoever shows it": (
        _certificate_of_anybody,
        "thief of a certificate",
        "invite",
    ),
    "a revocation is not looked at": (_revocation_ignored, "revoked holder", "invite"),
    "a ban is not looked at": (_ban_ignored, "ex-member", "open"),
    "acceptors do not look by what one enters": (_entry_not_checked, "stranger", "invite"),
    "acceptors vote for who comes by a revoked invite": (
        _entry_of_a_revoked_invite,
        "revoked holder",
        "invite",
    ),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_in_the_admission_is_found(
    plant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks, attacker, policy = PLANTS[plant]
    breaks(monkeypatch)
    found = list[str]()
    for seed in range(5):
        capability._genuine.cache_clear()
        rng = random.Random(seed)
        there, held = world(rng, tmp_path / str(seed), policy, attacker)
        found += trespasses(rng, there, held, policy)
    capability._genuine.cache_clear()
    capability.invite_of.cache_clear()
    assert found
