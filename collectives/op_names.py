"""What the names of operations may be, for those that only pass them on."""

OWN_NAME = (
    'an op_id serves once in the life of a run: op_id=numbered(swarm, "loss") counts, also from '
    "one start of the script to the next; or put something into it that all members have alike and "
    "that differs at each start, such as swarm.anchor().round"
)
"""What to do about a name that was used before."""
LARGEST_NUMBER = 10**12 - 1
"""Of an operation in a series (`series`)."""
