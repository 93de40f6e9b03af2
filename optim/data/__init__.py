"""Whose turn each sample is: a run's members read one data set together, and no two of them the
same part. Files, lowest first:

declared how many examples this site has
order    a sample for every position of an endless sequence: one keyed permutation an epoch
spans    sets of positions as sorted spans
leases   which positions are whose, by the certified log alone
first_batch   digests of what is read first in each round
ledger   samples between a loader and the steps made on them
shard    `Swarm.shard`: a DataLoader that reads what is leased to its member
"""
