"""The ground of atoll: seams, bytes, groups, rounds, reductions. Knows neither libp2p nor keys nor a network. Lowest first:

errors         AtollError and its tree; nothing else defines a public error
identifiers    PeerId, RunId, sizes of hashes
telemetry      typed events and one emit(); sinks subscribe
layout         what the flat vector means: names, shapes, offsets
swarm          the Swarm seam: what a training script sees; no implementation
group          members, configurations, quorums, plans, log entries: frozen values
messages       the round's control messages: typed, bounded
codecs/        the formats of encoded values
codec          a chunk of float32 values and its wire bytes, named; the grid of a vector's chunks
encoded        a whole vector of such chunks
digest         hashes of chunks, parts and states
partition      one vector, parts per member
reduce         the Reducer seam in four forms: mean, sum, maximum, modular sum, copies
record_layer   authenticated records for lanes
exchange/      the data plane of a round; sans I/O
engine/        one thread that runs an exchange over real sockets
round/         the round and its decision; sans I/O
simulation/    virtual time, an in-memory network, faults and traps
"""
