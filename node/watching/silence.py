"""Why nobody answers who asks for a run's manifest, as far as this node can tell."""

from __future__ import annotations

from collections.abc import Sequence

from ...collectives.errors import AtollError, NetworkError
from ...collectives.identifiers import PeerId, RunId
from ..net.network import PeerNetwork
from ..net.transport.addresses import at_home
from ..run.clocks import wrong_clock
from ..service import node
from .links import Links


class NetworkDiagnosis:
    """Of one node; its methods are those of `service.outside.Diagnosis`."""

    def __init__(self, network: PeerNetwork, links: Links) -> None:
        self._network, self._links = network, links

    async def wrong_clock(self) -> AtollError | None:
        """Members may be there and refused for their records' times."""
        asked = await self._links.check("")
        return wrong_clock([row["ahead_s"] for row in asked["clock"]])

    def tried(self) -> str:
        """What came of each address from which the node starts."""
        bootstrap = self._network.status()["bootstrap"]
        found = "; ".join(f"{peer[-8:]}: {state}" for peer, state in bootstrap.items())
        return found or "no address was given"

    def of_silence(self, run: RunId, organiser: PeerId, named: Sequence[str]) -> AtollError:
        """No member gave the run's manifest. ``named``: addresses of the invite."""
        bootstrap, tried = self._network.status()["bootstrap"], self.tried()
        if any(state == "connected" for state in bootstrap.values()):
            return _no_member(run, self._network)
        if organiser == self._network.peer:
            return NetworkError(
                f"nobody knows run {run}: {tried}",
                code="E110",
                why="This is your own run, and nothing of it is stored here.",
                hint=(
                    "Start another member first: its node hands over the run. If there never was "
                    "one: atoll new RUN.toml"
                ),
            )
        which = (
            f"none of {len(bootstrap)} bootstrap addresses answered"
            if len(bootstrap) > 1
            else "the bootstrap address did not answer"
        )
        why, hint = (
            "The machines of the invite are off, unreachable, or their addresses changed.",
            "Ask any member for a fresh one: atoll invite new",
        )
        if at_home(named):
            why = (
                "The invite names addresses of a private network only: on another one they lead "
                "nowhere. Or that machine is off."
            )
            hint = (
                "On the machine that made it: atoll netcheck says how to be reached from "
                "elsewhere. Then a fresh one: atoll invite new"
            )
        return NetworkError(
            (
                f"{which} in {node.MANIFEST_PATIENCE_S:g} s ({tried}); this is not a "
                "ban and your key is fine"
            ),
            code="E110",
            why=why,
            hint=hint,
        )


def _no_member(run: RunId, network: PeerNetwork) -> NetworkError:
    """A bootstrap node answers, but no member gave the manifest: what is known of why."""
    members = [peer for peer, _ in network.members(run)]
    strange = network.uncertified(run)
    strangers = (
        (
            f" {strange} peers announce themselves in it without a certificate of its "
            "organiser, and were not asked."
        )
        if strange
        else ""
    )
    if members:
        there = sum(map(network.connected, members))
        why = (
            (
                f"{len(members)} members are announced, of which {there} are connected: none has "
                "handed over the manifest yet."
            )
            if there
            else (
                f"{len(members)} members are announced, and none could be reached: they are off, "
                "or no way leads to them from here."
            )
        )
        hint = "Try again in a minute. What is in the way: atoll netcheck"
    else:
        why = (
            "The bootstrap node answers, but knows of no member of the run: its members are off, "
            "elsewhere, or nobody has joined it yet."
        )
        hint = (
            "On the organiser's machine: atoll status, then atoll join RUN (where it "
            "was only made: atoll new)"
        )
    return NetworkError(
        f"no member of run {run} answered in {node.MANIFEST_PATIENCE_S:g} s",
        code="E113",
        why=why + strangers,
        hint=hint,
    )
