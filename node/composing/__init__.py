"""A node process, put together. What stands here knows all that a node is made of, and is known by
nobody but the commands that start one; `node.service` has what the parts do.

announced  the certificates of announcements, read for the network
founded    runs founded here that nobody has joined, shown to who holds an invite
manifests  manifests as the service asks for them
preview    a run's manifest, seen by a process that is no node and no member
parent     a private node's end of the link to its script
parts      the network, manifests, modes and screens, given to the service
process    the process: start, signals, parent, clean end
"""
