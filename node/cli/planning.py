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
from ..manifest.presets import AUTO, begins_short, steps_of
from .daemon import connect
from .options import GIVEN, GivenPath, shared_options
from .reaching import find_peer

if TYPE_CHECKING:
    from ...collectives.group import TopologyKind
    from ...optim.planning import (
        Alternative,
        Choice,
        Conditions,
        Estimate,
        PeerConditions,
        Price,
        RunCost,
        TrainingPlan,
    )
    from ..joining.commands import NodeClient
    from ..manifest import Manifest
    from .holding import Planned

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
    "--machine",
    "machines",
    multiple=True,
    type=GIVEN,
    metavar="MACHINES",
    help=(
        'Machines with their memory, such as "8 x 4090@100Mbit/64GB", as for atoll fit; '
        "repeatable. Nothing is proposed that one of them does not hold."
    ),
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
    machines: tuple[str, ...],
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
    from ...optim.planning import Conditions, plan
    from ..manifest import load_manifest
    from .holding import PlanRequest, planned_for

    terminal = current()
    run = load_manifest(manifest)
    own, run = run.parameters, _of_size(run, parameters)
    asked = PlanRequest(manifest, run, step_ms, parameters, rows, machines, node, batch)
    planned = planned_for(asked)
    run, step_s, most = planned.run, planned.step_s, list[int | None]()
    if machines:
        found = _of_machines(planned, up, down or up)
    else:
        found, most = _given(rows, peers, up, down or up, step_s, run.topology)
    _holds(most, batch)
    rtt_s = (DEFAULT_RTT_MS if rtt_ms is None else rtt_ms) / 1000
    if node:
        with connect(terminal) as client:
            found, measured_s = _measured(terminal, client, node, step_s)
        rtt_s = measured_s if rtt_ms is None else rtt_s
        most = [None] * len(found)
    samples: dict[str, int] | None = None
    if batch is not None:
        found, samples = _balanced(found, most, batch)
    conditions = Conditions(
        *(planned.size, tuple(found), rtt_s, share, max_steps),
        steps=steps_of(run),
        cold=begins_short(run),
        held=planned.pairs,
    )
    decided = plan(conditions)
    settings = _decided_settings(run, conditions, decided)
    needed, needs = _needs(terminal, planned, conditions, decided, settings)
    settings = planned.settings() | settings
    lines = planned.lines() + _lines(
        terminal, conditions, decided, explain, settings, samples, needed
    )
    line, present = _as_it_is(planned, conditions, manifest.name, own)
    lines += line
    terminal.data(
        "\n".join(lines),
        {
            **_document(conditions, decided),
            **needs,
            "samples": samples,
            "settings": settings,
            "held": planned.document(),
            "present": present,
        },
    )


def _decided_settings(
    run: Manifest, conditions: Conditions, decided: TrainingPlan
) -> dict[str, dict[str, Any]]:
    """Tables of the manifest with what the plan decides; the run has as many steps as before."""
    from ...optim.planning import full_rounds

    settings = decided.settings()
    if run.train.rounds is not None and conditions.steps is not None:
        settings["train"]["rounds"] = full_rounds(conditions.steps, decided.choice.sync_every)
    if run.train.method == "diloco":
        settings["train.outer"] = {"preset": AUTO}
    return settings


def _of_size(run: Manifest, parameters: int | None) -> Manifest:
    """The manifest for a model of so many parameters: nothing of a model of another size is left
    in it.
    """
    from ..manifest.tables import ModelTable

    if parameters is None or run.parameters in (None, parameters):
        return run
    other = ModelTable(entry="local:another", parameters=max(1, parameters))
    return msgspec.structs.replace(run, model=other)


def _present(run: Manifest) -> Choice | None:
    """The manifest's own settings; None where its rounds are not of so many steps."""
    from ...collectives.codecs.accuracy import ladder
    from ...optim.planning import Choice

    train, exchange = run.train, run.exchange
    if train.sync_every is None:
        return None
    codec = exchange.codec if exchange.error is None else ladder(exchange.error).fine
    return Choice(train.sync_every, codec, train.overlap, train.delay, exchange.fragments)


