"""The whole swarm in virtual time: the real session and the real data plane of every member, on a
network that fails as told.

medium    a disk that loses, tears and reorders what was not synced when power goes
storage   what a simulated member keeps over the life of its process
script    a training script reduced to what the round protocol sees of it: units of work
process   one life of a node: Session and Exchange on a World and a Network
member    one peer: its disks, and while it lives a process and its scripts; one log as it is
          watched: its checker, and what its scripts share
checker   the oracle: predicates that must hold whatever happens
removal   a quorum is lost for ever, and the organiser recertifies
loss_plants  known bugs of backups, failing disks and deaths
losses    loss without end, homes from a backup, disks that fail
deaths    members that die for good, and what is promised to who is left
moments   power cuts, kills and old copies at the moment at which a bug can show
twins     two processes with one key
swarm     members, world, network, faults and checker: one seed, one run
plant     the seams at which known bugs are planted
branch_plants  those of branches
seal_plants  those of recertifying
lying_plants  those of the round under members that lie
bending   a signed message with one field changed, for liars that leave everything else true
liars     members that lie: what they say in the place of what is so
plants    known bugs, planted to see that the checker finds them
stage     blocking scripts in virtual time, one running at a time (for `atoll.node.local`)
averages  averages of a large swarm on a grid, under churn (stands on `atoll.node.local`)
"""
