"""Federated methods whose members keep something, in runs of the real session: what they end with,
what adds up, what survives a crash.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch
from seeds import daily
from torch import Tensor, nn

from atoll.collectives import messages as m
from atoll.collectives.errors import (
    ConfigError,
    LocalProtocolError,
    RemoteProtocolError,
    StateError,
    StorageError,
)
from atoll.collectives.group import Entry
from atoll.collectives.identifiers import PeerId
from atoll.collectives.layout import make_layout
from atoll.collectives.outcomes import Outcome
from atoll.collectives.outer_rules import OuterSettings
from atoll.collectives.round.sampling import draw_members
from atoll.collectives.round.timing import Timing
from atoll.collectives.round_settings import SampleSettings
from atoll.collectives.swarm import RunSettings, SecureSettings, SiteSettings
from atoll.node.client.shelf import FileShelf
from atoll.node.local import LocalSwarm
from atoll.node.session.events import PeerMisbehaved
from atoll.node.simulation.local_member import LocalMember
from atoll.optim import SoloSwarm, attach
from atoll.optim.federated.member import InnerSteps, first_control
from atoll.optim.federated.methods import SUMS
from atoll.optim.federated.personal import fine_tuned
from atoll.optim.federated.server import FederatedServer
from atoll.optim.federated.site import SiteState, knobs_of, method_of, unpack
from atoll.optim.script.tuning import fine_tuned_model

N, D, K, LR = 4, 5, 6, 0.1
CHANCE = torch.Generator().manual_seed(0)
A, B = torch.rand(N, D, generator=CHANCE) * 1.5 + 0.5, torch.randn(N, D, generator=CHANCE) * 3
OPTIMUM = (A * B).sum(0) / A.sum(0)
WITH_CONTROL = ("scaffold", "scaffold_m", "scaffold_m_vr")


class Model(nn.Module):
    """A point; a site's loss is a_i/2 (w - b_i)², element by element."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(D))

    def loss(self, site: int) -> Tensor:
        return (A[site] / 2 * (self.w - B[site]) ** 2).sum()


@dataclass
class Seen:
    """What a site saw."""

    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    kept: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict[int, tuple[Tensor, Tensor]]
    )  # by round: c_i, all of the anchor
    anchor: Tensor = field(default_factory=lambda: torch.zeros(0))
    own: Tensor = field(default_factory=lambda: torch.zeros(0))


def settings(name: str, rounds: int = 8, **more: float) -> RunSettings:
    site = SiteSettings(name, **more)  # type: ignore[arg-type]
    exact = dict.fromkeys(SUMS, "fp32")
    outer = OuterSettings(kind="sgd", lr=0.8, momentum=0.0)
    return RunSettings(
        sync_every=K, rounds=rounds, codec="fp32", codecs=exact, outer=outer, site=site
    )


def play(
    swarm: LocalSwarm,
    seen: dict[int, Seen],
    step_s: Sequence[float] | float = (0.1, 0.11, 0.12, 0.1),
    after: Callable[[LocalMember, Outcome], None] = lambda member, outcome: None,
    limit_s: float = 86_400.0,
) -> None:
    """Every site trains to the end of the run. A slower one makes fewer steps a round. ``after`` is
    called after each round at each.
    """

    def script(member: LocalMember) -> None:
        found, model = seen.setdefault(member.index, Seen()), Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)

        def heard(outcome: Outcome) -> None:
            found.outcomes.append(outcome)
            after(member, outcome)
            replica = attachment._strands[0].replica
            kept: SiteState = replica.kept  # type: ignore[attr-defined]
            anchor = torch.zeros(replica.flat.numel)
            replica.base.copy_into(anchor)
            if kept.own is not None and not kept.open:
                found.kept[replica.base.round] = (kept.own.clone(), anchor)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model.loss(member.index)
            loss.backward()
            return loss

        attachment = attach(model, optimizer, member, clock=member.clock, on_round=heard)
        while not attachment.done:
            optimizer.step(closure)
        view = member.anchor()
        found.anchor = torch.zeros(view.numel)
        view.copy_into(found.anchor)
        with attachment.evaluate_anchor(
            own=member.settings.site is not None and member.settings.site.pull is not None
        ):
            found.own = model.w.detach().clone()

    swarm.run(script, step_s=step_s, limit_s=limit_s)


