"""A private Kademlia on ``/atoll/kad/1.0.0``, wire-compatible with libp2p's kad-dht, with our own server and query engine.

records   signed, expiring, owner-bound values; run keys
routing   distances and the routing table
store     what a node keeps for others: providers and values, bounded
wire      protobuf messages on varint-prefixed streams (names libp2p)
server    answers requests
channel   one persistent, pipelined stream per peer for requests
query     iterative lookups: hedged, with early stop
node      Dht: put, get, provide, find_providers
"""
