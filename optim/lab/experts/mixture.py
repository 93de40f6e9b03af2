"""A router and its experts as one model: u(x) = sum over k of p(k | x) u_k(x)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

Answer = Literal["values", "logits"]


class Mixture(nn.Module):
    """What the experts answer together, weighted by how likely the router finds their clusters.

    experts: each takes what the mixture takes; all answer in the same shape, samples first.
    router: takes the same, and answers float (n, len(experts)): logits of the cluster.
    top: only the so many likeliest experts of a sample run, each on the samples that want it; their
    weights are scaled to a sum of 1. ``top=1`` costs one expert a sample.
    answer: "values" are added as they are (a velocity of flow matching, a regression); "logits" of
    classes become the logarithm of the mean probability.

        velocity = Mixture([one, other], router, top=1)
        with torch.no_grad():
            x = x + velocity(x, t) * dt

    Raises ValueError where ``top`` is no number of experts.
    """

    def __init__(
        self,
        experts: Sequence[nn.Module],
        router: nn.Module,
        *,
        top: int | None = None,
        answer: Answer = "values",
    ) -> None:
        super().__init__()
        self.top = len(experts) if top is None else top
        if not 1 <= self.top <= len(experts):
            raise ValueError(f"top {top} of {len(experts)} experts")
        self.experts, self.router, self.answer = nn.ModuleList(experts), router, answer

    def forward(self, *inputs: Tensor) -> Tensor:
        """inputs: tensors (n, …), the same samples in each. Returns what an expert returns; with
        ``answer="logits"`` log-probabilities.
        """
        weights, chosen = self.router(*inputs).softmax(-1).topk(self.top)
        weights = weights / weights.sum(-1, keepdim=True)
        total: Tensor | None = None
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            if not len(rows):
                continue
            answer = expert(*(each[rows] for each in inputs))
            if self.answer == "logits":
                answer = answer.softmax(-1)
            share = weights[rows, place].to(answer.dtype).view(-1, *[1] * (answer.ndim - 1))
            before = answer.new_zeros(len(chosen), *answer.shape[1:]) if total is None else total
            total = before.index_add(0, rows, answer * share)
        assert total is not None, "every sample chose an expert"
        return total.log() if self.answer == "logits" else total
