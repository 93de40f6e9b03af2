"""The control socket: how scripts and the command line talk to the node of this machine.

* shared_memory  contribution and anchor, between node and script
* beside       work of a script's process that a thread of its own does
* descriptors  descriptors that are closed with their last reference
* frames       bytes to messages, sans I/O
* protocol     messages, and their frames; shared by both sides
* calls        who answers which request: one row a request
* service      what the node implements beside those rows
* address      credentials of the other end of a unix socket
* connection   one accepted connection: requests in order, pushes beside them (trio)
* server       the listening socket (trio)

Import the modules by name: ``server`` and ``connection`` load trio, the others must not.
"""