def reference(run: RunSettings, rounds: list[list[int]]) -> tuple[FederatedServer, list[Tensor]]:
    """The rounds of all sites, of so many steps each, by what `atoll simulate` is made of; and the
    c_i.
    """
    assert run.site is not None
    method, model = method_of(run.site), Model()
    server = FederatedServer(method, run.outer, torch.zeros(D))
    own = [
        torch.zeros(0) if (first := first_control(method, D)) is None else first for _ in range(N)
    ]
    knobs = knobs_of(run.site)

    def gradient(site: int, at: Tensor) -> Tensor:
        with torch.no_grad():
            model.w.copy_(at)
        model.zero_grad()
        model.loss(site).backward()
        assert model.w.grad is not None
        return model.w.grad.clone()

    for steps in rounds:
        served = server.served()
        for site in range(N):
            turn, y = (
                InnerSteps(method, knobs, served, own[site] if method.control else None),
                served.anchor.clone(),
            )
            for _ in range(steps[site]):
                g = gradient(site, y)
                at = turn.second_at(g, y)
                y = y - LR * turn.direction(g, y, None if at is None else gradient(site, at))
            server.add(served.anchor - y, steps[site])
            control = turn.control(served.anchor - y, steps[site], LR)
            if control is not None:
                server.note(control - own[site], 1 / N)
                own[site] = control
        server.step(K, LR)
    return server, own


@pytest.mark.parametrize(
    "name", ["fedprox", "fedavg_m", "fedavg_m_vr", "per_fedavg", *WITH_CONTROL]
)
def test_a_real_run_is_the_simulated_one(name: str) -> None:
    """Round by round through the same classes: the same anchor, and the same control variates."""
    run, seen = settings(name, mu=0.7, beta=0.4, ahead=0.2), dict[int, Seen]()
    play(LocalSwarm(N, settings=run, latency_s=0.02), seen, 0.1)
    assert all(torch.equal(found.anchor, seen[0].anchor) for found in seen.values())
    steps = {
        o.round: {share.peer: share.samples for share in o.contributors}
        for found in seen.values()
        for o in found.outcomes
    }
    server, own = reference(
        run, [[steps[round_][PeerId(f"p{site}")] for site in range(N)] for round_ in range(1, 9)]
    )
    assert torch.allclose(seen[0].anchor[:D], server.anchor, atol=2e-5)
    if name in WITH_CONTROL:
        assert all(torch.allclose(seen[site].kept[8][0], own[site], atol=1e-4) for site in range(N))
        assert server.common is not None
        assert torch.allclose(seen[0].anchor[D : 2 * D] / N, server.common, atol=1e-4)


def adds_up(seen: dict[int, Seen], rounds: int) -> int:
    """In how many rounds all sites' c_i are known here; in each of them they add up to what the
    anchor has.
    """
    checked = 0
    for round_ in range(1, rounds + 1):
        known = [found.kept[round_] for found in seen.values() if round_ in found.kept]
        if len(known) == N:
            anchors = [anchor for _, anchor in known]
            assert all(torch.equal(anchor, anchors[0]) for anchor in anchors)
            assert (
                torch.stack([own for own, _ in known]).sum(0) - anchors[0][D : 2 * D]
            ).abs().max() < 1e-5
            assert anchors[0][-1].round() == sum(bool(own.any()) for own, _ in known)
            checked += 1
    return checked


def test_control_variates_add_up_after_every_round_and_the_optimum_is_reached() -> None:
    seen = dict[int, Seen]()
    play(LocalSwarm(N, settings=settings("scaffold", 40), latency_s=0.02), seen)
    assert adds_up(seen, 40) == 40
    assert (seen[0].anchor[:D] - OPTIMUM).abs().max() < 1e-4
    assert seen[0].anchor[D : 2 * D].abs().max() < 1e-3


