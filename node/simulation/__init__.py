"""A node in virtual time, under `atoll.node.local`: the real session and the real data plane on a
network that fails as told.

process   one life of a node: Session and Exchange on a World and a Network
stage     blocking scripts in virtual time, one running at a time
"""
