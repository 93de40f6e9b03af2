"""Federated runs with real nodes, killed as machines die: a site that comes back with what it kept,
and a coordinator whose place another takes.
"""

from __future__ import annotations

import json
import re
import signal
import threading
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bad_input_kit import Member, atoll, ended, new_home, odd, soon
from process.site_peer import LR, loss_of
from seeds import RARE
from swarm_kit import MANIFEST, Peer, Peers

from atoll.collectives.layout import make_layout
from atoll.collectives.round.sampling import draw_members
from atoll.collectives.round_settings import SampleSettings
from atoll.node.home.paths import find_paths
from atoll.node.joining import NodeClient
from atoll.node.manifest import load_run
from atoll.node.records.audit import of_node
from atoll.optim.federated.arrivals import buffered_factor

pytestmark = [*RARE]

SITE = Path(__file__).parent / "site_peer.py"
FEDERATED = 'kind = "federated"\n' + MANIFEST.replace('method = "local_sgd"\n', "").replace(
    "sync_every = 1", "sync_every = 5"
)
SCAFFOLD = FEDERATED + '[federated]\nmethod = "scaffold"\n'
SAMPLED = FEDERATED + "[federated]\nsample = 1\n"
BUFFERED = (
    FEDERATED.replace("int8", "fp32")
    + '[federated]\nmethod = "fedbuff"\nbuffer = 2\ntopology = "coordinator"\n'
)
GROUPED = FEDERATED.replace("int8", "fp32").replace(
    "sync_every = 5", "sync_every = 5\nrounds = 14"
) + ('[federated]\nmethod = "fedcompass"\nlongest = 4.0\ntopology = "coordinator"\n')
STAR = (
    'kind = "federated"\n'
    + MANIFEST.replace('method = "local_sgd"\n', "")
    + '[federated]\ntopology = "coordinator"\n'
)


def trained(swarm: Peers, who: list[int]) -> list[dict[str, Any]]:
    """These sites train a round; what each says of it."""
    for index in who:
        swarm.all[index].say(do="train")
    told = [swarm.all[index].expect("outcome") for index in who]
    assert all(each["status"] in ("committed", "lost") for each in told)
    return told


def together(swarm: Peers) -> list[dict[str, Any]]:
    """All train until a round counts them all."""
    for _ in range(40):
        told = trained(swarm, list(range(len(swarm.all))))
        if all(each["counted"] and len(each["contributors"]) == len(swarm.all) for each in told):
            assert len({(each["anchor_round"], each["digest"]) for each in told}) == 1
            return told
    raise AssertionError("no common round in 40 tries")


def adds_up(told: list[dict[str, Any]]) -> bool:
    """Whether the sites' control variates are, element by element, what the anchor has as their
    sum.
    """
    sums = [sum(column) for column in zip(*(each["own"] for each in told), strict=True)]
    return all(abs(mine - run) < 1e-4 for mine, run in zip(sums, told[0]["sum"], strict=True))


def test_a_site_that_is_killed_comes_back_with_its_control_variate(tmp_path: Path) -> None:
    """Node and script, with SIGKILL: what it kept stays in the sum, and is added to again
    (`test_site_runs.py` kills at every other moment).
    """
    with Peers(tmp_path, 3, 40, SITE, manifest=SCAFFOLD) as swarm:
        told = together(swarm)
        assert adds_up(told)
        assert told[0]["clients"] == 3
        victim, own = swarm.all[2], told[2]["own"]
        assert any(own)
        victim.signal("both", signal.SIGKILL)
        rest = trained(swarm, [0, 1])
        assert rest[0]["digest"] == rest[1]["digest"]
        assert adds_up([*rest, {"own": own}])  # it still counts in the mean, with its last one
        victim.process.wait(10)
        victim.start()
        victim.expect("ready")
        told = together(swarm)
        assert adds_up(told)
        assert told[0]["clients"] == 3