@pytest.mark.parametrize("sample", [None, SampleSettings(count=2)])
@pytest.mark.parametrize(
    "when_s", daily(3, [2.0 + 0.11 * step for step in (0, 3, 6, 1, 4, 7, 2, 5)])
)
def test_a_control_variate_is_in_the_sum_once_whenever_its_site_is_killed(
    when_s: float, sample: SampleSettings | None
) -> None:
    """Node and script are killed: while training, between saving and being counted, after that and
    before the script hears of it. A round takes 0.8 s. The site is back on its disk at once, or a
    little later: in the same round, in the next, when it is drawn and when it is not."""
    seen, run = dict[int, Seen](), msgspec.structs.replace(settings("scaffold", 10), sample=sample)
    back = 0.1 + 0.15 * (round(when_s * 9) % 3)
    play(LocalSwarm(N, settings=run, latency_s=0.03).crash_at(2, when_s, back_after_s=back), seen)
    assert adds_up(seen, 10) >= 6
    assert 10 in seen[2].kept


def rounds_of(seen: dict[int, Seen]) -> dict[int, set[str]]:
    """Who contributed to each round."""
    return {
        o.round: {share.peer for share in o.contributors}
        for found in seen.values()
        for o in found.outcomes
        if o.contributors
    }


def test_only_those_contribute_that_the_log_draws() -> None:
    """Two of four a round: the others wait, with no step of theirs in the model; anybody can draw
    again from the log; SCAFFOLD gets to the optimum.
    """
    run, seen = (
        msgspec.structs.replace(settings("scaffold", 60), sample=SampleSettings(count=2)),
        dict[int, Seen](),
    )
    swarm = LocalSwarm(N, settings=run, latency_s=0.02)
    play(swarm, seen)
    given = rounds_of(seen)
    assert {len(peers) for peers in given.values()} == {2}
    assert set().union(*given.values()) == {f"p{site}" for site in range(N)}
    assert (seen[0].anchor[:D] - OPTIMUM).abs().max() < 1e-4
    assert adds_up(seen, 60) == 60
    process = swarm.peers[0].process
    assert process is not None
    machine = process.session.machine
    assert machine is not None
    before = machine.journal.entries[0].entry
    for certified in machine.journal.entries.since(1):
        entry = certified.entry
        assert {c.member for c in entry.contributors} <= set(
            draw_members("local", entry.base, before.next_config, SampleSettings(count=2))
        )
        before = entry


def test_whoever_was_not_drawn_is_refused_by_name() -> None:
    refused: list[str] = []

    def script(member: LocalMember) -> None:
        member.open(make_layout([("w", (D,))]), lambda flat: None)
        member.sleep(2.0)
        machine = member._node().session.machine
        assert machine is not None
        if member.index == 0 and len(machine.config) == N:
            stranger = next(who for who in machine.config if who not in machine.draw.members)
            ready = m.Ready(machine.base, b"c" * 16, 5, False)
            with pytest.raises(RemoteProtocolError, match="was not sampled") as caught:
                machine.on_message(
                    member.clock(), stranger.peer, stranger.incarnation, machine.round, ready
                )
            refused.append(caught.value.peer)
            assert refused == [stranger.peer]
            assert stranger not in machine.open.ready

    run = msgspec.structs.replace(settings("fedavg"), sample=SampleSettings(0.5))
    LocalSwarm(N, settings=run, latency_s=0.02).run(script)
    assert len(refused) == 1


def test_nobody_waits_in_a_run_in_which_all_take_part() -> None:
    def script(member: LocalMember) -> None:
        member.open(make_layout([("w", (D,))]), lambda flat: None)
        with pytest.raises(LocalProtocolError, match="no samples"):
            member._node().session.contribute(member.clock(), b"c" * 16, 0, torch.zeros(D))

    LocalSwarm(1, settings=settings("fedavg")).run(script)


