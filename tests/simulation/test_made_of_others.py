"""What docs/collectives.md makes of other collectives: reductions among named members, scatter, and
point to point, as they stand there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from atoll.collectives import all_reduce, broadcast, enter
from atoll.node.local import LocalSwarm

PAGE = Path(__file__).resolve().parents[2] / "docs" / "collectives.md"


def made() -> Any:
    """What the page has."""
    blocks = PAGE.read_text().split("```python\n")
    (block,) = (part.partition("```")[0] for part in blocks if "swarm.peer in team" in part)
    return compile(block, str(PAGE), "exec")


def test_named_members_scatter_and_point_to_point() -> None:
    page, ended = made(), set[int]()

    def script(member: Any) -> list[Any]:
        enter(member, start_with=4)
        member.sleep(2.0)
        peers = sorted(view.peer for view in member.members())
        names: dict[str, Any] = {
            "all_reduce": all_reduce,
            "broadcast": broadcast,
            "swarm": member,
            "team": peers[1:],
            "tensor": torch.full((3,), float(member.index + 1)),
            "rows": torch.arange(8.0).reshape(4, 2) if member.index == 0 else torch.zeros(4, 2),
            "peers": peers,
            "root": peers[0],
            "source": peers[3],
            "target": peers[1],
            "message": torch.full((2,), float(member.index)),
        }
        exec(page, names)
        ended.add(member.index)
        while len(ended) < 4:
            member.sleep(0.5)
        return [names[name].tolist() for name in ("tensor", "row", "message")]

    assert LocalSwarm(4, latency_s=0.02).run(script, limit_s=600.0) == [
        [[1.0] * 3, [0.0, 1.0], [0.0, 0.0]],
        [[3.0] * 3, [2.0, 3.0], [3.0, 3.0]],
        [[3.0] * 3, [4.0, 5.0], [2.0, 2.0]],
        [[3.0] * 3, [6.0, 7.0], [3.0, 3.0]],
    ]
