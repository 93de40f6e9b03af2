"""A pretrained model's files, from member to member.

own          where this machine's own copy lies: its knowledge alone, never a message's
pieces       how a file is cut to travel
serving      what other members get of the own copy
fetching     files that this machine lacks, of other members
sharing      both, of one run
"""