def test_rounds_go_on_where_all_that_were_drawn_are_dead() -> None:
    """One of four a round, and one is gone for good: when it is drawn, the log draws again without
    it.
    """
    run, seen = (
        msgspec.structs.replace(settings("fedavg", 12), sample=SampleSettings(count=1)),
        dict[int, Seen](),
    )
    play(LocalSwarm(N, settings=run, latency_s=0.03).crash_at(2, 3.0), seen)
    given = rounds_of(seen)
    assert sorted(given) == list(range(1, 13))
    assert all(len(peers) == 1 for peers in given.values())
    assert "p2" not in set().union(*(peers for round_, peers in given.items() if round_ > 5))
    assert all(
        torch.equal(found.anchor, seen[0].anchor) for site, found in seen.items() if site != 2
    )


def entries_of(swarm: LocalSwarm, index: int) -> list[Entry]:
    """What was decided, the genesis first."""
    process = swarm.peers[index].process
    assert process is not None
    assert process.session.machine is not None
    return [certified.entry for certified in process.session.machine.journal.entries.since(0)]


def draws_again(entries: Sequence[Entry]) -> list[int]:
    """The entries that do nothing but end a round."""
    return [
        entry.round
        for before, entry in itertools.pairwise(entries)
        if not entry.contributors and entry.next_config == before.next_config
    ]


@pytest.mark.parametrize("kind", daily(1, ("secure", "plain", "rule")))
def test_the_log_draws_again_where_too_few_of_those_that_were_drawn_train(kind: str) -> None:
    """From the fourth round on the script of a site hangs; its node lives. Whoever waits in vain
    for it has another draw, and what those do who were not drawn at first is a turn of theirs, not
    what they waited with. What was offered to the draw before is offered where its site is drawn
    again."""
    sample, seen, breaches = (
        SampleSettings(count=1) if kind == "plain" else SampleSettings(0.6, least=3),
        dict[int, Seen](),
        list[str](),
    )
    run = msgspec.structs.replace(settings("fedavg", 12 if kind == "plain" else 7), sample=sample)
    if kind == "rule":
        run = msgspec.structs.replace(run, codecs={}, reducer="median:1")
    if kind == "secure":
        run = msgspec.structs.replace(
            run, codec="bits", reducer="copy", codecs={}, secure=SecureSettings(3)
        )

    def hang(member: LocalMember, outcome: Outcome) -> None:
        if outcome.round == 3:
            process, hear = member._node(), member.hear

            def watch(event: object) -> None:
                breaches.extend([event.reason] if isinstance(event, PeerMisbehaved) else [])
                hear(event)

            process._emit = watch
        while (
            member.index == 2
            and outcome.round >= 4
            and any(not len(found.anchor) for site, found in seen.items() if site != 2)
        ):
            member.sleep(5.0)

    swarm = LocalSwarm(N, settings=run, latency_s=0.03, timing=Timing(redraw_s=8.0))
    play(swarm, seen, 0.1, hang)
    assert run.rounds is not None
    assert sorted(rounds_of(seen)) == list(range(1, run.rounds + 1))
    entries = entries_of(swarm, 0)
    assert breaches == []
    assert draws_again(entries)
    for before, entry in itertools.pairwise(entries):
        assert {c.member for c in entry.contributors} <= set(
            draw_members("local", entry.base, before.next_config, sample)
        )
        assert kind != "plain" or all(c.weight == K for c in entry.contributors)
    counted = {o.round for o in seen[2].outcomes if o.counted}
    assert counted <= {1, 2, 3, 4}
    if kind != "plain":
        assert all(
            sum(o.round == round_ and o.counted for found in seen.values() for o in found.outcomes)
            == 3
            for round_ in range(5, 8)
        )
    assert all(torch.equal(found.anchor, seen[0].anchor) for found in seen.values())


