"""The node process: network, engine and control socket under one nursery, from start to a clean
end.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import trio

from ...collectives.engine import EngineSettings, EngineThread, derive_lane_keys
from ...collectives.errors import AtollError, StorageError
from ...collectives.exchange import CommandFailed, LaneDown, LanesWanted
from ...collectives.group import Plan
from ...collectives.identifiers import PeerId, RunId
from ...collectives.record_layer import DEFAULT_CIPHER, PLAIN
from ...security.identity import Identity
from ...security.key_file import load_or_create
from ..control.server import ControlServer
from ..home.ending import end_signals
from ..home.hours import Hours
from ..home.lifecycle import NO_LOCKS_HERE, NodeFile, NodeLock, raise_file_limit
from ..home.notify import notify
from ..home.paths import Paths, find_paths
from ..home.private_node import ParentLink
from ..home.refusals import storage_error
from ..net.network import PeerNetwork
from ..net.reach.ledger import RelayLimits
from ..net.reach.reach import ReachSettings
from ..run.events import EngineTroubleEvent
from ..service.buffers import BufferPool
from ..service.node import DRAIN_S, LEAVE_S, Node
from ..service.troubles import coded
from ..session.composing import find_reducers
from ..watching.calls import NodeViews
from ..watching.judging import Notifier
from ..watching.links import Links
from .announced import read_invite
from .parent import watch_parent
from .parts import context_of, node_of

log = logging.getLogger("atoll")
HOME_S = 2.0  # how often the node looks whether its home is still there


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """How a node is started. ``listen``: ``/ip4/HOST/tcp/PORT``; ``bootstrap``: the same with
    ``/p2p/PEER``.
    """

    home: str | None = None
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    lane_port: int = 0
    bootstrap: tuple[str, ...] = ()
    announce: tuple[str, ...] = ()
    private: bool = False
    parent_pid: int = 0
    parent_fd: int = -1
    site: str = ""
    limits: tuple[int, int] = (0, 0)
    """Bytes/s that bulk data may send and receive; 0: no limit."""
    relay_for_all: bool = False
    """Relay for peers of whatever run, not only of those this node has heard of."""
    port_mapping: bool = True
    port_guessing: bool = False
    """Behind a router, ask it to lead a port here (NAT-PMP, UPnP)."""
    relay_only: bool = False
    """Tell nobody but bootstrap nodes and relays where this machine is."""
    lan_discovery: bool = False
    """Find peers in the house, and be found."""
    dht: bool = True
    """Be a node of the DHT."""
    hours: Hours | None = None
    """When its scripts may train; None: always."""
    notify: tuple[str, ...] = ()
    """A command that is run for each verdict; none where it is empty."""
    drain_s: float = DRAIN_S
    """How long it may take to end, once told to."""
    share_models: bool = True
    """Hand bases of runs on to members that lack them."""
    resume: bool = True
    """Enter the runs of the last life again (not in a private node: its script names the run)."""


def run_node(
    options: NodeOptions,
    on_ready: Callable[[NodeViews, Path], None] = lambda views, path: None,
) -> None:
    """Run a node until it is told to end. Raises AtollError when it cannot start; leaves no process
    and no socket file.
    """
    link = ParentLink(options.parent_fd) if options.parent_fd >= 0 else None
    lock: NodeLock | None = None
    # The node computes in small pieces beside training: more threads would wait for each other and
    # take cores from the script. With one thread torch computes in the thread that calls it.
    torch.set_num_threads(1)
    # Libp2p's Python work holds the interpreter beside the engine thread.
    sys.setswitchinterval(0.0005)
    paths = find_paths(options.home)
    try:
        paths.ensure()
        lock = NodeLock.acquire(paths)
        raise_file_limit()
        if lock.of_this_machine_only:
            log.warning("%s", NO_LOCKS_HERE)
        try:
            identity = load_or_create(paths.identity_file)
        except OSError as error:
            raise storage_error(f"cannot use {paths.identity_file}", error) from None
        # after the key was looked at: one that others could read is refused, not mended
        paths.tighten()
        trio.run(_main, options, paths, identity, lock, link, on_ready)
    except* Exception as group:
        error = coded(group, "the node")
        if link is not None:
            link.failed(error)
        raise error from None
    finally:
        if lock is not None:
            with suppress(
                OSError
            ):  # the usual folder still holds the lock; the short one of a long path is empty now
                paths.control_socket.parent.rmdir()
            lock.release()
        if link is not None:
            link.close()


def _network(options: NodeOptions, paths: Paths, identity: Identity) -> PeerNetwork:
    return PeerNetwork(
        identity,
        listen=options.listen,
        lane_port=options.lane_port,
        bootstrap=options.bootstrap,
        announce=options.announce,
        cache=paths.state_dir / "peers.json",
        rng=random.Random(os.urandom(16)),
        reach=ReachSettings(
            relay=RelayLimits(open_to_all=options.relay_for_all),
            port_mapping=options.port_mapping,
            port_guessing=options.port_guessing,
            relay_only=options.relay_only,
        ),
        lan_discovery=options.lan_discovery,
        dht=options.dht,
        read_invite=read_invite,
    )


async def _main(
    options: NodeOptions,
    paths: Paths,
    identity: Identity,
    lock: NodeLock,
    link: ParentLink | None,
    on_ready: Callable[[NodeViews, Path], None],
) -> None:
    """The life of the process. Long, since it is one order: what is started inside what ends with
    it, and before it.
    """
    network = _network(options, paths, identity)
    token = trio.lowlevel.current_trio_token()
    nodes: list[Node] = []
    lanes: dict[tuple[PeerId, int], int] = {}  # by peer and index: the number of the newest

    def from_engine(event: Any) -> None:  # in the engine's thread
        # Where the system refuses the byte that wakes trio, the call is queued all the same.
        with suppress(trio.RunFinishedError, OSError):
            token.run_sync_soon(_engine_event, nodes, network, lanes, event)

    pool = BufferPool(paths.state_dir)
    settings = EngineSettings(max_up=options.limits[0], max_down=options.limits[1])
    engine = EngineThread(
        identity.peer,
        emit=from_engine,
        result_buffer=lambda plan: _result_buffer(nodes, pool, plan),
        reducers=find_reducers(),
        settings=settings,
    )
    engine.start()
    try:
        async with trio.open_nursery() as outer:
            await outer.start(network.run)
            async with trio.open_nursery() as nursery:
                links = Links(network, engine)
                notifier = Notifier(options.notify) if options.notify else None
                context = context_of(
                    identity,
                    paths,
                    network,
                    engine,
                    nursery,
                    random.Random(os.urandom(16)),
                    lambda event: node.publish(event),
                    pool,
                    links=links,
                    site=options.site,
                    hours=options.hours,
                    notifier=notifier,
                    share_models=options.share_models,
                )
                node, views = node_of(
                    context,
                    network,
                    private=options.private,
                    parent_pid=options.parent_pid,
                    links=links,
                    drain_s=options.drain_s,
                )
                nodes.append(node)
                _connect(network, engine, node, lanes)
                if options.resume and not options.private:
                    _resume(node)
                server = ControlServer(node, paths.control_socket)
                path: Path = await outer.start(server.run)
                await nursery.start(_signals, node)  # before anybody is told that it is up
                lock.publish(
                    NodeFile(
                        pid=os.getpid(),
                        socket=str(path),
                        peer=identity.peer,
                        private=options.private,
                        parent_pid=options.parent_pid,
                    )
                )
                if link is not None:
                    link.ready(path)
                    nursery.start_soon(_follow_parent, link, options.parent_pid, node)
                nursery.start_soon(links.run)
                nursery.start_soon(node.watch_clock)
                nursery.start_soon(_watch_home, lock, paths, node)
                if notifier is not None:
                    nursery.start_soon(notifier.run)
                # what is loaded now stays; the collector need not walk it again and again while an
                # engine works
                gc.freeze()
                on_ready(views, path)
                await node.ending.wait()
                notify("STOPPING=1")
                server.announce_end("the node was told to end")
                await node.drain()
                if notifier is not None:
                    await notifier.settled(LEAVE_S)
                nursery.cancel_scope.cancel()
            outer.cancel_scope.cancel()
    finally:
        engine.stop()
    if node.error is not None:
        raise node.error


def _engine_event(
    nodes: Sequence[Node], network: PeerNetwork, lanes: Mapping[tuple[PeerId, int], int], event: Any
) -> None:
    if isinstance(event, LanesWanted):
        for node in nodes:
            node.context.lanes_wanted(event.peer, event.count)
        return
    if isinstance(event, LaneDown):
        for (peer, index), number in lanes.items():
            newest = (peer, number) == (event.peer, event.number)  # else another has replaced it
            if newest and (not nodes or nodes[0].context.lanes.lost(trio.current_time(), peer)):
                network.lane_lost(peer, index)
    for node in nodes:
        if isinstance(event, CommandFailed):
            _command_failed(node, event)
        else:
            node.on_exchange(event)


def _command_failed(node: Node, event: CommandFailed) -> None:
    failure = event.error or RuntimeError(event.reason)
    if event.command == "engine":
        node.fail(coded(failure, "the data plane"))
        return
    error = (
        failure
        if isinstance(failure, AtollError)
        else coded(failure, f"the data plane's {event.command}")
    )
    log.warning("the data plane refused %s: %s %s", event.command, error.code, error.message)
    node.publish(EngineTroubleEvent.of(error))


def _result_buffer(nodes: Sequence[Node], pool: BufferPool, plan: Plan) -> memoryview:
    of_run = bool(nodes) and plan.log.startswith("main/")
    run = nodes[0].by_id.get(RunId(plan.log.rpartition("/")[2])) if of_run else None
    nbytes = plan_bytes(plan)
    return run.result_buffer(plan, nbytes) if run is not None else pool.take(nbytes)


def plan_bytes(plan: Plan) -> int:
    """Length of a plan's encoded result."""
    from ...collectives.codecs.codec import Chunking

    return Chunking(plan.codec, plan.numel, plan.chunk_elements).results.nbytes


