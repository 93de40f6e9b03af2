"""simulate --attack in a run with [btard]: hostile peers against the real protocol, in virtual
time.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from ...collectives.errors import ConfigError

if TYPE_CHECKING:
    from ...security.btard.simulation import BtardOptions, BtardSwarm
    from ..home.output import Terminal
    from ..manifest import Manifest

STEPS = 200  # unless --rounds or the manifest says how many
NOT_WITH = ("methods", "task", "shards", "trace", "asked", "seconds", "personal", "out")


def plays(manifest: Manifest, attack: str | None) -> bool:
    """Whether an attack is one on this run's protocol: any in a run with [btard]; in others those
    on messages, which are then refused.
    """
    if attack is None:
        return False
    from ...security.btard.simulation.hostile import ODD_ATTACKS, PROTOCOL_ATTACKS

    return manifest.btard is not None or attack in PROTOCOL_ATTACKS or attack in ODD_ATTACKS


def attacked(terminal: Terminal, manifest: Manifest, given: dict[str, Any]) -> None:
    """Play it, and say who was removed for what. Raises ConfigError for what cannot be played."""
    from ...security.btard.simulation import BtardSwarm

    options, runs = _options(manifest, given), list[dict[str, Any]]()
    for seed in range(given["seeds"]):
        runs.append(_found(swarm := BtardSwarm(seed, options), swarm.run()))
        terminal.say(
            f"seed {seed}: {len(runs[-1]['removed'])} removed in {runs[-1]['steps']} steps"
        )
    document = {
        "run": manifest.name,
        "attack": options.attack,
        "peers": options.n,
        "hostile": options.b,
        "runs": runs,
    }
    terminal.data("\n".join(_lines(options, runs)), document)


def _options(manifest: Manifest, given: dict[str, Any]) -> BtardOptions:
    """What is given, or its default. Long, since it is the table of the options."""
    from ...security.btard import AttemptSettings
    from ...security.btard.simulation import BtardOptions
    from ...security.btard.simulation.hostile import ATTACKS

    attack, hostile, terms = given["attack"], given["hostile"], manifest.settings().btard
    possible = [
        name
        for name, found in ATTACKS.items()
        if not found.intervals or (terms is not None and terms.intervals)
    ]
    if terms is None:
        raise ConfigError(
            f"{attack} is an attack on the messages of BTARD, and {manifest.name} has no [btard]",
            key="attack",
            why=(
                "What its members contribute is neither committed to beforehand nor computed "
                "again, so there is nothing to break but the contribution."
            ),
            hint=(
                "An attack on contributions, such as --attack sign_flip; or [btard] in the "
                "manifest (docs/operating/hostile.md)"
            ),
        )
    if attack not in possible:
        why = (
            (
                "It is one on the states between intervals of work, and this run "
                "has no [btard] intervals."
            )
            if attack in ATTACKS
            else ""
        )
        raise ConfigError(
            f"no attack {attack!r} in a run with [btard]",
            key="attack",
            why=why,
            hint=f"one of: {', '.join(possible)}",
        )
    n = len(terms.peers)
    if not 0 < 2 * hostile < n:
        why = (
            f"The run has the {n} peers that its manifest names; fewer than half "
            "of them may be hostile."
        )
        raise ConfigError(
            f"{hostile} hostile peers of {n}",
            key="hostile",
            why=why,
            hint=f"--hostile {(n - 1) // 2}, or fewer",
        )
    if unfit := [key for key in NOT_WITH if given.get(key) is not None]:
        why = (
            "The peers of a run with [btard] play the protocol on a small task of its own: no "
            "data, no speeds, no federated method."
        )
        raise ConfigError(
            f"--{unfit[0]} with an attack on a run with [btard]",
            key=unfit[0],
            why=why,
            hint="Leave it out.",
        )
    settings = AttemptSettings(
        BtardOptions().settings.radius,
        terms.validators,
        terms.tolerance,
        terms.timeout_s,
        terms.compute_s,
        intervals=terms.intervals,
    )  # the first step's radius is the task's
    return BtardOptions(
        n,
        hostile,
        attack,
        given["rounds"] or manifest.train.rounds or STEPS,
        messages=True,
        settings=settings,
    )


def _found(swarm: BtardSwarm, checker: Any) -> dict[str, Any]:
    from ...security.btard.messages import Fault

    removed = {
        peer: {"hostile": peer in swarm.hostile, "fault": Fault(fault).name.lower(), "step": step}
        for peer, (fault, step) in checker.removals.items()
    }
    after = checker.clean_after if checker.clean() else None
    return {
        "steps": checker.steps,
        "clean_after": after,
        "removed": removed,
        "problems": checker.problems,
    }


def _lines(options: BtardOptions, runs: list[dict[str, Any]]) -> list[str]:
    removed = [each for run in runs for each in run["removed"].values()]
    faults = Counter(each["fault"] for each in removed if each["hostile"])
    clean = [run["clean_after"] for run in runs if run["clean_after"] is not None]
    honest = [each["fault"] for each in removed if not each["hostile"]]
    lines = [
        (
            f"{options.attack} by {options.b} of {options.n} peers in every step, {len(runs)} "
            f"run{'s' if len(runs) > 1 else ''}"
        )
    ]
    lines.append(
        f"attackers removed: {sum(faults.values())} of {options.b * len(runs)}"
        + (
            f", for {', '.join(f'{fault} ({count})' for fault, count in faults.most_common())}"
            if faults
            else ""
        )
    )
    if clean:
        lines.append(
            f"none was left after {sum(clean) / len(clean):.0f} steps (at most {max(clean)})"
        )
    lines.append(
        f"honest peers removed: {len(honest)}"
        + (f", for {', '.join(sorted(set(honest)))}" if honest else "")
    )
    problems = [problem for run in runs for problem in run["problems"]]
    return (
        [*lines, *(f"WRONG: {problem}" for problem in problems)]
        if problems
        else [
            *lines,
            (
                "honest peers ended every step with the same bits; each removal is "
                "proven to who was not there"
            ),
        ]
    )