def test_nobody_draws_again_for_the_others() -> None:
    """A convener that ends a round of its own accord, to have another draw, gets no votes before
    those that were drawn had their time.
    """
    told: list[tuple[bool, bool]] = []

    def script(member: LocalMember) -> None:
        member.open(make_layout([("w", (D,))]), lambda flat: None)
        member.sleep(2.0)
        machine = member._node().session.machine
        assert machine is not None
        if member.index != 0 or len(machine.config) < N:
            return
        round_ = machine.round
        entry = Entry(
            machine.log,
            round_,
            machine.base,
            machine.root or b"",
            (),
            (),
            (),
            machine.shape.numel,
            machine.shape.chunk_elements,
            machine.shape.codec,
            machine.shape.reducer,
            machine.config,
        )
        for wait_s in (0.0, 40.0, 30.0):
            member.sleep(wait_s)
            assert machine.round == round_
            ballot = max(machine.ballot, machine.journal.promised)
            ballot += machine.convener_of(ballot) == machine.me
            convener = machine.convener_of(ballot)
            machine.on_message(
                member.clock(), convener.peer, convener.incarnation, round_, m.Accept(ballot, entry)
            )
            told.append((machine.open.pending is not None, machine.journal.accepted is not None))

    run = msgspec.structs.replace(settings("fedavg"), sample=SampleSettings(0.5))
    LocalSwarm(N, settings=run, latency_s=0.02).run(script)
    assert told == [(True, False), (True, False), (False, True)]


def test_who_has_seen_no_round_does_not_end_that_of_the_others() -> None:
    """Rounds are longer than a newcomer waits, which does not know it. It proposes another draw and
    gets no votes; its own binds no later convener, and what those give that were drawn is counted.
    """
    seen = dict[int, Seen]()
    run, timing = (
        msgspec.structs.replace(settings("fedavg", 7), sample=SampleSettings(count=1)),
        Timing(redraw_s=8.0),
    )
    swarm = LocalSwarm(N, settings=run, latency_s=0.033, jitter_s=0.1, timing=timing).join_at(
        1, 140.0
    )
    play(swarm, seen, 5.0, limit_s=1000.0)
    entries = entries_of(swarm, 0)
    counted = [entry.round for entry in entries if entry.contributors]
    assert len(counted) == 7
    assert not any(counted[2] < round_ for round_ in draws_again(entries))


@pytest.mark.slow
def test_a_night_without_scripts_is_no_turn() -> None:
    """All rest for long between two rounds, and then one that is drawn hangs: the others do not
    wait for it as if rounds took so long.
    """
    seen = dict[int, Seen]()

    def rest(member: LocalMember, outcome: Outcome) -> None:
        if outcome.round == 3:
            member.sleep(600.0 - member.clock())
        while (
            member.index == 2
            and outcome.round >= 3
            and any(not len(found.anchor) for site, found in seen.items() if site != 2)
        ):
            member.sleep(5.0)

    run, timing = (
        msgspec.structs.replace(settings("fedavg", 12), sample=SampleSettings(count=1)),
        Timing(redraw_s=8.0),
    )
    swarm = LocalSwarm(N, settings=run, latency_s=0.03, timing=timing)
    play(swarm, seen, 0.1, rest, limit_s=900.0)
    entries = entries_of(swarm, 0)
    assert draws_again(entries)
    assert [entry.round for entry in entries if entry.contributors][-1] == entries[-1].round


def test_a_vote_for_another_draw_does_not_stop_a_round_for_good() -> None:
    """The convener of a round wants another draw and votes for it, but the others see those train
    that were drawn. Conveners after it adopt that entry, as they must: in the end all vote for it.
    """
    seen, cast = dict[int, Seen](), list[int]()

    def vote(member: LocalMember, outcome: Outcome) -> None:
        machine = member._node().session.machine
        assert machine is not None
        if (
            outcome.round < 3
            or machine.convener_of(0) != machine.me
            or machine.takes_part
            or machine.root is None
            or len(cast) > 2
        ):
            return
        shape = machine.shape
        entry = Entry(
            machine.log,
            machine.round,
            machine.base,
            machine.root,
            (),
            (),
            (),
            shape.numel,
            shape.chunk_elements,
            shape.codec,
            shape.reducer,
            machine.config,
        )
        machine.acceptor.cast(member.clock(), 0, entry)
        cast.append(machine.round)

    run = msgspec.structs.replace(settings("fedavg", 12), sample=SampleSettings(count=1))
    swarm = LocalSwarm(N, settings=run, latency_s=0.03, jitter_s=0.1)
    play(swarm, seen, 5.0, vote, limit_s=2000.0)
    assert cast
    assert sorted(rounds_of(seen)) == list(range(1, 13))
    assert all(torch.equal(found.anchor, seen[0].anchor) for found in seen.values())


