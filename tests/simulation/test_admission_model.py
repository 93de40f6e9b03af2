"""Who gets into a run, given what is known to whom: attackers with all they can make of what they hold, against the gates of all members.

As in the model of Dolev and Yao an attacker sees everything that ever travels (certificates, capabilities, announcements), signs with every key it
holds, and combines and alters the rest as it likes; it cannot forge signatures of keys it does not hold, nor speak as a peer whose key it
does not hold, since every channel proves the peer id. What is checked is the code that nodes run: gate, ban lists, announcements' registry.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from seeds import seeds

from atoll.collectives.errors import AtollError, NotAdmittedError
from atoll.collectives.identifiers import PeerId, RunId
from atoll.node.banning import Ban, Bans
from atoll.node.capability import CAPABILITY_DOMAIN, CERTIFICATE_DOMAIN, ROLES, Certificate
from atoll.node.gate import Gate, Policy
from atoll.node.invite import Invite, make_invite
from atoll.node.net.announcements import Registry, announce
from atoll.security.identity import Identity, public_key_of

RUN = RunId("abcdefghijklmnopqrstuvwxyz")
HERE = "/ip4/10.0.0.1/tcp/1"
NOW_S = 1_800_000_000.0
ATTACKERS = ("stranger", "ex-member", "revoked holder", "thief of a certificate", "thief of a home")
POLICIES: tuple[Policy, ...] = ("invite", "open", "allow")


@dataclass
class Attacker:
    """``keys``: identities it can speak as; ``shown``: certificates it has seen; ``invites``: whole invites, with their secrets."""

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
        """A certificate for ``key`` made of one of another, with any fields changed and any signatures of its own."""
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
    """A run with three members beside its organiser, whose gates know the same configuration and bans, and a hop that knows nothing."""

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
    """The run as it is once the attacker is outside: banned, and its capability revoked, where it was ever inside."""
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
    return World(gates, Registry(), organiser, members, certificates, general, newcomer), held


def admitted(gate: Gate, peer: PeerId, shown: bytes) -> bool:
    try:
        gate.admit(peer, shown, NOW_S)
    except NotAdmittedError:
        return False
    return True


def heard(world: World, who: Identity, shown: bytes, sender: PeerId) -> bool:
    """Whether a hop that knows nothing of the run passes it on to whoever asks under its organiser, and all members believe it."""
    news = announce(who, RUN, [HERE], NOW_S, world.organiser.peer, shown)
    try:
        taken = world.hop.accept(news, sender, 0.0, NOW_S)
    except AtollError:
        taken = False
    listed = who.peer in {each.peer for each in world.hop.members(RUN, 0.0, world.organiser.peer)}
    return (taken or listed) and any(gate.hears_of(who.peer, shown, NOW_S) for gate in world.gates)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("attacker", ATTACKERS)
@pytest.mark.parametrize("seed", seeds(2, 10))
def test_no_attacker_enters_and_the_honest_always_do(
    tmp_path: Path, seed: int, attacker: str, policy: Policy
) -> None:
    rng = random.Random(f"{seed} {attacker} {policy}")
    there, held = world(rng, tmp_path, policy, attacker)
    members = {there.organiser.peer, *(who.peer for who in there.members)}
    for key, shown in held.forgeries(rng):
        assert key.peer not in members
        entered = [gate for gate in there.gates if admitted(gate, key.peer, shown)]
        believed = heard(there, key, shown, held.keys[0].peer)
        if policy == "open":  # whoever knows the run is let in, except who is banned
            banned = there.gates[0]._bans.why(key.peer) is not None
            assert len(entered) == (0 if banned else len(there.gates))
        else:
            assert not entered
            assert not believed
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
    for member, certificate in zip(there.members, there.certificates, strict=True):
        for shown in (certificate.encode(), b""):
            assert all(admitted(gate, member.peer, shown) for gate in there.gates)
        assert heard(there, member, certificate.encode(), member.peer)
    found = there.hop.members(RUN, 0.0, there.organiser.peer)
    honest = {there.newcomer.peer, *(who.peer for who in there.members)}
    assert honest <= {news.peer for news in found}
