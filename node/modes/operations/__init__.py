"""Free-standing operations: logs of one entry over the configuration of a run, behind
`atoll.node.session.other_logs`.

naming      names of operations: what all their callers must agree in
volatile    the journal of operations' logs, which is not kept
beside      what operations' logs ask of the session
operation   one operation
operations  all of them
"""