def test_who_was_drawn_and_sends_nothing_of_what_it_offered_does_not_stop_a_run() -> None:
    """It lives, says that its contribution is there, and not a byte of it comes: conveners plan it
    in vain, until there is another draw.
    """

    def mute(member: LocalMember, outcome: Outcome) -> None:
        if member.index == 2 and outcome.round == 3:
            member._node().session.ports.exchange.execute = lambda plan, audience: None

    seen = dict[int, Seen]()
    run = msgspec.structs.replace(settings("fedavg", 8), sample=SampleSettings(count=1))
    swarm = LocalSwarm(N, settings=run, latency_s=0.03, timing=Timing(redraw_s=8.0))
    play(swarm, seen, 0.1, mute, limit_s=300.0)
    assert draws_again(entries_of(swarm, 0))
    assert sorted(rounds_of(seen)) == list(range(1, 9))
    assert {o.round for o in seen[2].outcomes if o.counted} <= {1, 2, 3}


def test_secure_sums_are_of_those_that_were_draw_members() -> None:
    """Three of four, of which a sum needs three; one is killed and comes back."""
    secure = RunSettings(
        sync_every=K,
        rounds=5,
        codec="bits",
        reducer="copy",
        outer=settings("fedavg").outer,
        secure=SecureSettings(3),
        site=SiteSettings(),
        sample=SampleSettings(0.6, least=3),
    )
    seen = dict[int, Seen]()
    swarm = LocalSwarm(N, settings=secure, latency_s=0.02).crash_at(1, 4.0, back_after_s=1.0)
    play(swarm, seen, 0.1)
    assert all(torch.equal(found.anchor, seen[0].anchor) for found in seen.values())
    counted = {
        round_: sum(
            o.round == round_ and o.counted for found in seen.values() for o in found.outcomes
        )
        for round_ in range(1, 6)
    }
    assert all(number <= 3 for number in counted.values())
    assert sum(number == 3 for number in counted.values()) >= 3


def test_a_lost_contribution_leaves_its_sites_control_variate_as_it_was() -> None:
    """Two of four do not hear the others for a while: their contributions are not counted, or
    nobody's are.
    """
    seen = dict[int, Seen]()
    play(
        LocalSwarm(N, settings=settings("scaffold", 14), latency_s=0.02).partition_at(
            [[0, 1, 3], [2]], 2.5, 3.0
        ),
        seen,
    )
    lost = [o for o in seen[2].outcomes if o.status == "committed" and not o.counted]
    missed = set(range(1, 15)) - {o.round for o in seen[2].outcomes if o.counted}
    assert missed
    assert lost or missed
    assert adds_up(seen, 14) >= 6


def test_a_personal_model_is_nearer_to_its_site_and_travels_nowhere() -> None:
    """Ditto: between the site's own optimum and the run's, by what the pull says."""
    seen = dict[int, Seen]()
    play(
        LocalSwarm(N, settings=settings("fedavg", 30, pull=0.5), latency_s=0.02).crash_at(
            1, 9.0, back_after_s=0.5
        ),
        seen,
    )
    assert seen[0].anchor.numel() == D
    for site, found in seen.items():
        between = (A[site] * B[site] + 0.5 * found.anchor) / (A[site] + 0.5)
        assert (found.own - between).abs().max() < 0.1, site
        assert (found.own - B[site]).norm() < (found.anchor - B[site]).norm()


def test_what_is_kept_is_whole_or_refused() -> None:
    kept = SiteState(7, True, True, 0.6, torch.arange(3.0), torch.ones(3))
    again = unpack(kept.pack(), 3)
    assert (again.round, again.open, again.member, again.rate) == (7, True, True, 0.6)
    assert again.own is not None
    assert again.next is not None
    assert torch.equal(again.own, torch.arange(3.0))
    assert again.personal is None
    again.resolve(True)
    assert torch.equal(again.own, torch.ones(3))
    again.resolve(True)  # once
    assert torch.equal(again.own, torch.ones(3))
    assert unpack(SiteState(0).pack(), 3).own is None
    data = kept.pack()
    for wrong in (data[:-1], data[:20], b"", b"\xff" * 64, data.replace(b"round", b"sound")):
        with pytest.raises(StateError):
            unpack(wrong, 3)
    with pytest.raises(StateError, match="another model"):
        unpack(data, 4)


