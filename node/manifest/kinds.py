"""Kinds of run, and choices inside: which settings there are at all, by what the text chose before.

``kind`` picks a schema: ``[secure]`` is a table of ``kind = "federated"``, and in a run of another
kind there is no such table. Likewise ``[train.outer] agreement`` is a number of ``optimizer =
"heloco"``. A setting that the choice does not have is refused wherever it is written, since it
would be ignored. So two of them cannot be combined wrongly, and no row of `checks` has to say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ...collectives.outer_rules import OUTER_RULES
from ...security.rule_names import RULE_FACTS
from .manifest import Manifest
from .optional_tables import READS
from .refusals import Row

_PUBLIC = "Vectors are public, as the data are."
_WHOLE = "A step has one vector of each peer, whole, which follows from its seed."
_METHOD = "The federated method says what a round does."
_OUTER = "The federated method is the outer step: set lr and the like under [federated]."
_MEMBERS = "It follows what single members claim."
_NEWEST = "A vector is one of the newest anchor."

LACKS: dict[str, dict[str, str]] = {
    "swarm": {
        "federated": "",
        "secure": "",
        "privacy": "",
        "btard": "",
    },
    "federated": {
        "btard": _PUBLIC,
        "train.outer": _OUTER,
        "train.method": _METHOD,
        "train.overlap": "A site's work of one round would be in the sums of two.",
        "train.delay": "A site's work of one round would be in the sums of two.",
        "train.outliers": "A site that leaves a round out would not have its share in sums, masks "
        "and budgets.",
        "exchange.arrivals": "The federated method says for whom a round waits.",
        "robust.momentum": "Sites that take part now and then would send old directions again; and "
        "methods have momentum of their own.",
    },
    "seeded": {
        "federated": _PUBLIC,
        "secure": _PUBLIC,
        "privacy": _PUBLIC,
        "exchange": "Vectors travel as they are, part by part.",
        "robust": "BTARD has a rule of its own, centred clipping.",
        "evaluate": "Peers give only what a seed says.",
        "audit": "What the log is given is the aggregate.",
        "train.overlap": _NEWEST,
        "train.delay": _NEWEST,
        "train.mixing": _NEWEST,
        "train.outliers": "Others check that a peer contributes what its seed says.",
        "train.target_samples": _WHOLE,
        "train.share": _WHOLE,
        "train.max_steps": _WHOLE,
        "train.inner.samples": _WHOLE,
        "train.outer.governor": _MEMBERS,
        "train.outer.stretch": _MEMBERS,
    },
}
"""By kind: the settings that it lacks, and why."""

TABLES = {"federated": "federated", "secure": "federated", "privacy": "federated"} | {
    "btard": "seeded"
}
"""Tables of one kind only, and which."""


class TaggedChoice(NamedTuple):
    """A tagged union in a table: ``tag`` says which of its members a manifest has, ``has`` which
    settings of the table belong to which members; all other settings belong to all of them.

    ``at``: the table; ``by``: the setting that chooses; ``why``: of a setting that the chosen
    member lacks. ``written``: how to choose a member, where that is not ``by = "MEMBER"``; nothing
    for one that only the whole table makes.
    """

    at: str
    by: str
    tag: Callable[[Manifest], str | None]
    has: Mapping[str, tuple[str, ...]]
    why: Mapping[str, str] = {}
    written: Mapping[str, str] = {}

    def lacking(self, manifest: Manifest) -> list[str]:
        """Settings of other members only."""
        tag = self.tag(manifest)
        if tag is None:  # the table is not of this run
            return []
        own = self.has.get(tag, ())
        return [key for key in self.keys() if key not in own]

    def keys(self) -> tuple[str, ...]:
        """All settings that belong to some members only."""
        return tuple(dict.fromkeys(key for keys in self.has.values() for key in keys))

    def hint(self, key: str, path: str) -> str:
        """What to write in place of a setting that the chosen member lacks."""
        others = [tag for tag, keys in self.has.items() if key in keys]
        where = f"[{self.at}] " if path.rpartition(".")[0] != self.at else ""
        written = [
            self.written.get(tag, f'{self.by} = "{tag}"' if not self.written else "")
            for tag in others[:2]
        ]
        return ", or ".join(["Leave it out", *(f"{where}{line}" for line in written if line)]) + "."


def _federated(manifest: Manifest) -> bool:
    return manifest.kind == "federated"


_FADING = {
    "polynomial": ("staleness_a",),
    "hinge": ("staleness_a", "staleness_b"),
}
_STALE = {
    "staleness_a": "Contributions that count the same however stale they are have no such number.",
    "staleness_b": "It says from how many rounds behind a contribution counts less, of the hinge.",
}
_OF_A_RULE = ("f", "before", "momentum")

CHOICES: tuple[TaggedChoice, ...] = (
    TaggedChoice(
        "train",
        "method",
        lambda m: None if _federated(m) else m.train.method,
        {
            "diloco": (
                "overlap",
                "delay",
                "mixing",
                "share",
                "max_steps",
                "outliers",
                "outer.stretch",
                "outer.warmup",
                "outer.hold",
            ),
            "local_sgd": ("overlap", "delay", "mixing", "share", "max_steps", "outliers"),
        },
        {
            "overlap": "A gradient is one of the anchor it was taken at; training goes on when the "
            "step is made.",
            "delay": "A gradient is one of the anchor it was taken at; training goes on when the "
            "step is made.",
            "mixing": "Its members have gradients, and no parameters of their own to be mixed.",
            "share": "The steps of a round are its batch, and the learning rate is tuned for that.",
            "outliers": "Every member's gradient is in a step of one batch.",
            "outer.stretch": "It makes an outer step independent of the number of members; the "
            "mean itself is what this method is about.",
            "outer.warmup": "lr and momentum grow from those of the plain mean, to which this "
            "method keeps or which it does not begin with.",
            "outer.hold": "The plain mean is what this method keeps to or does not begin with.",
        },
    ),
    TaggedChoice(
        "train",
        "overlap",
        lambda m: None if _federated(m) else m.train.overlap,
        {"late": ("delay",), "eager": ("delay",)},
        {"delay": "Without overlap members wait for the round's result and take it as it is."},
    ),
    TaggedChoice(
        "train",
        "share",
        lambda m: "given" if m.train.share is not None else "",
        {"given": ("max_steps",)},
        {"max_steps": "Without share nothing is planned again."},
        {"given": "share = 0.95"},
    ),
    TaggedChoice(
        "train.outer",
        "optimizer",
        lambda m: None if _federated(m) else _outer_rule(m),
        {name: facts.reads for name, facts in OUTER_RULES.items()},
        {"momentum_dtype": "This outer step has no momentum."},
    ),
    TaggedChoice(
        "train.inner",
        "optimizer",
        lambda m: m.train.inner.optimizer,
        {"adamw": ("weight_decay", "beta1", "beta2")},
    ),
    TaggedChoice(
        "exchange",
        "plan",
        lambda m: m.exchange.plan,
        {"two-level": ("check",)},
        {
            "check": "Only heads of sites are checked: in a butterfly nobody adds up for another "
            "member, in a ring everybody does, and on three levels a site's head adds up sums of "
            "hosts, which only their hosts could check."
        },
    ),
    TaggedChoice(
        "exchange.arrivals",
        "wait",
        lambda m: m.exchange.arrivals and m.exchange.arrivals.wait,
        {"quorum": ("quorum", "grace", "dylu", "least"), "groups": ("longest", "slack")},
        {
            **dict.fromkeys(("quorum", "grace", "dylu", "least"), "It is of rounds of a quorum."),
            **dict.fromkeys(("longest", "slack"), "It is of groups that arrive together."),
        },
    ),
    TaggedChoice(
        "exchange.arrivals",
        "dylu",
        lambda m: m.exchange.arrivals and ("true" if m.exchange.arrivals.dylu else "false"),
        {"true": ("least",)},
        {"least": "All members make as many steps."},
        {"true": "dylu = true"},
    ),
    TaggedChoice(
        "exchange.arrivals",
        "staleness",
        lambda m: m.exchange.arrivals and m.exchange.arrivals.staleness,
        _FADING,
        _STALE,
    ),
    TaggedChoice(
        "federated",
        "method",
        lambda m: m.federated.method if _federated(m) else None,
        {**READS},
    ),
    TaggedChoice(
        "federated",
        "personal",
        lambda m: m.federated.personal if _federated(m) else None,
        {"ditto": ("pull",)},
        {"pull": "Sites have no models of their own."},
    ),
    TaggedChoice(
        "federated",
        "staleness",
        lambda m: m.federated.staleness if _federated(m) else None,
        _FADING,
        _STALE,
    ),
    TaggedChoice(
        "privacy",
        "quantile",
        lambda m: m.privacy and ("given" if m.privacy.quantile is not None else ""),
        {"given": ("clip_rate", "count_noise")},
        dict.fromkeys(("clip_rate", "count_noise"), "The bound is fixed."),
        {"given": "quantile = 0.5"},
    ),
    TaggedChoice(
        "robust",
        "rule",
        lambda m: m.robust.rule,
        {name: (*_OF_A_RULE, *facts.reads) for name, facts in RULE_FACTS.items()},
        {
            **dict.fromkeys(
                _OF_A_RULE, "A mean follows a single hostile contribution wherever it wants."
            ),
            "keep": "Multi-Krum alone is the mean of those it keeps.",
            "neighbours": "Krum's rules alone score by neighbours.",
            "radius": "Centred clipping alone has one.",
        },
        {
            "trimmed_mean": 'rule = "trimmed_mean" and f = 1',
            "multi_krum": 'rule = "multi_krum" and f = 1',
            "centred_clip": 'rule = "centred_clip" and f = 1',
        },
    ),
)


def _outer_rule(manifest: Manifest) -> str:
    """What steps the anchor: plain averaging, whatever a text says beside, is ``sgd``."""
    train = manifest.train
    return "sgd" if train.method == "local_sgd" else train.outer.optimizer


def kind_rows(kind: str, given: Mapping[str, Any]) -> list[Row]:
    """Rows of settings that are given in a run of another kind. ``given``: a text's table."""
    rows: list[Row] = []
    for path, why in LACKS.get(kind, {}).items():
        if not is_given(given, path):
            continue
        of = TABLES.get(path)
        owner = f'A run of kind = "{of}" has it.' if of is not None and not why else why
        other = f'kind = "{of}", at the top' if of is not None else ""
        hint = "Leave it out." if not other else f'kind = "{of}" (at the top), or leave it out'
        says = f'$.{path} is given, and a run of kind = "{kind}" has no such '
        says += "table" if "." not in path else "setting"
        rows.append(Row(True, f"$.{path}", owner, hint, says=says))
    return rows


def choice_rows(manifest: Manifest, given: Mapping[str, Any]) -> Iterator[Row]:
    """Rows of settings that are given and belong to what was not chosen."""
    for choice in CHOICES:
        for key in choice.lacking(manifest):
            path = f"{choice.at}.{key}"
            if is_given(given, path):
                tag = choice.tag(manifest)
                chosen = f'$.{choice.at}.{choice.by} = "{tag}"' if tag else "no such run"
                yield Row(
                    True,
                    f"$.{path}",
                    choice.why.get(key, "It would be ignored."),
                    choice.hint(key, path),
                    says=f"$.{path} is given, and {chosen} has no such setting",
                )


def is_given(table: Mapping[str, Any], path: str) -> bool:
    """Whether a table of tables has something at a dotted path."""
    inside: Any = table
    for step in path.split("."):
        if not isinstance(inside, Mapping) or step not in inside:
            return False
        inside = inside[step]
    return True
