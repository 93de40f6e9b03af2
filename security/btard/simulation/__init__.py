"""Whole swarms of BTARD peers from a seed, hostile ones among them, and an oracle.

task      what is trained: noisy gradients from public seeds
view      what is asked for; what attackers and the checker see of the swarm
hostile   attacks on gradients and on the protocol
checker   what must hold
swarm     the peers, a network in virtual time or none
"""

from __future__ import annotations

from .swarm import BtardSwarm
from .view import BtardOptions

__all__ = ["BtardOptions", "BtardSwarm"]
