"""A peer of several processes (torchrun: DDP, FSDP2): one member of the swarm, whose ranks do
everything together. Files, lowest first:

    talk     what rank 0 says is heard by all ranks: answers and errors
    slices   which part of each tensor a rank holds, and what cannot be cut that way
    swarm    RankSwarm: rank 0's swarm as every rank sees it, through its own slices

Rank 0 alone holds the Swarm. Every rank runs the same code on the vector of its own slices, so each
keeps only its share of an anchor; whatever steers that code (outcomes, clocks, samples, errors) is
rank 0's or the sum of all, so they never part.
"""
