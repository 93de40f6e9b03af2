"""Whole swarms in virtual time: the real session and the real data plane on a network that fails as
told.

process       one life of a node: Session and Exchange on a World and a Network
stage         blocking scripts in virtual time, one running at a time
local_member  the Swarm that such a script sees
local_swarm   LocalSwarm: all peers of a run (scripts import it from `atoll.node.local`)
fleet         machines and links as people write them
churn         what happens to them: a script, or drawn
fleet_run     a user's run on them: `atoll simulate --peers`
"""
