"""Secure rounds with real nodes: from the manifest to a sum that nobody could look into; a site is
killed, or lies, and the others go on bit-equal.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from bad_input_kit import MANIFEST as PLAIN
from bad_input_kit import ended, new_run, odd, one_round, soon
from swarm_kit import MANIFEST, Peers

from atoll.node.home.paths import find_paths
from atoll.node.joining import NodeClient

pytestmark = pytest.mark.slow

NUMEL = 3_000
SECURE = 'kind = "federated"\n' + MANIFEST.replace('method = "local_sgd"\n', "").replace(
    '[exchange]\ncodec = "int8"\nexact = false\n', '[secure]\nmetrics = ["loss"]\n'
)


def test_five_sites_of_which_one_is_killed(tmp_path: Path) -> None:
    with Peers(tmp_path, 5, NUMEL, manifest=SECURE) as swarm:
        swarm.settle()
        swarm.contribute(70)
        outcomes = [peer.expect("outcome") for peer in swarm.all]
        assert [o["status"] for o in outcomes] == ["committed"] * 5
        assert {count for o in outcomes for count in o["contributors"].values()} == {
            1
        }  # nobody says how much it trained
        assert sum(o["counted"] for o in outcomes) >= 4
        assert len({(o["anchor_round"], o["digest"]) for o in outcomes}) == 1
        victim, rest = swarm.all[2], [peer for peer in swarm.all if peer is not swarm.all[2]]
        swarm.contribute(80, who=rest)
        victim.signal("both", signal.SIGKILL)
        for seed in (80, 90):
            if seed > 80:
                swarm.contribute(seed, who=rest)
            outcomes = [peer.expect("outcome") for peer in rest]
            assert [o["status"] for o in outcomes] == ["committed"] * 4
            assert sum(o["counted"] for o in outcomes) >= 3
            assert len({(o["anchor_round"], o["digest"]) for o in outcomes}) == 1
        with NodeClient.connect(find_paths(swarm.all[0].home)) as client:
            (run,) = client.status()["runs"]
        assert run["secure"]["threshold"] in (3, 4)
        assert {peer.peer for peer in rest} >= set(run["secure"]["last"]["members"])
        assert run["secure"]["last"]["metrics"] == {
            "loss": pytest.approx(90 / 64, abs=0.1)
        }  # of seeds 90 to 94


def test_a_real_node_that_gives_another_mean_changes_nobodys_model_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it convenes it proposes its own result; the others make theirs, decide that in the next
    ballot, and say who proposed the other. Without proof: it has signed nothing of that."""
    secure = PLAIN.replace('method = "local_sgd"\n[exchange]\ncodec = "fp32"\n', "[secure]\n")
    run = new_run(tmp_path, manifest='kind = "federated"\n' + secure)
    lies = tmp_path / "lies"
    monkeypatch.setenv("ATOLL_TEST_DEFECT", str(lies))
    honest = [run.organiser(), run.member("b"), run.member("c")]
    liar = run.member("d", command=odd("copier"))
    everybody = [*honest, liar]
    values = {member.swarm.peer: index + 1.0 for index, member in enumerate(everybody)}

    def anchor() -> tuple[int, float]:
        """Round, and the value of all elements, of the newest one, once all honest members have the
        same.
        """

        def same() -> tuple[int, bytes] | None:
            found = {member.anchor() for member in honest}
            return found.pop() if len(found) == 1 else None

        round_, data = soon(same, "the anchors")
        (value,) = torch.frombuffer(bytearray(data), dtype=torch.float32).unique().tolist()
        return round_, value

    with ended(*everybody):
        one_round(*everybody)
        lies.touch()
        first, value = anchor()
        named, round_ = False, first
        while not named or round_ < first + 3:
            tickets = [
                member.swarm.contribute(
                    samples=1, write=lambda out, own=values[member.swarm.peer]: out.fill_(own)
                )
                for member in everybody
            ]
            assert {ticket.wait(60.0).status for ticket in tickets} == {"committed"}
            (before, was), (round_, value) = (round_, value), anchor()
            if round_ == before + 1:
                last = honest[0].state()["secure"]["last"]["members"]
                mean = sum(values[peer] for peer in last) / len(last)
                assert was - value == pytest.approx(mean, abs=1e-3)
            assert 2 * (round_ - before) - 1e-3 <= was - value <= 3 * (round_ - before) + 1e-3
            named = any(member.named() for member in honest)
            assert round_ < first + 60, "it has never convened"
        reasons = [member.named() for member in honest]
        assert {peer for each in reasons for peer in each} == {liar.swarm.peer}
        assert {why for each in reasons for found in each.values() for why in found} <= {
            "it proposes another mean than was unmasked",
            "its part of the result is not of the mean that was unmasked",
        }
        assert [member.state()["banned"] for member in honest] == [{}] * 3
