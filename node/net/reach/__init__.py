"""How a node finds out whether it can be reached, and is reached where it cannot. Lowest first:

protobuf   small messages of numbered fields on a stream
routes     whether a private address is in our house
natpmp     NAT-PMP's datagrams
upnp       UPnP's texts
portmap    asking the router for a port
manager    the address manager: what is known of our addresses, what is told
ledger     what a relay has promised, and its limits
circuit    the messages of circuit relay v2
relay      being a relay
circuits   using relays
autonat    asking to be dialled back, and doing it for others
punch      from relayed to direct: hole punching
reach      the driver of all that
"""
