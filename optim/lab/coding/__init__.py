"""Codes against stragglers and liars, for gradients of a synchronous step. Pure functions on NumPy
arrays: no network, no clock, no torch.

No run of atoll needs them: a peer that is late or gone costs a round its contribution and nothing
else, since peers of a round train on different data and a mean over fewer is a mean. A code pays
where *every* part of the data must be in *every* step: it buys that with (s + 1)-fold work.
docs/coding.md says when that is worth it, and has the study.

gradient     gradient coding: any n - s of n workers give the exact sum
sequential   the same with less work, where a result may come some rounds later
berrut       coded computing of any smooth function, and who of the workers returned nonsense
"""

from .berrut import BerrutCode, Decoded
from .gradient import GradientCode, cyclic, fractional_repetition
from .sequential import SelectiveRepetition

__all__ = [
    "BerrutCode",
    "Decoded",
    "GradientCode",
    "SelectiveRepetition",
    "cyclic",
    "fractional_repetition",
]
