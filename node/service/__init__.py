"""The node process's own work: it drives sessions with sockets, threads, files and clocks.

lanes        which lanes a node keeps open
context      what all runs of a node share
buffers      memory for results of free-standing operations, used again
refusals     peers that do not let us in: a member's verdict, a stranger's words
troubles     what is wrong with a run, and how an exception becomes a coded error
links        what a node says of its connections
announced    the certificates of announcements, read for the network
asking       whom a newcomer asks for a run's manifest, and when
ports        SessionPorts over libp2p streams, the engine thread, files and worker threads
phases       how far each reduction is at this node, for subscribers
rates        how fast bytes went to and came from each peer of late
timings      where the time of each reduction went, for subscribers
disk         how many bytes a run takes on disk
chronicle    what happened in a run: published, and kept for its status
subscribers  who is told of events, and what the slow miss
bans         who is banned: handed on, enforced
waiting      what a run waits for, as a document
obituary     how a script's process ended
presence     whether this machine's script is there: noted, published
idle         a script that joins and attaches nothing, or attaches and contributes nothing
standstill   a script that is attached, lives, and makes no step any more
pausing      whether a run's script trains: its owner's word, and hours of the day
judging      verdicts on a run: published, kept, told to the owner's command
starting     whether a run's first round waits for members
views        a run as documents for people and tools
run          RunService: one run
reductions   free-standing reductions of a script
scripts      AttachedScript: the node's side of a script's Swarm
node         Node: implements the control socket's NodeService
showing      runs founded here that nobody has joined, shown to who holds an invite
preview      a run's manifest, seen by a process that is no node and no member
process      the process: start, signals, parent, clean end
"""