def test_a_killed_coordinator_costs_at_most_one_round(tmp_path: Path) -> None:
    """The organiser's node adds up all. It is killed in the middle of a round: the others'
    contributions are decided by another one.
    """
    with Peers(tmp_path, 3, 3_000, manifest=STAR) as swarm:
        swarm.settle()
        rest = swarm.all[1:]
        swarm.contribute(10)
        before = [peer.expect("outcome") for peer in swarm.all]
        assert len({each["digest"] for each in before}) == 1
        swarm.contribute(20, who=rest)
        swarm.all[0].signal("both", signal.SIGKILL)
        told = [peer.expect("outcome") for peer in rest]
        if not all(each["counted"] for each in told):  # that round is the price
            swarm.contribute(30, who=rest)
            told = [peer.expect("outcome") for peer in rest]
        assert [(each["status"], each["counted"]) for each in told] == [("committed", True)] * 2
        assert len({(each["anchor_round"], each["digest"]) for each in told}) == 1
        assert told[0]["anchor_round"] <= before[0]["anchor_round"] + 2
        assert swarm.all[0].peer not in told[0]["contributors"]


def after_five(anchor: torch.Tensor, peer: Peer) -> torch.Tensor:
    """anchor - parameters of a site's turn."""
    (a, b), live = loss_of(peer.peer, len(anchor)), anchor.clone()
    for _ in range(5):
        live -= LR * a * (live - b)
    return anchor - live


def test_sites_that_are_slower_are_not_waited_for_and_count_by_their_staleness(
    tmp_path: Path,
) -> None:
    """FedBuff with a coordinator, two contributions a round, three sites. Who is told to train is
    fast; the others are slow, and on an old anchor.
    """
    with Peers(tmp_path, 3, 40, SITE, manifest=BUFFERED) as swarm:
        with NodeClient.connect(find_paths(swarm.all[0].home)) as client:
            soon(
                lambda: len(client.status()["runs"][0]["members"]) == 3, "all are members"
            )  # else a round is of all that there are
        anchors, bases = {0: torch.zeros(40)}, dict.fromkeys(range(3), 0)
        for who in ((0, 1), (0, 1), (1, 2), (0, 2)):
            told = trained(swarm, list(who))
            assert len({each["digest"] for each in told}) == 1
            assert [each["contributors"] for each in told] == [
                {swarm.all[site].peer: 5 for site in who}
            ] * 2
            newest = max(anchors)
            step = sum(
                (
                    buffered_factor(newest - bases[site])
                    * after_five(anchors[bases[site]], swarm.all[site])
                    for site in who
                ),
                torch.zeros(40),
            )
            bases |= dict.fromkeys(who, newest + 1)
            anchors[newest + 1] = anchors[newest] - step / 2
            assert told[0]["anchor_round"] == newest + 1
            assert torch.allclose(torch.tensor(told[0]["anchor"]), anchors[newest + 1], atol=1e-5)
        swarm.all[0].signal("both", signal.SIGKILL)  # the coordinator
        told = trained(swarm, [1, 2])
        assert told[0]["digest"] == told[1]["digest"]
        assert [each["contributors"] for each in told] == [
            {swarm.all[site].peer: 5 for site in (1, 2)}
        ] * 2


def test_sites_get_their_steps_from_the_log_and_a_killed_coordinator_does_not_end_the_schedule(
    tmp_path: Path,
) -> None:
    """FedCompass with three sites of unlike speed; the organiser's, which adds up and is the
    fastest, is killed once it was in a group.
    """
    with Peers(tmp_path, 3, 40, SITE, manifest=GROUPED) as swarm:
        with NodeClient.connect(find_paths(swarm.all[0].home)) as client:
            soon(lambda: len(client.status()["runs"][0]["members"]) == 3, "all are members")
        for peer, step_s in zip(swarm.all, (0.02, 0.03, 0.05), strict=True):
            peer.say(do="finish", step_s=step_s)
        first, *rest = swarm.all
        rounds = dict[int, dict[str, int]]()

        def note(met: dict[str, Any]) -> None:
            """An entry of nobody (that the killed one is no member any more) has the number of the
            round before it.
            """
            if met["contributors"]:
                assert rounds.setdefault(met["round"], met["contributors"]) == met["contributors"]

        while not any(len(who) > 1 and first.peer in who for who in rounds.values()):
            note(first.expect("met"))
        first.signal("both", signal.SIGKILL)
        ends = list[dict[str, Any]]()
        for peer in rest:
            while (met := peer.expect_any(60.0))["event"] == "met":
                note(met)
            ends.append(met)
        assert {(end["anchor_round"], end["status"]) for end in ends} == {(14, "committed")}
        assert len({end["digest"] for end in ends}) == 1
        steps = {
            peer.peer: [who[peer.peer] for _, who in sorted(rounds.items()) if peer.peer in who]
            for peer in swarm.all
        }
        assert all(made[0] == 5 for made in steps.values())  # the first turn is as short as may be
        assert all(count >= 5 for made in steps.values() for count in made)
        assert all(
            max(steps[peer.peer]) > 5 for peer in swarm.all[:2]
        )  # then the faster ones get more
        assert any(
            len(who) == 2 and first.peer not in who for who in rounds.values()
        )  # those that are left have a group


