"""A private Kademlia on ``/atoll/kad/1.0.0``, wire-compatible with libp2p's kad-dht, with our own
server and query engine.

records   signed, expiring, owner-bound values; run keys
routing   distances and the routing table, diverse by network
store     what a node keeps for others: providers and values, bounded
wire      protobuf messages on varint-prefixed streams (names libp2p)
server    answers requests
work      lookups by disjoint paths and storing, hedged, without I/O
engine    put, get, provide, find providers, refresh, republish, without I/O
channel   one persistent, pipelined stream per peer for requests
node      Dht: the engine over the host's streams
"""
