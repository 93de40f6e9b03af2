"""The node's own work: it drives sessions with sockets, threads, files and clocks. The network,
manifests, screens and modes are given to it (`node.composing`).

outside      what it is given, as seams
lanes        which lanes a node keeps open
context      what all runs of a node share
buffers      memory for results of free-standing operations, used again
refusals     peers that do not let us in: a member's verdict, a stranger's words
troubles     what is wrong with a run, and how an exception becomes a coded error
asking       whom a newcomer asks for a run's manifest, and when
facts        how a run stands at this node
reactions    what an event of a session means for its run
ports        SessionPorts over libp2p streams, the engine thread, files and worker threads
subscribers  who is told of events, and what the slow miss
bans         who is banned: handed on, enforced
pausing      whether a run's script trains: its owner's word, and hours of the day
starting     whether a run's first round waits for members
run          RunService: one run
reductions   free-standing reductions of a script
scripts      AttachedScript: the node's side of a script's Swarm
node         Node: implements the control socket's NodeService
"""
