"""``python -m atoll.node``: run a node in the foreground. `atoll up` and private nodes of scripts
start it.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from ..collectives.errors import AtollError, SwarmClosedError
from .home.ending import interrupt_when_stdin_ends
from .home.last_resort import refused
from .home.logs import log_to_stderr
from .home.notify import notify, notify_failed
from .home.output import Terminal, as_json, show_error
from .home.paths import find_paths, only_mine
from .home.private_node import ParentLink
from .net.lean import load_libp2p, load_torch

if TYPE_CHECKING:
    from .composing.process import NodeOptions
    from .home.config import Loaded
    from .home.endpoint import Endpoint
    from .look.metrics_server import MetricsServer
    from .watching.calls import NodeViews

DEFAULT_LANE_PORT = 0


def _parser() -> argparse.ArgumentParser:
    """Long, since it is the table of the arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m atoll.node", description="Run an atoll node in the foreground."
    )
    parser.add_argument(
        "--home",
        default=None,
        help="one folder for all state (default: ATOLL_HOME, else the XDG folders)",
    )
    parser.add_argument(
        "--listen", action="append", metavar="ADDR", help="/ip4/HOST/tcp/PORT; may be repeated"
    )
    parser.add_argument("--port", type=int, default=None, help="TCP port of the node (0: any)")
    parser.add_argument(
        "--lane-port", type=int, default=DEFAULT_LANE_PORT, help="TCP port for bulk data (0: any)"
    )
    parser.add_argument(
        "--bootstrap",
        action="append",
        metavar="ADDR",
        help="/ip4/HOST/tcp/PORT/p2p/PEER; may be repeated",
    )
    parser.add_argument(
        "--announce",
        action="append",
        default=[],
        metavar="ADDR",
        help="address that others should dial; may be repeated",
    )
    parser.add_argument(
        "--max-up", metavar="RATE", help="limit of bulk data sent, such as 20Mbit/s"
    )
    parser.add_argument("--max-down", metavar="RATE", help="limit of bulk data received")
    parser.add_argument("--hours", metavar="FROM-TO", help="when scripts train, such as 22-06")
    parser.add_argument(
        "--drain", type=float, metavar="SECONDS", help="how long it may take to end, once told to"
    )
    parser.add_argument(
        "--relay-for-all",
        action="store_true",
        help="relay for anybody, not only for peers of runs this node knows",
    )
    parser.add_argument(
        "--no-port-mapping",
        action="store_true",
        help="do not ask the router to lead a port to this node",
    )
    parser.add_argument(
        "--relay-only",
        action="store_true",
        help="show no member where this node is: be reached through relays only",
    )
    parser.add_argument(
        "--no-lan-discovery",
        action="store_true",
        help="do not look for peers in the house (multicast DNS)",
    )
    parser.add_argument("--no-dht", action="store_true", help="take no part in the DHT")
    parser.add_argument("--metrics", metavar="ADDRESS", help="serve metrics there, such as :9464")
    parser.add_argument("--site", metavar="LABEL", help="label of the place where this machine is")
    parser.add_argument(
        "--json",
        action="store_true",
        help="say where it listens, or why it cannot, as one JSON object on stdout",
    )
    parser.add_argument(
        "--private", action="store_true", help="belong to the script that started this node"
    )
    parser.add_argument(
        "--until-stdin-ends",
        action="store_true",
        help="end when stdin does, so as not to outlive whoever started this",
    )
    parser.add_argument("--parent-pid", type=int, default=0, help="process of that script")
    parser.add_argument("--parent-fd", type=int, default=-1, help="inherited link to that script")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Exit code of the node process."""
    args = _parser().parse_args(argv)
    log = log_to_stderr()
    only_mine()
    # Importing makes objects by the hundred thousand, and none of them is garbage: collections on
    # the way are a sixth of a start.
    gc.disable()
    logging.raiseExceptions = False  # a log on a full disk is no reason to write tracebacks into it
    try:
        load_torch()  # these before anything of the service, which would import all of them
        load_libp2p()
        loaded = _settings(args)
        metrics = None if args.private else _metrics(loaded.config.metrics)
        options = _options(args, loaded)
        from .composing.process import run_node
    except (AtollError, OSError, MemoryError, RuntimeError) as error:
        known = error if isinstance(error, AtollError) else refused(error, "starting the node")
        if known is None:
            raise
        if args.parent_fd >= 0:
            ParentLink(args.parent_fd).failed(known)
        return _failed(args, known)
    folder = find_paths(args.home).log_dir
    log.files = [folder / "node.log", folder / "private-node.log"]
    if args.until_stdin_ends:
        interrupt_when_stdin_ends()
    gc.enable()
    try:
        run_node(options, lambda views, path: _ready(views, args, metrics))
    except AtollError as error:
        return _failed(args, error)
    finally:
        notify("STOPPING=1")
        if metrics is not None:
            metrics.close()
    return 0


def _metrics(endpoint: Endpoint | None) -> MetricsServer | None:
    """Listens already, so that a port that is taken is told before anything starts; None, and
    nothing is loaded, where nobody asked for it.
    """
    if endpoint is None:
        return None
    from .look.metrics_server import MetricsServer

    return MetricsServer(endpoint)


def _serve(metrics: MetricsServer, views: NodeViews) -> None:
    """Answer with what the node's loop says when it is asked."""
    import trio

    from .look.allowed import allowed_of
    from .look.machine import MachineReadings, find_nvml
    from .look.metrics import NodeDocuments

    token = trio.lowlevel.current_trio_token()
    machine = MachineReadings(nvml=find_nvml())

    async def documents() -> NodeDocuments:
        runs = list(views.node.by_id.values())
        manifests = {run.run_id: views.manifest_of(run) for run in runs}
        return NodeDocuments(
            await views.status(),
            {run.run_id: views.peer_rows(run) for run in runs},
            {run: allowed_of(found) for run, found in manifests.items() if found is not None},
        )

    def read() -> NodeDocuments:
        try:
            found = trio.from_thread.run(documents, trio_token=token)
        except (trio.RunFinishedError, trio.Cancelled):
            raise SwarmClosedError("the node ended") from None
        return replace(found, status={**found.status, "machine": machine.read()})

    metrics.start(read)


