"""Whole swarms of BTARD peers from a seed, hostile ones among them, and an oracle.

task      what is trained: noisy gradients from public seeds
hostile   attacks on gradients and on the protocol
checker   what must hold
plants    bugs that the checker has to find
swarm     the peers, a network in virtual time or none
"""

from __future__ import annotations

from .swarm import BtardOptions, BtardSwarm

__all__ = ["BtardOptions", "BtardSwarm"]
