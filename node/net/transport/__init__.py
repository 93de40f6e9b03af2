"""What every part of the network stands on: addresses, the libp2p host, streams, sockets of lanes.
Lowest first:

dialable       which texts are addresses that another peer could dial
addresses      network addresses as text: parse, validate, list our own
packed         addresses as the bytes of libp2p's messages
liveness       whether the other end of a connection is still there
door           who may stay where there is no room for all who come
strangers      what all of them together are served, in streams, bytes and time
unread         bytes that came and that nobody has read, over all connections
peer_stream    a libp2p stream behind a small surface
allowance      how often something is done for a peer, or to a machine
workarounds    everything we do against faults of py-libp2p
dialling       connections made otherwise than by libp2p: from the listen port, through relays, at
               the same moment
host           the libp2p host behind a small surface
framing        frames on a byte stream: u32 length, payload, hard limits
peerbook       who is where; the cache file that spares a restart the bootstrap
faults         what peers do wrong, and who is shut out for it
backoff        retry delays that grow, with jitter
dnsaddr        names in addresses, and names that stand for peers
lane_sockets   the TCP side of lanes and wires: listener, dial, hello
"""
