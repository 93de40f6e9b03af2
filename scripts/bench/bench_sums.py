#!/usr/bin/env python3
"""How far one liar moves a model whose run has [robust] trimmed_mean with f = 1 and [quorum] lying = 1,
whether it is out at the end, and what checked sums cost.

A seed is one run in the simulator: real sessions and data planes, in virtual time. One member of five
or six tells one lie after another of LIES, by the seed: it adds a thousand to each value of the sums of
its parts, plans itself as owner of everything, states other sums or other inputs than there were, sends
its contribution in two versions, bends what it signs, or everything that the simulator's liars can. Proof
of a lie bans the liar at all others, which hear no more of it, as a node does.

"beyond" is how far a value of any decided result lies outside of what the honest members of its entry
contributed, which is what the rule allows: 0 is wanted. The checker recomputes each result besides.
"out" are liars that are proven, and that the newest entry does not count; "no member" are those of them
that its configuration is without: where four are left (3 f + 1) a liar keeps its name in it, and nothing
else, until somebody else is let in. Liars that stay are told by why, with the lies of theirs that came
about, and how far beyond they moved a result:

told nothing    it never came to lie: it owned no part, say, or stated none, in the entries of its seed
no proof of it  of its lies there is no proof that others can check (docs/internals/protocol/blame.md)
not seen        no honest convener had two statements of one part before it
ranges anew     one had, and planned other ranges, so that what was stated proved nothing
restated        one had, the same ranges were stated again, and there was no proof yet
late            it was proven, and the newest entry counts it still

Then five honest members, --lying 1 beside a plain run: bytes of the data plane and virtual seconds an
entry. The aim is 1.6 times the bytes.

    scripts/bench/bench_sums.py --seeds 200 --out sums.jsonl   goes on where it was interrupted
The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from _bench import ROOT, emit, progress

sys.path.append(str(ROOT / "scripts"))
sys.path.append(str(ROOT / "tests"))

from simulate_rounds import play_all

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from kits.rounds.swarm import SimSwarm

    from atoll.collectives.identifiers import PeerId

EVERYTHING = "all"
LIES = (
    "own+add",
    "add",
    "missum",
    "frame",
    "two",
    "unsigned",
    "add+two",
    "frame+add",
    "bend+add",
    "equivocate+add",
    EVERYTHING,
)
PROVABLE = {"lie: sum", "lie: statement", "lie: two signed"}
RULE = "trimmed_mean:1"
MOST_BYTES = 1.6
Task = tuple[int, str, int, int]


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=200, help="how many (default 200)")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--rounds", type=int, default=8, help="entries a seed (default 8)")
    parser.add_argument("--price", type=int, default=10, help="seeds of the price (default 10)")
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes (default 2)"
    )
    parser.add_argument("--out", type=Path, help="a line a run; what stands in it is not repeated")
    return parser.parse_args(argv)


def banning(banned: set[PeerId], sent: list[int]) -> type[SimSwarm]:
    """A swarm that bans who is proven to lie, into ``banned``, and adds up in ``sent`` the bytes of
    the data plane.
    """
    from kits.rounds.swarm import SimSwarm

    from atoll.node.run.evidence import accused

    knowing = set[str]()

    class Banning(SimSwarm):
        """Members hear of the proof from one another. Who is none yet knows of no ban: it may have
        no other address than a banned organiser's, by its invite.
        """

        def _knows(self, peer: PeerId) -> bool:
            process = self.members[peer].process
            machine = process.session.machine if process is not None else None
            if machine is not None and machine.is_member:
                knowing.add(peer)
            return peer in knowing

        def _accused(self, by: PeerId, event: Any) -> None:
            super()._accused(by, event)
            if (evidence := getattr(event, "evidence", None)) and (peer := accused(evidence)):
                banned.add(peer)

        def _tap(self, sender: Any, receiver: Any, channel: str, payload: Any) -> bool:
            if channel == "record":
                sent[0] += len(payload[0]) + len(payload[1])
            for member in self.members.values() if banned else ():
                if self._knows(member.peer) and member.process and member.peer not in banned:
                    member.process.session.membership.banned |= banned
            lost = super()._tap(sender, receiver, channel, payload)
            return lost or any(
                peer in banned and self._knows(other)
                for peer, other in ((sender, receiver), (receiver, sender))
                if peer != other
            )

    return Banning


def play(task: Task) -> dict[str, Any]:
    """One seed, in a worker process: with this lie, or none."""
    from kits.rounds.liars import LIES as ALL
    from kits.rounds.liars import Lie
    from kits.rounds.swarm import Options

    from atoll.collectives.identifiers import PeerId

    seed, lie, lying, rounds = task
    sent, banned = [0], set[PeerId]()
    settled = Counter[str]()  # what honest conveners have made of differences
    lies = ALL if lie == EVERYTHING else tuple(lie.split("+")) if lie else ()
    swarm = banning(banned, sent)(
        seed,
        Options(
            peers=(5, 6) if lie else (5, 5),
            rounds=rounds,
            faults=(),
            plan="butterfly",
            fragments=1,
            codec="fp32",
            reducer=RULE,
            lying=lying,
            lies=cast("tuple[Lie, ...]", lies),
        ),
    )
    with settlements(swarm, settled):
        problem = swarm.run().problem
    entries, beyond = measure(swarm)
    newest = [each.entry for each in swarm.checker.entries]
    counted = next((e.contributors for e in reversed(newest) if e.contributors), ())
    members = {member.peer for member in newest[-1].next_config}
    told = {what for what, n in swarm.stats.items() if n and what.startswith("lie: ")}
    out = banned >= swarm.liars and swarm.liars.isdisjoint(c.member.peer for c in counted)
    return {
        "seed": seed,
        "lie": lie,
        "lying": lying,
        "rounds": rounds,
        "problem": problem,
        "entries": entries,
        "beyond": beyond,
        "proven": bool(banned),
        "out": out,
        "why": "" if out or not lie else reason(told, bool(banned), settled),
        "left": bool(swarm.liars) and swarm.liars.isdisjoint(members),
        "told": sum(swarm.stats[what] for what in told),
        "lies": {what.removeprefix("lie: "): swarm.stats[what] for what in sorted(told)},
        "bytes": sent[0],
        "virtual_s": swarm.world.now,
    }


@contextmanager
def settlements(swarm: SimSwarm, settled: Counter[str]) -> Generator[None]:
    """Counts what honest conveners make of two statements of one part: ranges kept, or anew."""
    from atoll.collectives.digest import meaning
    from atoll.collectives.modes.byzantine.convener import ByzantineConvener

    settle = ByzantineConvener._settle

    def watched(self: ByzantineConvener, now: float, plan: Any, *rest: Any) -> None:
        settle(self, now, plan, *rest)
        if self.view.me.peer not in swarm.liars:
            kept = self.plan is not None and meaning(self.plan) == meaning(plan)
            settled["kept" if kept else "anew"] += 1

    ByzantineConvener._settle = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        ByzantineConvener._settle = settle  # type: ignore[method-assign]


def reason(told: set[str], proven: bool, settled: Counter[str]) -> str:
    """Why a liar is not out."""
    if not told:
        return "told nothing"
    if proven:
        return "late"
    if not told & PROVABLE:
        return "no proof of it"
    if not settled:
        return "not seen"
    return "restated" if settled["kept"] else "ranges anew"


def play_resumed(tasks: list[Task], out: Path | None, jobs: int) -> Iterator[dict[str, Any]]:
    """What each task came to, from the file where it stands there."""
    known = dict[tuple[int, str, int, int], dict[str, Any]]()
    if out is not None and out.exists():
        for line in out.read_text().splitlines():
            each = json.loads(line)
            known[each["seed"], each["lie"], each["lying"], each["rounds"]] = each
    yield from (known[task] for task in tasks if task in known)
    for each in play_all(play, [task for task in tasks if task not in known], jobs):
        if out is not None:
            with out.open("a") as file:
                print(json.dumps(each), file=file)
        yield each


def measure(swarm: SimSwarm) -> tuple[int, float]:
    """How many entries with contributors a swarm decided, and how far beyond the span of the
    honest contributions a result of theirs lies at most.
    """
    import torch

    from atoll.collectives.codecs.codec import Chunking

    checker, entries, beyond = swarm.checker, 0, 0.0
    for certified, result in zip(checker.entries, checker.results, strict=False):
        entry = certified.entry
        honest = [c for c in entry.contributors if c.member.peer not in swarm.liars]
        if not entry.contributors or not result:
            continue
        entries += 1
        chunking = Chunking(entry.codec, entry.numel, entry.chunk_elements)
        values = torch.cat(
            [each[-1].clone() for each in chunking.results.decode(memoryview(bytearray(result)))]
        )
        rows = torch.stack([checker.frozen[c.cid].vector for c in honest])
        over = torch.maximum(values - rows.amax(0), rows.amin(0) - values)
        beyond = max(beyond, float(over.max()))
    return entries, beyond


def staying(played: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Liars that are not out, by why: their seeds, their lies, and how far they moved a result."""
    found = dict[str, dict[str, Any]]()
    for each in played:
        row = found.setdefault(each["why"], {"seeds": [], "lies": Counter[str](), "beyond": 0.0})
        row["seeds"].append(each["seed"])
        row["lies"].update(each["lies"])
        row["beyond"] = max(row["beyond"], each["beyond"])
    return dict(sorted(found.items()))


