"""Robust aggregation: one vector from n, of which f may be anything. Pure numbers; no network, no
keys.

Rules by coordinate work on any range of the vectors, so on the parts of a butterfly. Rules of whole
rows are rule(Gram matrix) -> weights and then one weighted sum; Gram matrices of ranges add up.
Steps before a rule are matrices that mix rows, so they fit both. A node passes all of them to its
rounds (`reducers`). All stop on any input, modify none, and name the n they need for an f.

bounds      n and f, whole float32 rows, finite numbers
native      what takes most of the time, compiled (native.c), where there was a compiler
numbers     small float64 matrices with the same bits everywhere: sums, products, eigenvectors
networks    sorting networks, without what a result does not need
coordinate  median, trimmed mean, MeaMed
triangle    Gram matrices with the same bits everywhere, for members of a round
gram        Gram matrices, distances, weighted sums, mixtures of rows
selection   Krum, Multi-Krum, MDA, MoNNA
centre      geometric median, centred clipping and its radius
spectral    CAF, Flag Aggregator
before      nearest-neighbour mixing, bucketing, clipping of norms, ARC
momentum    worker momentum
leaning     who keeps pointing one way over many rounds: figures, for people
aggregate   rules and steps by name; a whole aggregation in one process
reducers    all of this as reducers of a round
"""

from __future__ import annotations

from .aggregate import RULES, STEPS, Aggregate, aggregate
from .momentum import WorkerMomentum

__all__ = ["RULES", "STEPS", "Aggregate", "WorkerMomentum", "aggregate"]