def refusals(by: Peer, of: str) -> list[str]:
    """What this peer's node refuses from now on of somebody that was not drawn; grows."""
    events, told = NodeClient.connect(find_paths(by.home)).events(), list[str]()
    refusal = re.compile(f"{of} contributes to round [0-9]+, for which it was not sampled")

    def follow() -> None:
        told.extend(
            event["reason"]
            for event in events
            if event["event"] == "peer.misbehaved" and refusal.fullmatch(event["reason"])
        )

    threading.Thread(target=follow, daemon=True).start()  # until the node ends
    return told


def test_only_those_contribute_that_the_log_draws_and_a_member_that_was_not_is_refused(
    tmp_path: Path,
) -> None:
    """One of three a round. The third's node takes part in every round, drawn or not: the others
    name it, and count it where it was drawn only.
    """
    told, enough = list[tuple[Peer, dict[str, Any]]](), threading.Event()

    def train(swarm: Peers, index: int) -> None:
        """Always: a round waits for those that it drew."""
        with suppress(AssertionError, OSError):  # it was killed
            while not enough.is_set():
                told.append((swarm.all[index], *trained(swarm, [index])))

    with Peers(tmp_path, 2, 40, SITE, manifest=SAMPLED) as swarm:
        greedy = Member(
            new_home(tmp_path / "greedy"),
            swarm.invite,
            command=odd("undrawn"),
            layout=make_layout([("w", (40,))]),
        )
        home, run = swarm.all[0].home, swarm.all[0].run
        with ended(greedy):
            heard = [refusals(peer, greedy.swarm.peer) for peer in swarm.all]
            threads = [threading.Thread(target=train, args=(swarm, index)) for index in (0, 1)]
            for thread in threads:
                thread.start()
            while len(told) < 12 or not all(heard):
                assert len(told) < 240, "never drawn by chance, or never refused"
                assert all(thread.is_alive() for thread in threads), (
                    "a site hears nothing of its rounds"
                )
                greedy.swarm.contribute(samples=1000, write=lambda out: out.fill_(1000.0)).wait(10)
            enough.set()
            for peer in swarm.all:
                peer.signal(
                    "both", signal.SIGKILL
                )  # whoever waits for a round of somebody that has stopped would wait on
    for thread in threads:
        thread.join()
    audited = json.loads(atoll(home, "audit", run, "--json").out)
    (log,) = of_node(find_paths(home), load_run(find_paths(home), run)).logs.values()
    entries = [certified.entry for certified in log()]
    counted = {
        entry.round: {each.member.peer for each in entry.contributors}
        for entry in entries
        if entry.contributors
    }
    chosen = {
        after.round: draw_members(run, before.hash(), before.next_config, SampleSettings(count=1))
        for before, after in pairwise(entries)
    }
    assert all(counted[round_] == {member.peer for member in chosen[round_]} for round_ in counted)
    assert any(greedy.swarm.peer not in peers for peers in counted.values())
    for peer, each in told:
        assert each["counted"] == (peer.peer in each["contributors"])
    digests = {(each["anchor_round"], each["digest"]) for _, each in told}
    assert len(digests) == len({round_ for round_, _ in digests})
    assert audited["proven"]
    assert audited["logs"][0]["contributors"].keys() == set().union(*counted.values())
