"""Ways through routers for lanes: simultaneous opens of both ends, and a relay where these cannot
work. Lowest first:

observing  how a port of ours is seen from outside: asked at public peers, answered to others
punch      when to dial which candidate, and why it came to nothing: a state machine
meeting    one port of ours, its listener and its dials, until a socket is authenticated
vouchers   who may send how many bytes through our relay: a state machine
splice     the thread that moves a relay's bytes
relaying   asking public peers for a relay, and serving as one
"""
