"""BTARD among hostile peers, for tests and `scripts/bench/bench_btard.py`.

hostile   attacks on gradients and on the protocol
checker   what must hold whatever they do
swarm     whole swarms of peers from a seed, on the simulated network
plants    bugs planted in BTARD, which the checker has to find
"""
