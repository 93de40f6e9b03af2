"""Local SGD: plain averaging of parameters every H steps, as one torch.optim.Optimizer."""

from __future__ import annotations

from .diloco import SwarmOptimizer


class LocalSGD(SwarmOptimizer):
    """Local SGD (Stich 2018, arXiv 1805.09767; with samples as weights FedAvg, McMahan et al. 2016,
    arXiv 1602.05629).

    H steps of any inner optimizer, then the sample-weighted mean of the members' parameters: the
    outer step is SGD with learning rate 1 and without momentum.

        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        opt = LocalSGD(model.parameters(), inner, swarm=swarm, model=model)

    Arguments and use are those of `DiLoCo`; the run's method must be "local_sgd".
    """

    method = "local_sgd"