def _connect(
    network: PeerNetwork, engine: EngineThread, node: Node, lanes: dict[tuple[PeerId, int], int]
) -> None:
    network.on_link, network.on_gone = node.on_link, node.on_gone
    network.on_refused = node.on_refused
    network.on_addresses, network.on_path = node.on_addresses, node.on_path

    def on_member(run: RunId, peer: PeerId, addresses: Sequence[str]) -> None:
        if run in node.by_id:
            node.by_id[run].on_member()

    def on_lane(
        peer: PeerId,
        sock: Any,
        mine: bytes,
        theirs: bytes,
        initiator: bool,
        path: str,
        index: int,
        plain: bool,
    ) -> None:
        if plain and not node.plain_lanes:  # allowed when it was offered, and no more
            sock.close()
            network.lane_lost(peer, index)
            return
        transcript = "|".join((*sorted((node.peer, peer)), str(index))).encode()
        keys = derive_lane_keys(
            mine, theirs, transcript, initiator=initiator, cipher=PLAIN if plain else DEFAULT_CIPHER
        )
        lanes[peer, index] = engine.add_lane(peer, sock, keys, path, index)
        node.context.lanes.came(trio.current_time(), peer)

    network.on_member = on_member
    network.on_lane = on_lane
    network.allow_plain_lanes(lambda peer: node.plain_lanes)


