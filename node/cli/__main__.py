"""``python -m atoll.node.cli``: the same as ``atoll``."""

from . import main

main()
