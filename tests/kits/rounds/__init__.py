"""The whole swarm in virtual time: the real session and the real data plane of every member, on a
network that fails as told, with an oracle that recomputes every result.

swarm     members, world, network, faults and checker: one seed, one run
member    one peer: its disks, and while it lives a process and its scripts; one log as it is
          watched: its checker, and what its scripts share
script    a training script reduced to what the round protocol sees of it: units of work
injection  seeded plans of faults, and traps that strike at the n-th message of a kind
medium    a disk that loses, tears and reorders what was not synced when power goes
storage   what a simulated member keeps over the life of its process
checker   the oracle: predicates that must hold whatever happens
decided   what a seed decides, as values and as short hashes of them: compared with a record
averages  averages of a large LocalSwarm on a grid, under churn

Faults:
removal   a quorum is lost for ever, and the organiser recertifies
losses    loss without end, homes from a backup, disks that fail
deaths    members that die for good, and what is promised to who is left
moments   power cuts, kills and old copies at the moment at which a bug can show
twins     two processes with one key
bending   a signed message with one field changed, for liars that leave everything else true
liars     members that lie: what they say in the place of what is so

Known bugs, planted to see that the checker finds them:
plant     the seams at which they are planted
plants    the list of all of them
seal_plants, loss_plants, lying_plants   those of recertifying, of backups, failing disks and
          deaths, and of the round under members that lie
"""
