"""plan: which settings suit these machines and links, and why."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from ...collectives.errors import ConfigError
from ..home.output import Terminal, bytes_text, current, short_peer, span_text
from ..manifest.presets import AUTO
from .daemon import connect
from .options import GIVEN, GivenPath, shared_options
from .reaching import find_peer

if TYPE_CHECKING:
    from ...collectives.group import TopologyKind
    from ...optim.planning import Conditions, Estimate, PeerConditions, Price, TrainingPlan
    from ..client.commands import NodeClient
    from ..manifest import Manifest

DEFAULT_RATE = "100Mbit/s"
DEFAULT_RTT_MS = 50.0
MOST_SHOWN = 16  # peers in a line


@click.command("plan")
@click.argument("manifest", type=GivenPath(dir_okay=False, path_type=Path), metavar="RUN.toml")
@click.option(
    "--step-ms",
    type=float,
    metavar="MS",
    help="How long an inner step takes on the fastest machine, in milliseconds.",
)
@click.option("--peers", type=int, default=4, show_default=True, help="How many peers, all alike.")
@click.option(
    "--up",
    type=GIVEN,
    default=DEFAULT_RATE,
    show_default=True,
    metavar="RATE",
    help="What a peer's uplink carries.",
)
@click.option(
    "--down",
    type=GIVEN,
    metavar="RATE",
    help="What its downlink carries; as much as up when left out.",
)
@click.option(
    "--peer",
    "rows",
    multiple=True,
    type=GIVEN,
    metavar="UP/DOWN[/STEP_MS[/MOST]]",
    help="One peer, instead of --peers; repeatable. MOST: samples that its memory holds.",
)
@click.option(
    "--node",
    metavar="RUN",
    type=GIVEN,
    help="Measure rates and round trips to the members of this run, ten seconds each.",
)
@click.option(
    "--rtt-ms",
    type=float,
    metavar="MS",
    help=f"The longest round trip between two peers ({DEFAULT_RTT_MS:g} when left out).",
)
@click.option(
    "--share",
    type=float,
    metavar="PART",
    help="At least this part of the time must be training, such as 0.95, whatever its price.",
)
@click.option(
    "--max-steps",
    type=int,
    help=(
        "The longest round, in inner steps, that the model's quality allows (100, "
        "from 100M parameters 500)."
    ),
)
@click.option(
    "--batch",
    type=int,
    metavar="SAMPLES",
    help="Also share a step of so many samples among the peers (with MOST: within their memory).",
)
@click.option(
    "--parameters", type=int, help="Size of the model, where the manifest does not say it."
)
@click.option("--explain", is_flag=True, help="Say how it was decided, step by step.")
@shared_options
def plan_command(
    manifest: Path,
    step_ms: float | None,
    peers: int,
    up: str,
    down: str | None,
    rows: tuple[str, ...],
    node: str | None,
    rtt_ms: float | None,
    share: float | None,
    max_steps: int | None,
    batch: int | None,
    parameters: int | None,
    explain: bool,
) -> None:
    """Say which settings reach a loss soonest here, how long a round takes, and why.

    Nothing is changed: paste what it prints into RUN.toml. RATE: 20Mbit/s, 2.5MB/s.
    """
    from ...collectives.codecs.accuracy import ladder
    from ...optim.planning import Choice, Conditions, estimate, plan, price
    from ..manifest import load_manifest

    terminal = current()
    run = load_manifest(manifest)
    if step_ms is None:
        raise ConfigError(
            "how long does an inner step take?",
            key="step",
            why="Everything is planned against the time of a step, and only your script knows it.",
            hint="Time a few steps without atoll; then: atoll plan RUN.toml --step-ms 250",
        )
    found, most = _given(rows, peers, up, down or up, step_ms / 1000, run.topology)
    _holds(most, batch)
    rtt_s = (DEFAULT_RTT_MS if rtt_ms is None else rtt_ms) / 1000
    if node:
        with connect(terminal) as client:
            found, measured_s = _measured(terminal, client, node, step_ms / 1000)
        rtt_s = measured_s if rtt_ms is None else rtt_s
        most = [None] * len(found)
    samples: dict[str, int] | None = None
    if batch is not None:
        found, samples = _balanced(found, most, batch)
    conditions = Conditions(_size(run, parameters), tuple(found), rtt_s, share, max_steps)
    decided = plan(conditions)
    now = choice = None
    if run.train.sync_every is not None:
        train, exchange = run.train, run.exchange
        codec = exchange.codec if exchange.error is None else ladder(exchange.error).fine
        choice = Choice(run.train.sync_every, codec, train.overlap, train.delay, exchange.fragments)
        now = estimate(conditions, choice)
    settings = decided.settings()
    if run.train.method == "diloco":
        settings["train.outer"] = {"preset": AUTO}
    needed, needs = _needs(terminal, run, conditions, decided, settings)
    lines = _lines(terminal, conditions, decided, explain, settings, samples, needed)
    present = None
    if now is not None and choice is not None:
        cost = price(conditions.parameters, choice, len(conditions.peers))
        present = {**_predicted(now), "price": _price(cost)}
        lines.append(
            f"as {manifest.name} is: {now.share:.1%} training, {_bytes(now)} a round, "
            f"{cost.loss - 1:.1%} more loss"
        )
    terminal.data(
        "\n".join(lines),
        {
            **_document(conditions, decided),
            **needs,
            "samples": samples,
            "settings": settings,
            "present": present,
        },
    )


def _needs(
    terminal: Terminal,
    run: Manifest,
    conditions: Conditions,
    decided: TrainingPlan,
    settings: Mapping[str, Mapping[str, Any]],
) -> tuple[list[str], dict[str, object]]:
    """What the plan needs of a member's machine, for people and for JSON. The time of a join is
    that of the slowest of the group.
    """
    from .needs import (
        machine_document,
        machine_lines,
        needs_document,
        needs_lines,
        needs_of,
        this_machine,
    )

    needs = needs_of(_with(run, settings), conditions.parameters)
    assert needs is not None
    down, free = _slowest_join(conditions, decided.group), this_machine(terminal.paths.state_dir)
    return (
        [*needs_lines(needs, down), *machine_lines(needs, free)],
        {"needs": needs_document(needs, down), **machine_document(needs, free)},
    )


def _with(manifest: Manifest, settings: Mapping[str, Mapping[str, Any]]) -> Manifest:
    """The manifest with what decides how much a member needs: codec and overlap."""
    exchange = msgspec.structs.replace(
        manifest.exchange, codec=settings["exchange"]["codec"], codecs={}, error=None
    )
    train = msgspec.structs.replace(manifest.train, overlap=settings["train"]["overlap"])
    return msgspec.structs.replace(manifest, exchange=exchange, train=train)


def _slowest_join(conditions: Conditions, group: Sequence[str]) -> float:
    """Bytes/s in which the slowest of the group fetches a state from all others."""
    peers = [peer for peer in conditions.peers if peer.name in group]
    up = sum(peer.up for peer in peers)
    return min(min(peer.down, (up - peer.up) or peer.down) for peer in peers)


def _holds(most: Sequence[int | None], batch: int | None) -> None:
    """Refuse memories without a batch to share."""
    if batch is None and any(room is not None for room in most):
        raise ConfigError(
            "--peer says how many samples a memory holds, and there is no --batch",
            key="batch",
            why="Memory limits how many samples of a step a peer takes.",
            hint="Say how many all take together: --batch 256. Or leave the last number out.",
        )


def _size(manifest: Manifest, parameters: int | None) -> int:
    size = parameters if parameters is not None else manifest.parameters
    if size is None:
        raise ConfigError(
            "how many parameters does the model have?",
            key="parameters",
            why="The manifest leaves the model to each member's script.",
            hint=(
                "Say it: atoll plan RUN.toml --parameters 10000000, or [model] "
                "parameters in the manifest"
            ),
        )
    return size


def _given(
    rows: Sequence[str],
    count: int,
    up: str,
    down: str,
    step_s: float,
    ways: TopologyKind = "butterfly",
) -> tuple[list[PeerConditions], list[int | None]]:
    """Peers as the command line describes them, and how many samples the memory of each holds."""
    from ...collectives.bounds import most_members, why_so_many
    from ...optim.planning import PeerConditions

    many, bound = len(rows) or count, most_members(ways)
    if not 1 <= many <= bound:
        raise ConfigError(
            f"{many:,} peers: a run with this plan has at most {bound:,} members",
            key="peers",
            why=why_so_many(ways),
            hint=f"At most --peers {bound}; more machines are several runs.",
        )
    if not rows:
        rates = _rate(up, "up"), _rate(down, "down")
        alike = [PeerConditions(f"p{index}", *rates, step_s) for index in range(count)]
        return alike, [None] * len(alike)
    found: list[PeerConditions] = []
    most: list[int | None] = []
    for index, row in enumerate(rows):
        fields = _split(row)
        if len(fields) not in (2, 3, 4):
            raise ConfigError(
                f"--peer {row!r} is not UP/DOWN, UP/DOWN/STEP_MS or UP/DOWN/STEP_MS/MOST",
                key="peer",
                hint="For example --peer 20Mbit/s/100Mbit/s/250",
            )
        try:
            own = float(fields[2]) / 1000 if len(fields) > 2 else step_s
            most.append(int(fields[3]) if len(fields) > 3 else None)
        except ValueError:
            raise ConfigError(
                f"--peer {row!r} ends with no time in milliseconds and number of samples",
                key="peer",
            ) from None
        if (room := most[-1]) is not None and room < 0:
            raise ConfigError(f"--peer {row!r}: a memory that holds {room} samples", key="peer")
        found.append(
            PeerConditions(f"p{index}", _rate(fields[0], "peer"), _rate(fields[1], "peer"), own)
        )
    return found, most


def _balanced(
    peers: Sequence[PeerConditions], most: Sequence[int | None], batch: int
) -> tuple[list[PeerConditions], dict[str, int]]:
    """Those that take part in a step of so many samples, with the time that it takes each, and how
    many samples it takes. The times that were given are those of equal shares.
    """
    from ...optim.planning import Machine, balance

    if batch < 1:
        raise ConfigError(
            f"a batch of {batch} samples", key="batch", hint="For example --batch 256"
        )
    machines = [
        Machine(peer.step_s * len(peers) / batch, most=room)
        for peer, room in zip(peers, most, strict=True)
    ]
    counts = balance(machines, batch)
    taking = [
        replace(peer, step_s=machine.seconds(count), samples=count)
        for peer, machine, count in zip(peers, machines, counts, strict=True)
        if count
    ]
    return taking, {peer.name: count for peer, count in zip(peers, counts, strict=True)}


def _split(row: str) -> list[str]:
    """At slashes other than that of a unit."""
    return [field.strip().replace("|", "/") for field in row.replace("/s", "|s").split("/")]


def _rate(text: str, key: str) -> int:
    from ..home.bandwidth import bytes_per_s

    if not (rate := bytes_per_s(text, key)):
        raise ConfigError(f"{key} is empty", key=key, hint=f"For example --{key} {DEFAULT_RATE}")
    return rate


def _measured(
    terminal: Terminal, client: NodeClient, run: str, step_s: float
) -> tuple[list[PeerConditions], float]:
    """The members of a run, with rates measured over the connections there are, and the longest
    round trip.

    This node's own link is taken to carry the most that went over it to or from one of them, theirs
    what went from or to them.
    """
    from ...optim.planning import PeerConditions

    rows = [row for row in client.peers(run) if row["member"] or row["you"]]
    found: list[PeerConditions] = []
    most_up = most_down = rtt_ms = 0.0
    for row in rows:
        if row["you"]:
            continue
        terminal.say(f"measuring the connection to {short_peer(row['peer'])}")
        flow = client.check(find_peer(client.status(), row["peer"]))["bandwidth"]
        up, down = float(flow["up_bytes_per_s"]), float(flow["down_bytes_per_s"])
        found.append(PeerConditions(short_peer(row["peer"]), down, up, step_s))
        most_up, most_down, rtt_ms = (
            max(most_up, up),
            max(most_down, down),
            max(rtt_ms, float(row["rtt_ms"] or 0)),
        )
    if not found:
        raise ConfigError(
            "this run has no other members to measure",
            key="node",
            hint="See them: atoll peers. Or give rates: --up, --down",
        )
    return [PeerConditions("this machine", most_up, most_down, step_s), *found], rtt_ms / 1000


def _lines(
    terminal: Terminal,
    conditions: Conditions,
    decided: TrainingPlan,
    explain: bool,
    settings: Mapping[str, Mapping[str, Any]],
    samples: Mapping[str, int] | None,
    needed: Sequence[str],
) -> list[str]:
    estimate, head = decided.estimate, "plan" if decided.reached else "the best there is"
    if len(decided.group) == 1 < len(conditions.peers):
        head = "train alone"
    lines = [
        terminal.style(f"{head}: {estimate.share:.1%} training", sys.stdout, bold=True),
        (
            f"  a round  {span_text(estimate.round.seconds)}, "
            + (
                f"{span_text(estimate.round.transfer_s)} of it transfer over {estimate.round.bound}"
                if estimate.nbytes
                else estimate.round.bound
            )
        )
        + (f"; {decided.choice.fragments} fragments" if decided.choice.fragments > 1 else ""),
        (
            f"  bytes    {_bytes(estimate)}, every {decided.choice.sync_every} steps "
            f"({span_text(estimate.period_s)})"
        ),
        f"  loss     {decided.price.loss - 1:.1%} more than synchronous training, says a table: "
        f"{decided.price.samples - 1:.0%} more samples to the same loss",
        f"  group    {len(decided.group)} of {len(conditions.peers)} peers",
    ]
    steps = decided.steps(conditions)
    if len(set(steps.values())) > 1:
        lines.append(f"  steps    {_counts(steps)} of each round")
    if samples:
        shared = _counts(samples)
        longest_s = max(peer.step_s for peer in conditions.peers)
        lines.append(f"  samples  {shared} in a step, which takes {span_text(longest_s)}")
    lines += (f"  {line}" for line in needed)
    if explain or not decided.reached:
        lines += ["", *(f"  {sentence}" for sentence in decided.why)]
    elif len(decided.group) < len(conditions.peers):
        lines += ["", f"  {decided.why[-1]}"]
    lines.append("")
    for table, values in settings.items():
        lines += [f"[{table}]", *(f"{key} = {_toml(value)}" for key, value in values.items()), ""]
    return lines


def _bytes(estimate: Estimate) -> str:
    up, down = estimate.nbytes, estimate.received
    return f"{bytes_text(up)} up and " + (
        "as much down" if up == down else f"{bytes_text(down)} down"
    )


def _counts(counts: Mapping[str, int]) -> str:
    shown = [f"{name} {count or 'none'}" for name, count in list(counts.items())[:MOST_SHOWN]]
    return ", ".join(shown) + (", …" if len(counts) > MOST_SHOWN else "")


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _predicted(estimate: Estimate) -> dict[str, Any]:
    return {
        "training_share": round(estimate.share, 6),
        "period_s": round(estimate.period_s, 6),
        "compute_s": round(estimate.compute_s, 6),
        "waiting_s": round(estimate.waiting_s, 6),
        "round_s": round(estimate.round.seconds, 6),
        "transfer_s": round(estimate.round.transfer_s, 6),
        "latency_s": round(estimate.round.latency_s, 6),
        "work_s": round(estimate.round.work_s, 6),
        "transfer_over_compute": round(estimate.transfer_over_compute, 6),
        "bytes_up_per_round": estimate.nbytes,
        "bytes_down_per_round": estimate.received,
        "bound": estimate.round.bound,
    }


def _price(cost: Price) -> dict[str, float]:
    return {
        name: round(value, 6)
        for name, value in {
            "loss": cost.loss,
            "samples": cost.samples,
            "steps": cost.steps,
            "codec": cost.codec,
            "late": cost.late,
        }.items()
    }


def _document(conditions: Conditions, decided: TrainingPlan) -> dict[str, Any]:
    return {
        "reached": decided.reached,
        "predicted": {**_predicted(decided.estimate), "price": _price(decided.price)},
        "group": list(decided.group),
        "steps": decided.steps(conditions),
        "why": list(decided.why),
        "parameters": conditions.parameters,
        "rtt_s": conditions.rtt_s,
        "share": conditions.share,
        "max_steps": conditions.longest,
        "peers": [asdict(peer) for peer in conditions.peers],
    }