def _resume(node: Node) -> None:
    for run_id, signed in node.context.manifests.stored(node.troubles).items():
        node.resume(run_id, signed)
    for error in node.troubles:
        log.error("%s %s", error.code, error.message)


async def _watch_home(lock: NodeLock, paths: Paths, node: Node) -> None:
    """End the node once its home is gone: no command finds it, and nothing is kept."""
    while lock.in_place:
        await trio.sleep(HOME_S)
    node.fail(
        StorageError(
            f"the home of this node is gone: {paths.runtime_dir} was deleted, or moved away",
            exit_code=73,
            why="No command reaches a node without its home, and nothing that it writes is kept.",
            hint="Start it again where the home is now: atoll up --background",
        )
    )


async def _follow_parent(link: ParentLink, parent_pid: int, node: Node) -> None:
    reason = await watch_parent(link, parent_pid)
    log.info("the script ended (%s): so does its node", reason)
    node.down(now=False)


async def _signals(
    node: Node, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    asked = end_signals()
    if signal.SIGHUP in asked:
        # A terminal that closes may say so twice: by its shell, and by the system. The second one
        # may come when the receiver is closed already and the node removes its files.
        signal.signal(signal.SIGHUP, lambda number, frame: None)
    with trio.open_signal_receiver(*asked) as received:
        task_status.started()
        async for number in received:
            if node.ending.is_set() and number != signal.SIGHUP:
                node.end_now = True
                os._exit(130)  # the second one: now
            node.down(now=False)
