"""What a node notes of its runs for people and tools: events, verdicts, status. Nothing here
decides what a run does. Lowest first:

waiting    what a run waits for, as a document
disk       how many bytes a run takes on disk
phases     how far each reduction is at this node, for subscribers
timings    where the time of each reduction went, for subscribers
rates      how fast bytes went to and came from each peer of late
links      what a node says of its connections
silence    why nobody answers who asks for a run's manifest
obituary   how a script's process ended
presence   whether this machine's script is there: noted, published
idle       a script that joins and attaches nothing, or attaches and contributes nothing
standstill a script that is attached, lives, and makes no step any more
script     ScriptWatcher: all of that for one run
judging    verdicts: published, kept, told to the owner's command
chronicle  what happened in a run: published, and kept for its status
watcher    RunWatcher: all of it for one run, as the service tells it
views      a run as documents
calls      the calls of the control socket that only look
"""