def _as_it_is(
    planned: Planned, conditions: Conditions, name: str, own: int | None
) -> tuple[list[str], dict[str, Any] | None]:
    """What the file's own settings would do, for people and for JSON. ``own``: the size that the
    file says.
    """
    from ...collectives.outer_rules import PLAIN_MEAN
    from ...optim.planning import costs_of, estimate, price_of

    run = planned.run
    if (choice := _present(run)) is None:
        return [], None
    if not planned.holds(choice.codec, choice.overlap):
        return [f"as {name} is, not every machine holds it"], None
    now, settings = estimate(conditions, choice), run.settings()
    plain = run.train.method == "local_sgd" or settings.outer == PLAIN_MEAN
    cost = price_of(conditions, choice, plain=plain)
    begins, whole = costs_of(conditions, choice, settings.lengths)
    line = (
        f"as {name} is{_size_words(own, conditions.parameters)}: {now.share:.1%} training, "
        f"{_bytes(now)} a round, {cost.loss - 1:.1%} more loss"
        f"{'' if whole is None else f'; {_run_words(whole)}'}"
    )
    return [line], {**_predicted(now), "price": _price(cost), **_costs(begins, whole)}


def _run_words(cost: RunCost) -> str:
    return (
        f"{cost.rounds:,} rounds, {cost.steps:,} steps: {span_text(cost.seconds)}, "
        f"{bytes_text(cost.nbytes)} up"
    )


def _costs(begins: RunCost | None, run: RunCost | None) -> dict[str, Any]:
    """What the short rounds cost with which a run begins, and all of it, for JSON."""
    return {
        name: None
        if cost is None
        else {
            "rounds": cost.rounds,
            "steps": cost.steps,
            "seconds": round(cost.seconds, 3),
            "training_share": round(cost.share, 6),
            "bytes_up": cost.nbytes,
            "bytes_down": cost.received,
        }
        for name, cost in (("begins", begins), ("run", run))
    }


def _size_words(own: int | None, planned: int) -> str:
    """Where the plan is for a model of another size than the manifest's."""
    if own in (None, planned):
        return ""
    return f", but for a model of {planned:,} parameters in place of its own {own:,}"


def _needs(
    terminal: Terminal,
    planned: Planned,
    conditions: Conditions,
    decided: TrainingPlan,
    settings: Mapping[str, Mapping[str, Any]],
) -> tuple[list[str], dict[str, object]]:
    """What the plan needs of a member's machine, for people and for JSON. The time of a join is
    that of the slowest of the group. Without named machines this one is looked at.
    """
    from ...optim.planning.estimate import EFFICIENCY
    from .needs import (
        FreeHere,
        machine_document,
        machine_lines,
        needs_document,
        needs_lines,
        needs_of,
        this_machine,
    )

    size = conditions.parameters if planned.shape is None else None
    needs = needs_of(_with(planned.run, settings), size, planned.shape)
    assert needs is not None
    down, free = _slowest_join(conditions, decided.group), FreeHere(None, None, None)
    if not planned.machines:
        free = this_machine(terminal.paths.state_dir)
    lines = needs_lines(needs, down)
    document = needs_document(needs, down)
    if len(decided.group) == 1:  # nobody joins
        lines.pop()
    elif needs.fetched:
        costs_s = needs.fetched / down / EFFICIENCY + decided.estimate.round.seconds
        document["join_costs_s"] = round(costs_s, 3)
        lines[-1] += f", and keeps the others from rounds for up to {span_text(costs_s)}"
    return [*lines, *machine_lines(needs, free)], {
        "needs": document,
        **machine_document(needs, free),
    }


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