def test_a_shelf_keeps_what_was_saved_last(tmp_path: Path) -> None:
    shelf = FileShelf(tmp_path)
    assert shelf.load() is None
    shelf.save(b"one")
    shelf.save(b"two")
    assert FileShelf(tmp_path).load() == b"two"
    assert [file.name for file in tmp_path.iterdir()] == ["site"]
    with pytest.raises(StorageError):
        FileShelf(tmp_path / "nowhere").save(b"three")


def test_an_optimizer_whose_steps_are_not_the_methods_is_refused() -> None:
    def attached(
        name: str, optimizer: type[torch.optim.Optimizer] | None, **options: float
    ) -> None:
        model = Model()
        made = optimizer(model.parameters(), lr=0.1, **options) if optimizer else None  # type: ignore[call-arg]
        attachment = attach(model, made, SoloSwarm(settings(name)))
        if made is not None:
            model.loss(0).backward()
            made.step()
        attachment.detach()

    attached("scaffold", torch.optim.SGD)
    attached("fedprox", torch.optim.Adam)
    for name, optimizer, options, key in (
        ("scaffold", torch.optim.SGD, {"momentum": 0.9}, "optimizer"),
        ("scaffold_m", torch.optim.SGD, {"weight_decay": 0.1}, "optimizer"),
        ("fedavg_m", torch.optim.Adam, {}, "optimizer"),
        ("fedprox", None, {}, "optimizer"),
        ("per_fedavg", torch.optim.SGD, {}, "optimizer"),  # without a closure
    ):
        with pytest.raises(ConfigError) as caught:
            attached(name, optimizer, **options)
        assert caught.value.key == key
    with (
        pytest.raises(ConfigError, match="no personal models"),
        attach(Model(), None, SoloSwarm()).evaluate_anchor(own=True),
    ):
        pass


@pytest.mark.parametrize("name", ["fedavg", "per_fedavg"])
def test_a_site_fine_tunes_the_runs_model_and_leaves_its_live_one_alone(name: str) -> None:
    """As the simulation does it (`personal.fine_tuned`), from the anchor that all have; it is
    better at the site.
    """

    def script(member: LocalMember) -> tuple[Tensor, Tensor, float, float]:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model.loss(member.index)
            loss.backward()
            return loss

        attachment = attach(model, optimizer, member, clock=member.clock)
        while not attachment.done:
            optimizer.step(closure)
        with attachment.evaluate_anchor():
            anchor, shared = model.w.detach().clone(), float(model.loss(member.index).detach())
        live = model.w.detach().clone()
        own = fine_tuned_model(
            attachment, model, lambda each, site: each.loss(site), [member.index] * 2, 5, LR
        )
        assert isinstance(own, Model)
        assert torch.equal(model.w, live)
        for batches, steps, lr in (
            ([], 1, LR),
            (iter([member.index]), 2, LR),
            ([member.index], -1, LR),
            ([member.index], 1, 0.0),
        ):
            with pytest.raises(ConfigError):
                fine_tuned_model(
                    attachment, model, lambda each, site: each.loss(site), batches, steps, lr
                )
        return anchor, own.w.detach(), shared, float(own.loss(member.index).detach())

    found = LocalSwarm(N, settings=settings(name, rounds=4)).run(script, step_s=0.1)
    for site, (anchor, own, shared, tuned) in enumerate(found):
        assert torch.equal(anchor, found[0][0])
        expected = fine_tuned(anchor, lambda at, site=site: A[site] * (at - B[site]), 5, LR)
        assert torch.allclose(own, expected, atol=1e-6)
        assert tuned < 0.8 * shared
