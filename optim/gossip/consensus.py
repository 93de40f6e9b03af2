"""What an export of a run without a shared anchor is: the mean of the peers' models, of whom, and
how far from it they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...collectives.api import all_reduce
from ...collectives.identifiers import PeerId
from ...collectives.swarm import Swarm


@dataclass(frozen=True)
class Consensus:
    """``mean``: float32, of the weights of ``peers``, each counted once. ``apart``: the root of the
    mean of squares of the distances of peers' weights from it, ``own`` this peer's distance, both
    over the norm of the mean.
    """

    mean: Tensor
    peers: tuple[PeerId, ...]
    apart: float
    own: float

    @property
    def metadata(self) -> dict[str, str]:
        """What a file of the mean says of itself, for `safetensors.torch.save_file`."""
        return {
            "model": "mean of peers without a shared anchor",
            "peers": " ".join(self.peers),
            "apart": f"{self.apart:.6g}",
        }


@torch.no_grad()
def consensus(
    swarm: Swarm, weights: Tensor, *, op_id: str, deadline_s: float = 60.0
) -> Consensus | None:
    """The mean over all members that call it, and how far apart they are, which is also reported
    for `atoll status`. ``weights`` (float32) stay as they are. None where one of its two exchanges
    was not decided, or not among the same peers. Raises what `Swarm.operate` raises.
    """
    mean = weights.detach().to("cpu", torch.float32, copy=True).contiguous()
    first = all_reduce(
        swarm, mean, op_id=f"{op_id}/mean", codec="fp32", deadline_s=deadline_s
    ).wait()
    if first.status != "committed":
        return None
    square = (weights.detach().cpu().float() - mean).square().sum().reshape(1)
    own = square.sqrt().item()
    second = all_reduce(
        swarm, square, op_id=f"{op_id}/apart", codec="fp32", deadline_s=deadline_s
    ).wait()
    peers = tuple(share.peer for share in first.contributors)
    if second.status != "committed" or {s.peer for s in second.contributors} != set(peers):
        return None
    norm = mean.norm().item() or 1.0
    found = Consensus(mean, peers, square.sqrt().item() / norm, own / norm)
    swarm.report({"apart": found.apart})
    return found
