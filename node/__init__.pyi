# What scripts import of atoll.node, for type checkers: the package loads a name when it is used.

from .home.own_data import SiteData, example_ledger, site_data
from .joining import NodeClient, RunSwarm, join

__all__ = [
    "join",
    "site_data",
    "example_ledger",
    "NodeClient",
    "RunSwarm",
    "SiteData",
]
