"""The peer-to-peer network of a node, on libp2p and trio. Only the node process imports it. Lowest
first:

transport/     addresses, the libp2p host, streams, sockets of lanes: what the others stand on
lean           libp2p without the native libraries that a node does not use
echoes         whether a peer reads what we say to it
look           a run's manifest, shown before one is in it
reach/         where we can be dialled; relays and hole punching where we cannot
lan/           peers in the same house, by multicast DNS
dht/           the private Kademlia: records, store, server, query engine without I/O, its driver
bootstrap      finding the first peers, for as long as it takes
announcements  signed announcements of members, and the registry of them
rendezvous     the members of a run, known to all of them
wires          connections for control messages, in place of libp2p streams
greeting       what is said when a message stream opens
outbox         what waits for one peer, and the stream or wire it goes out on
streams        persistent message streams per (peer, topic)
through/       ways through routers: observers, punching, the relay
bridge         a libp2p stream that plays the part of a socket
retry          when a roundabout lane is tried again for a direct one
lane_talk      what two peers say to each other about a lane
lane_routes    one lane is made: dialled, punched or relayed
lanes          direct TCP connections for bulk data, negotiated over libp2p
measuring      whose clock is right, how fast bytes go: asking a peer
network        PeerNetwork: all of it behind one object
"""
