"""Differential privacy as numbers: what a run has spent, how much noise a step needs, exact
discrete noise, clipping. No I/O.

Runs with ``[privacy]`` use it through `node/modes/secure`. What is protected is a client (all of
its data) where a vector is clipped as a whole, or an example where an inner step clips each
example's gradient: the accounting is the same.

rdp         one step of the Poisson-subsampled Gaussian in Rényi terms; (epsilon, delta) from them
accountant  a run's steps added up; which step would pass epsilon; the noise that a plan needs
budget      how many rounds what a run allows is enough for
discrete    exact samples of the discrete Gaussian
noise       what each member adds, on a grid of whole numbers, so that the sum has the noise that is
            accounted
clipping    the bound on a vector's norm, fixed or following a quantile
"""

from __future__ import annotations

from .accountant import Accountant, noise_for
from .clipping import AdaptiveBound, clip
from .discrete import discrete_gaussian
from .noise import NoisePlan, add_noise

__all__ = [
    "Accountant",
    "AdaptiveBound",
    "NoisePlan",
    "add_noise",
    "clip",
    "discrete_gaussian",
    "noise_for",
]
