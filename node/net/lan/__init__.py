"""Peers on the same network find each other without anybody's address. Lowest first:

mdns        the few messages of multicast DNS that libp2p's discovery uses
neighbours  what is asked, answered and believed, and how often; no I/O
discovery   the driver: one socket on the interface of the house
"""
