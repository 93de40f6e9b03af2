"""Decentralized experts: one run for each part of the data, and a router between their models.

The data is cut into clusters of alike samples; each cluster is an island, an ordinary run of its
own, which exchanges nothing with the others. Afterwards a router, a small classifier of clusters,
says which experts answer (McAllister et al. 2025, arXiv 2501.05450). docs/experts.md says when this
is worth it, and when not.

clusters   which cluster a sample belongs to, by its features
mixture    the router and its experts as one model
"""

from .clusters import Clusters, find_clusters
from .mixture import Mixture

__all__ = ["Clusters", "Mixture", "find_clusters"]
