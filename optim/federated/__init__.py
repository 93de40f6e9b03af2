"""Federated methods as small pure pieces on the frame of five: inner steps, contribution,
combination, outer step, reconciliation.

In a run with ``kind = "federated"`` the nodes make the servers' outer steps (`methods`), and
scripts the members' turns (`modes.site` drives `member`, `personal` and `site`); in `simulation`
the same turns are made for all members, by `server`. A round of any method is: members get the
anchor and the run's extra vectors, make inner steps with each gradient corrected, contribute anchor
- parameters (and what else the method sends) with a weight; the mean goes through an `OuterStep`,
whose rules are those of the server: sgd with lr 1 is FedAvg, with momentum FedAvgM, and adam, yogi
and adagrad are FedOpt's.

methods   names: what a method sends, keeps and corrects, and its server's outer step
inner     what is added to a gradient in an inner step: FedProx, SCAFFOLD, FedAvg-M, SCAFFOLD-M,
          Per-FedAvg; what comes of a round of them
member    a member's turn in a round of any method, put together from these
site      what a member of a real run keeps for itself, across its lives, and what travels beside
          the model
server    what a run keeps between rounds, and contributions added up as they come
arrivals  asynchronous rounds: staleness factors that never grow, FedAsync's mixing, FedBuff's
          scale, FedFix's unbiasing weights
personal  models of one's own: Ditto, Reptile's fine-tuning
simulation/   runs of any size in virtual time, for researchers
"""

from __future__ import annotations

from .methods import METHODS, Method, server_settings

__all__ = ["METHODS", "Method", "server_settings"]
