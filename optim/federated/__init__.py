"""Federated methods as small pure pieces on the frame of five: inner steps, contribution, combination, outer step, reconciliation.

For runs with ``mode = "federated"``, which are not wired into a node yet: nothing here is called by one. A round of any method is: members get the
anchor and the run's extra vectors, make inner steps with each gradient corrected, contribute anchor - parameters (and what else the
method sends) with a weight; the mean goes through an `OuterStep`, whose rules are those of the server: sgd with lr 1 is FedAvg,
with momentum FedAvgM, and adam, yogi and adagrad are FedOpt's.

methods   names: what a method sends, keeps and corrects, and its server's outer step
inner     what is added to a gradient in an inner step: FedProx, SCAFFOLD, FedAvg-M, SCAFFOLD-M; what comes of a round of them
arrivals  asynchronous rounds: staleness factors that never grow, FedAsync's mixing, FedBuff's scale, FedFix's unbiasing weights
"""

from __future__ import annotations

from .methods import METHODS, Method, server_settings

__all__ = ["METHODS", "Method", "server_settings"]
