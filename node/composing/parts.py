"""What a node is made of, put together: the network, manifests, modes, pretrained models, and who
watches its runs. Whatever a run may ask for is named here and in the files beside, so that
`node.service` need not know it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import trio

from ...collectives.engine import EngineThread
from ...collectives.identifiers import PeerId, RunId
from ...security.identity import Identity
from ..bases.fetching import BaseFetching
from ..bases.pieces import FILES, FilePorts
from ..bases.sharing import BaseSharing
from ..home.hours import Hours
from ..home.paths import Paths
from ..net.look import Look
from ..net.network import PeerNetwork
from ..run.events import RunEvent
from ..run.evidence import accused, check
from ..run.registry import MODES
from ..service.buffers import BufferPool
from ..service.context import NodeContext, RunParts
from ..service.node import DRAIN_S, LEFT, Node
from ..service.outside import Diagnosis, EvidenceCheck, FilesNews, LaneLinks, PeerPlaces, SignedRun
from ..service.ports import RunPorts
from ..session import Session
from ..session.composing import modes_of
from ..watching.calls import NodeViews
from ..watching.judging import Notifier
from ..watching.links import Links
from ..watching.silence import NetworkDiagnosis
from ..watching.watcher import RunWatcher
from .founded import show_founded
from .manifests import manifest_of, manifests_of


class FilesOfBase(BaseSharing):
    """Implements `service.outside.ModelFiles`."""

    _newest: BaseFetching | None = None

    def begin(self, now: float) -> BaseFetching:
        self._newest = super().begin(now)
        return self._newest

    def news(self) -> FilesNews:
        newest = self._newest
        if newest is None:
            return FilesNews(True, None, ("", 0, 0), {})
        return FilesNews(newest.over, newest.error, newest.progress, newest.document())


def context_of(
    identity: Identity,
    paths: Paths,
    network: PeerNetwork,
    engine: EngineThread,
    nursery: trio.Nursery,
    rng: random.Random,
    publish: Callable[[RunEvent], None],
    results: BufferPool,
    *,
    links: Links | None = None,
    site: str = "",
    hours: Hours | None = None,
    notifier: Notifier | None = None,
    share_models: bool = True,
) -> NodeContext:
    """See `NodeContext`. ``notifier``: who is told of verdicts; None: nobody. ``share_models``:
    hand bases of runs on to members that lack them.
    """

    def model_files(signed: SignedRun, ports: RunPorts) -> FilesOfBase | None:
        model = manifest_of(signed).model
        if model.base is None:
            return None
        to = FilePorts(ports.content, ports.send, ports.work)
        own = random.Random(rng.random())
        return FilesOfBase(signed.run_id, model, paths, to, own, share=share_models)

    def show_manifest(run: RunId, show: Callable[[PeerId, bytes], bytes]) -> Callable[[], None]:
        def answer(asker: PeerId, look: Look) -> bytes:
            return show(look.bearer(asker, network.peer), look.certificate)

        network.looks.open(run, answer)
        return lambda: network.looks.close(run)

    diagnosis = NetworkDiagnosis(network, links or Links(network, engine))
    return NodeContext(
        identity=identity,
        paths=paths,
        network=network,
        peers=PeerPlaces(
            addresses=network.addresses,
            add_addresses=network.add_addresses,
            add_bootstrap=network.add_bootstrap,
            named=network.named,
            connected=network.connected,
            address_of=network.address_of,
            traffic=network.traffic,
        ),
        links=LaneLinks(network.ensure_lane, network.release_lane, network.lane_paths),
        engine=engine,
        nursery=nursery,
        rng=rng,
        publish=publish,
        results=results,
        manifests=manifests_of(paths),
        parts=RunParts(
            modes=modes_of,
            watch=lambda run: RunWatcher(run, notifier),
            model_files=model_files,
            files_kind=FILES,
            recertify=_recertify,
            proofs=EvidenceCheck(accused, check),
            show_manifest=show_manifest,
        ),
        diagnosis=Diagnosis(diagnosis.tried, diagnosis.of_silence, diagnosis.wrong_clock),
        site=site,
        hours=hours,
    )


def _recertify(sessions: Sequence[Session], now: float, without: Sequence[PeerId]) -> None:
    MODES.load("sealing.recertifying", "recertify", key="recertify")(sessions, now, without)


def node_of(
    context: NodeContext,
    network: PeerNetwork,
    *,
    private: bool,
    parent_pid: int,
    links: Links | None = None,
    drain_s: float = DRAIN_S,
) -> tuple[Node, NodeViews]:
    """A node that answers all calls, and shows the runs that were founded here to whoever holds an
    invite; and what those calls look at.
    """
    network.looks.otherwise = show_founded(context.paths, network.peer, LEFT)
    node = Node(context, private=private, parent_pid=parent_pid, drain_s=drain_s)
    views = NodeViews(node, network, links or Links(network, context.engine))
    node.calls.add(*views.rows())
    return node, views
