"""What a node says of itself, in Prometheus' text format: one table of metrics, each with what it
reads from the documents that `atoll status --json` and `atoll peers --json` print. Pure.

Words of others are labels only, escaped and cut. Of a federated run what `allowed` keeps back is
left out, as it is of a run whose manifest is not known.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...collectives.foreign import escaped
from ..home.names import name_of
from ..run.status import FIGURES, RunStatus, read_run_status
from ..views.documents import metrics_of
from .allowed import Allowed
from .document import path_kind

LONGEST_LABEL = 128
GPU = ("gpu", "gpu_name")
NOTHING = Allowed(samples=False, timings=False, losses=False)
Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class NodeDocuments:
    """A status document, with ``machine`` beside what the node says: `MachineReadings`; and, by
    run, the rows of its peers and what of it may be shown.
    """

    status: Document
    peers: Mapping[str, Sequence[Document]]
    allowed: Mapping[str, Allowed]


class MetricValue(NamedTuple):
    """A value, with labels beside those of the run; None is left out."""

    value: Any
    labels: tuple[str, ...] = ()


class NodeMetric(NamedTuple):
    """Of the node. Names that end in ``_total`` are counters, which begin anew with the node."""

    name: str
    about: str
    read: Callable[[Document], Iterable[MetricValue]]
    labels: tuple[str, ...] = ()


class RunMetric(NamedTuple):
    """Of each run. ``keeps``: the field of `Allowed` without which it is not told."""

    name: str
    about: str
    read: Callable[[RunStatus, Sequence[Document]], Iterable[MetricValue]]
    labels: tuple[str, ...] = ()
    keeps: str = ""


def _one(*keys: str) -> Callable[[Document], Iterable[MetricValue]]:
    return lambda status: [MetricValue(_at(status, keys))]


def _of(field: str, *keys: str) -> Callable[[RunStatus, Sequence[Document]], list[MetricValue]]:
    return lambda run, peers: [MetricValue(_at(getattr(run, field), keys))]


def _count(field: str) -> Callable[[RunStatus, Sequence[Document]], list[MetricValue]]:
    return lambda run, peers: [MetricValue(len(getattr(run, field) or ()))]


def _at(document: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        document = document.get(key) if isinstance(document, Mapping) else None
    return document


def _lanes(status: Document) -> Iterator[MetricValue]:
    paths = Counter(path_kind({"path": path}) for path in _lane_paths(status).values())
    return (MetricValue(count, (path,)) for path, count in paths.items())


def _lane_paths(status: Document) -> Mapping[str, Any]:
    return _at(status, ("network", "lanes")) or {}


def _lane_bytes(status: Document) -> Iterator[MetricValue]:
    found = Counter[tuple[str, str]]()
    for path, counts in (status.get("lane_bytes") or {}).items():
        for direction in ("sent", "received"):
            found[path_kind({"path": path}), direction] += int(counts.get(direction) or 0)
    return (MetricValue(count, labels) for labels, count in found.items())


def _message_bytes(status: Document) -> Iterator[MetricValue]:
    for direction in ("sent", "received"):
        yield MetricValue(_at(status, ("network", f"bytes_{direction}")), (direction,))


def _energy(status: Document) -> Iterator[MetricValue]:
    for zone, joules in (_at(status, ("machine", "energy_joules")) or {}).items():
        yield MetricValue(joules, (str(zone),))


def _gpus(key: str) -> Callable[[Document], Iterable[MetricValue]]:
    def read(status: Document) -> Iterator[MetricValue]:
        for gpu in _at(status, ("machine", "gpus")) or ():
            yield MetricValue(gpu.get(key), (str(gpu.get("index")), str(gpu.get("name"))))

    return read


def _contributors(run: RunStatus, peers: Sequence[Document]) -> Iterator[MetricValue]:
    if run.last_round:
        yield MetricValue(len(run.last_round.contributors))


def _samples(run: RunStatus, peers: Sequence[Document]) -> Iterator[MetricValue]:
    if run.last_round:
        yield MetricValue(sum(run.last_round.contributors.values()))


def _refused(run: RunStatus, peers: Sequence[Document]) -> Iterator[MetricValue]:
    kinds = Counter[str]()
    for peer in peers:
        kinds.update(peer.get("over_budget") or {})
    return (MetricValue(count, (kind,)) for kind, count in kinds.items())


def _verdicts(run: RunStatus, peers: Sequence[Document]) -> Iterator[MetricValue]:
    codes = Counter(str(each.get("code")) for each in run.verdicts)
    if run.trouble:
        codes[str(run.trouble.get("code"))] += 1
    return (MetricValue(count, (code,)) for code, count in codes.items())


def _reports(run: RunStatus, peers: Sequence[Document]) -> Iterator[MetricValue]:
    return (MetricValue(value, (name,)) for name, value in metrics_of(run.metrics).items())


def _peers(run: RunStatus, peers: Sequence[Document]) -> Iterator[MetricValue]:
    for peer in peers:
        if peer.get("member") and not peer.get("you"):
            who = str(peer.get("peer"))
            yield MetricValue(peer.get("live"), (who, name_of(who), path_kind(peer) or "none"))


NODE_METRICS = (
    NodeMetric("atoll_uptime_seconds", "Since the node started.", _one("uptime_s")),
    NodeMetric("atoll_memory_bytes", "Memory of the node's process.", _one("memory_bytes")),
    NodeMetric(
        "atoll_connected_peers",
        "Peers that the node is connected to.",
        lambda status: [MetricValue(len(_at(status, ("network", "connected")) or ()))],
    ),
    NodeMetric("atoll_lanes", "Peers with a lane for bulk data.", _lanes, ("path",)),
    NodeMetric("atoll_lane_bytes_total", "Bulk data on lanes.", _lane_bytes, ("path", "direction")),
    NodeMetric("atoll_message_bytes_total", "Control messages.", _message_bytes, ("direction",)),
    NodeMetric(
        "atoll_relayed_bytes_total",
        "Bulk data that this node relayed for others.",
        _one("network", "relayed", "bytes"),
    ),
    NodeMetric(
        "atoll_machine_energy_joules_total", "Energy of the processors.", _energy, ("zone",)
    ),
    NodeMetric("atoll_gpu_busy", "Share of the time that a GPU works.", _gpus("busy"), GPU),
    NodeMetric("atoll_gpu_memory_bytes", "Memory in use on a GPU.", _gpus("memory_bytes"), GPU),
    NodeMetric("atoll_gpu_watts", "What a GPU takes now.", _gpus("watts"), GPU),
    NodeMetric("atoll_gpu_energy_joules_total", "Energy of a GPU.", _gpus("joules"), GPU),
    NodeMetric("atoll_gpu_celsius", "How hot a GPU is.", _gpus("celsius"), GPU),
)

RUN_METRICS = (
    RunMetric("atoll_round", "Rounds in the anchor of this node.", _of("round")),
    RunMetric("atoll_rounds_wanted", "Rounds that the run asks for.", _of("rounds")),
    RunMetric("atoll_finished", "1 once all of them are committed.", _of("finished")),
    RunMetric("atoll_script_attached", "1 while a script trains here.", _of("script")),
    RunMetric("atoll_members", "Members.", _count("members")),
    RunMetric("atoll_members_unreachable", "Members taken to be gone.", _count("unreachable")),
    RunMetric("atoll_quorum_held", "0 while too few members are reachable.", _of("quorum", "held")),
    RunMetric("atoll_contributors", "Who contributed to the newest round.", _contributors),
    RunMetric(
        "atoll_samples", "Samples in the newest round, of all members.", _samples, keeps="samples"
    ),
    RunMetric(
        "atoll_last_round_timestamp_seconds",
        "When the newest round was committed.",
        lambda run, _: [MetricValue(run.last_round.at)] if run.last_round else [],
    ),
    RunMetric(
        "atoll_reductions_total", "Rounds that this node reduced.", _of("timings", "reductions")
    ),
    RunMetric(
        "atoll_transfer_seconds_total",
        "From a plan to the last byte of its result.",
        _of("timings", "transfer_s"),
        keeps="timings",
    ),
    RunMetric(
        "atoll_decision_seconds_total",
        "From the last byte of a result to its decision.",
        _of("timings", "decision_s"),
        keeps="timings",
    ),
    RunMetric(
        "atoll_training_share",
        "What waiting for results leaves of the newest rounds' time.",
        _of("timings", "training_share"),
    ),
    RunMetric("atoll_epsilon_spent", "Privacy spent at this site.", _of("privacy", "epsilon")),
    RunMetric("atoll_epsilon_limit", "Where this site stops.", _of("privacy", "stop_at_epsilon")),
    *(
        RunMetric(figure.metric, figure.about, _of(figure.field), keeps=figure.keeps)
        for figure in FIGURES
    ),
    RunMetric(
        "atoll_refused_by_budget_total",
        "Messages of peers beyond their budgets.",
        _refused,
        ("kind",),
    ),
    RunMetric("atoll_wrong", "Verdicts and troubles that stand, by code.", _verdicts, ("code",)),
    RunMetric(
        "atoll_script_report",
        "What this node's script reported last.",
        _reports,
        ("metric",),
        keeps="losses",
    ),
    RunMetric(
        "atoll_peer_reachable",
        "1 while another member is heard of.",
        _peers,
        ("peer", "peer_name", "path"),
    ),
)


def families(documents: NodeDocuments) -> Iterator[Metric]:
    """The metrics of both tables, with what the documents say."""
    runs = [read_run_status(run) for run in documents.status.get("runs") or ()]
    for metric in NODE_METRICS:
        yield _family(metric.name, metric.about, metric.labels, metric.read(documents.status))
    for metric in RUN_METRICS:
        found = list[MetricValue]()
        for run in runs:
            allowed = documents.allowed.get(run.run_id, NOTHING)
            if metric.keeps and not getattr(allowed, metric.keeps):
                continue
            names = run.run_id, run.name
            found += [
                MetricValue(sample.value, (*names, *sample.labels))
                for sample in metric.read(run, documents.peers.get(run.run_id, ()))
            ]
        yield _family(metric.name, metric.about, ("run", "run_name", *metric.labels), found)


def _family(
    name: str, about: str, labels: Sequence[str], samples: Iterable[MetricValue]
) -> GaugeMetricFamily | CounterMetricFamily:
    counts = name.endswith("_total")
    family = (CounterMetricFamily if counts else GaugeMetricFamily)(name, about, labels=labels)
    values = dict[tuple[str, ...], float]()  # no two lines with the same labels
    for sample in samples:
        if isinstance(sample.value, int | float) and math.isfinite(sample.value):
            label_values = tuple(escaped(label, LONGEST_LABEL) for label in sample.labels)
            values[label_values] = float(sample.value)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


class _Families(Collector):
    def __init__(self, documents: NodeDocuments) -> None:
        self._documents = documents

    def collect(self) -> Iterable[Metric]:
        return families(self._documents)


def exposition(documents: NodeDocuments) -> bytes:
    """The text that Prometheus reads."""
    return generate_latest(_Families(documents))
