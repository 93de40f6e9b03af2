"""BTARD in a node: its state machines (`security.btard`) beside a session, over control messages
and lanes. Sans I/O.

A round of a run with ``[btard]`` is a step of BTARD, and then an entry of the log. The peers that
the manifest names compute vectors from public seeds, in their scripts; the aggregate, once it is
verified, is the same at all of them, and each gives it to the log as its contribution: a copy of
one vector. No bytes of it travel again, and nobody votes for another. Who is removed on evidence is
banned with it.

wire      frames of BTARD as control messages, and offers of vectors
vectors   vectors on their way over lanes
tasks     vectors that are asked of the script
results   the aggregate of a step, as plans and entries of the log say
rounds    a session's part: inputs for the peer, what it asks of others, what the log is given
"""