def _of_machines(planned: Planned, up: str, down: str) -> list[PeerConditions]:
    """Peers as the machines are; ``up`` and ``down``: the link of those that say none."""
    from ...optim.planning import PeerConditions

    usual = _rate(up, "up"), _rate(down, "down")
    return [
        PeerConditions(each.name, each.up or usual[0], each.down or each.up or usual[1], step_s)
        for each, step_s in zip(planned.machines, planned.steps_s, strict=True)
    ]


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
    from ..control.protocol import Check

    rows = [row for row in client.peers(run) if row["member"] or row["you"]]
    found: list[PeerConditions] = []
    most_up = most_down = rtt_ms = 0.0
    for row in rows:
        if row["you"]:
            continue
        terminal.say(f"measuring the connection to {short_peer(row['peer'])}")
        flow = client.ask(Check, find_peer(client.status(), row["peer"])).value["bandwidth"]
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
        return _alone_lines(terminal, decided, explain)
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
    ]
    if estimate.nbytes:
        lines += [
            (
                f"  bytes    {_bytes(estimate)}, every {decided.choice.sync_every} steps "
                f"({span_text(estimate.period_s)})"
            ),
            f"  loss     {decided.price.loss - 1:.1%} more than synchronous training, says a "
            f"table: {decided.price.samples - 1:.0%} more samples to the same loss",
        ]
    if decided.begins is not None:
        lines.append(f"  begins   with short rounds: {_run_words(decided.begins)}")
    if decided.run is not None:
        lines.append(f"  run      {_run_words(decided.run)}")
    lines.append(f"  group    {len(decided.group)} of {_counted(len(conditions.peers))}")
    steps = decided.steps(conditions)
    if len(set(steps.values())) > 1:
        lines.append(f"  steps    {_counts(steps)} of each round")
    if samples:
        shared = _counts(samples)
        longest_s = max(peer.step_s for peer in conditions.peers)
        lines.append(f"  samples  {shared} in a step, which takes {span_text(longest_s)}")
    lines += (f"  {line}" for line in needed)
    if decided.rejected:
        lines += ["", *(f"  {line}" for line in _rejected(decided.rejected))]
    if explain or not decided.reached:
        lines += ["", *(f"  {sentence}" for sentence in decided.why)]
    elif len(decided.group) < len(conditions.peers):
        lines += ["", f"  {decided.why[-1]}"]
    lines.append("")
    for table, values in settings.items():
        lines += [f"[{table}]", *(f"{key} = {_toml(value)}" for key, value in values.items()), ""]
    return lines


def _alone_lines(terminal: Terminal, decided: TrainingPlan, explain: bool) -> list[str]:
    """Where one machine is there before any group: no settings, since there is no run to make."""
    head = f"train alone, on {decided.group[0]}: without a run, and without atoll"
    lines = [terminal.style(head, sys.stdout, bold=True), ""]
    lines += (f"  {line}" for line in _rejected(decided.rejected))
    lines += ["", *(f"  {sentence}" for sentence in (decided.why if explain else decided.why[-1:]))]
    return [*lines, ""]


def _counted(peers: int) -> str:
    return "1 peer" if peers == 1 else f"{peers} peers"


def _rejected(rows: Sequence[Alternative]) -> list[str]:
    """What else there is: how long it would take, what of it is training, and why."""
    width = max(len("INSTEAD"), *(len(row.what) for row in rows))
    lines = [f"{'INSTEAD':{width}}  {'TO THE LOSS':>13}  TRAINING  WHY"]
    for row in rows:
        longer = row.long - 1
        time = f"{longer:.0%} longer" if longer < 10 else f"{row.long:.0f} times"
        time = time if longer >= 0 else f"{-longer:.0%} sooner"
        lines.append(f"{row.what:{width}}  {time:>13}  {row.share:8.1%}  {row.why}")
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
    if isinstance(value, bool):
        return str(value).lower()
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
            "plain": cost.plain,
        }.items()
    }


def _document(conditions: Conditions, decided: TrainingPlan) -> dict[str, Any]:
    return {
        "reached": decided.reached,
        "predicted": {
            **_predicted(decided.estimate),
            "price": _price(decided.price),
            **_costs(decided.begins, decided.run),
        },
        "group": list(decided.group),
        "steps": decided.steps(conditions),
        "why": list(decided.why),
        "rejected": [asdict(row) for row in decided.rejected],
        "parameters": conditions.parameters,
        "rtt_s": conditions.rtt_s,
        "share": conditions.share,
        "max_steps": conditions.longest,
        "peers": [asdict(peer) for peer in conditions.peers],
    }