def tell(rows: dict[str, dict[str, Any]], why: dict[str, dict[str, Any]]) -> None:
    """The table, and who is not out."""
    for lie, row in rows.items():
        row["entry_s"] = round(row.pop("s") / max(1, row["entries"]), 3)
        progress(
            f"{lie:<16} {row['seeds']:3} seeds, told in {row['told']:3}   beyond {row['beyond']:g}   "
            f"proven {row['proven']:3}, out {row['out']:3}, no member {row['left']:3}   "
            f"{row['entry_s']:.3f} s an entry"
        )

    for word, of in why.items():
        lies = ", ".join(f"{what} {n}" for what, n in of["lies"].most_common())
        progress(f"not out, {word}: {len(of['seeds'])} seeds, {sorted(of['seeds'])}")
        progress(f"    beyond {of['beyond']:g}; told: {lies or 'nothing'}")


def main(argv: list[str]) -> int:
    """Exit code of the script: 1 where a model was moved, a promise broken, or bytes too many."""
    arguments = parse(argv)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    price = range(arguments.first, arguments.first + arguments.price)
    tasks: list[Task] = [(seed, LIES[seed % len(LIES)], 1, arguments.rounds) for seed in seeds]
    tasks += [(seed, "", lying, arguments.rounds) for seed in price for lying in (0, 1)]
    rows: dict[str, dict[str, Any]] = {}
    prices: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    problems, stay = list[dict[str, Any]](), list[dict[str, Any]]()
    for done, each in enumerate(play_resumed(tasks, arguments.out, arguments.jobs), 1):
        if each["problem"]:
            problems.append(each)
            progress(f"seed {each['seed']}, {each['lie']}: {each['problem']}")
        if not each["lie"]:
            prices[each["lying"]].append(each)
            continue
        row = rows.setdefault(
            each["lie"],
            {
                "seeds": 0,
                "told": 0,
                "entries": 0,
                "beyond": 0.0,
                "proven": 0,
                "out": 0,
                "left": 0,
                "s": 0.0,
            },
        )
        if each["why"]:
            stay.append(each)
        row["seeds"] += 1
        row["told"] += each["told"] > 0
        row["entries"] += each["entries"]
        row["beyond"] = max(row["beyond"], each["beyond"])
        row["proven"] += each["proven"]
        row["out"] += each["out"]
        row["left"] += each["left"]
        row["s"] += each["virtual_s"]
        if done % 20 == 0:
            progress(f"{done} of {len(tasks)}")
    why = staying(stay)
    tell(rows, why)

    def mean(lying: int, what: str) -> float:
        of = prices[lying]
        return sum(each[what] for each in of) / max(1, sum(each["entries"] for each in of))

    times = mean(1, "bytes") / mean(0, "bytes") if arguments.price else 0.0
    progress(
        f"five honest members: {times:.3f} x the bytes of a plain run, "
        f"{mean(0, 'virtual_s'):.3f} s an entry, with checked sums {mean(1, 'virtual_s'):.3f} s"
    )
    moved = max((row["beyond"] for row in rows.values()), default=0.0)
    emit(
        "bench_sums",
        {**vars(arguments), "out": None},
        [],
        rows=rows,
        why=why,
        beyond=moved,
        problems=[(each["seed"], each["lie"], each["problem"]) for each in problems],
        times_bytes=round(times, 3),
        plain_entry_s=round(mean(0, "virtual_s"), 4),
        checked_entry_s=round(mean(1, "virtual_s"), 4),
    )
    return int(bool(problems) or moved > 0 or times > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