def _failed(args: argparse.Namespace, error: AtollError) -> int:
    """Tell the supervisor and whoever reads the log."""
    notify_failed(error)
    show_error(Terminal(json=args.json), error)
    return error.exit_code


def _ready(views: NodeViews, args: argparse.Namespace, metrics: MetricsServer | None) -> None:
    """Say that the node is up: to its supervisor, and to whoever looks at it."""
    if metrics is not None:
        _serve(metrics, views)
    notify("READY=1", "STATUS=ready")
    if args.private:
        return
    node = views.node
    addresses = node.context.peers.addresses()
    if args.json:
        print(as_json({"peer": node.peer, "pid": os.getpid(), "addresses": addresses}), flush=True)
    else:
        print(
            "\n".join((f"node {node.peer} is up; Ctrl-C drains and ends it", *addresses)),
            file=sys.stderr,
            flush=True,
        )


def _settings(args: argparse.Namespace) -> Loaded:
    """Flags over environment over files."""
    from .home.config import load_config

    flags = {
        "node.port": args.port,
        "node.listen": tuple(args.listen or ()),
        "node.bootstrap": tuple(args.bootstrap or ()),
        "node.max_up": args.max_up,
        "node.max_down": args.max_down,
        "node.hours": args.hours,
        "node.drain_s": args.drain,
        "node.site": args.site,
        "node.metrics": args.metrics,
        "network.port_mapping": False if args.no_port_mapping else None,
        "network.relay_only": args.relay_only or None,
        "network.lan_discovery": False if args.no_lan_discovery else None,
        "network.dht": False if args.no_dht else None,
    }
    loaded = load_config(find_paths(args.home), flags)
    if loaded.unused:
        logging.getLogger("atoll").warning("%s", loaded.unused)
    return loaded


def _options(args: argparse.Namespace, loaded: Loaded) -> NodeOptions:
    """A private node takes any free port unless its settings name one."""
    from .composing.process import NodeOptions

    listen = loaded.config.listen_addresses
    if args.private and not {"node.port", "node.listen"} & loaded.origins.keys():
        listen = ("/ip4/0.0.0.0/tcp/0",)
    if loaded.config.network.relay_only:
        from .net.transport.addresses import host_and_port

        listen = (f"/ip4/127.0.0.1/tcp/{host_and_port(listen[0])[1]}",)  # nobody dials us
    return NodeOptions(
        args.home,
        listen,
        args.lane_port,
        loaded.config.node.bootstrap,
        tuple(args.announce),
        args.private,
        args.parent_pid,
        args.parent_fd,
        loaded.config.node.site,
        loaded.config.limits,
        relay_for_all=args.relay_for_all,
        port_mapping=loaded.config.network.port_mapping,
        port_guessing=loaded.config.network.port_guessing,
        relay_only=loaded.config.network.relay_only,
        lan_discovery=loaded.config.network.lan_discovery,
        dht=loaded.config.network.dht,
        hours=loaded.config.hours,
        notify=loaded.config.notify_command,
        drain_s=loaded.config.node.drain_s,
        share_models=loaded.config.models.share,
    )


if __name__ == "__main__":
    sys.exit(main())
