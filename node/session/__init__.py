"""One run at one member, sans I/O. Driven by the node with sockets and threads, by the simulator in
virtual time.

durations       how long rounds may take, of nodes and of simulated fleets
events          what a session tells its script and its observers
mode_events     what modes tell them
documents       them as subscribers, files and pages get them
barrier         what is said waits until what it depends on is on the medium
ports           the seams to its driver: data plane, storage, SessionPorts
replica         anchor generations and momentum; the outer step of a decided entry
memory_storage  Storage in memory
transfer        fetching results and states from other members, chunk-verified
requests        which chunks of one content are asked of which source
race            whether another member's state would be here sooner than the one that is coming
serving         answering other members, from copies
timeline        where the time of a reduction goes
actions         what the log's state machine asks of the session
record          what members have signed of contributions
retaining       what is kept and signed to recompute a round
log_settings    what a run's settings say of one log
watches         the doors of what only watches: histories, votes, statements, times
modes           what stands at the doors of a session
other_logs      the door of logs beside the run's
measures        the door of what a rule learns over rounds
shapes          the shape of a log, by the names of codec and reducer
pre_round       the seam to what members do together before anything is given to the log: secure
                rounds, BTARD
copies          results that members make themselves, where all contributions are copies of one
                vector
contribution_queue   contributions of the script, in order, until they are taken
recertification  the door at which a mode lets a run go on without a quorum
prior_contributions  what became of contributions of an earlier life
checkpoints     when the state is written to disk, and which results are kept
installing      a fetched state replaces the own one
waiting         what a member waits for, and when it says so
equivocation    who votes for two values of one ballot: the proof
budgets         what one peer may ask of this node
admission       who may contribute, and who may become a member
peer_selection  whom to ask
histories       who is on another history of the run, and where it parts from ours
beginning       the genesis; a state brought to the end of the log; whose model it is
tallies         what the log says of the data, for scripts
calls           what a script may call beside rounds
composing       which modes a run's settings ask for
terms           what a session is made of, but for its driver
session         Session: all of it tied together
fragments       a run cut into fragments: a session for each, one membership; `whole_of`: a run in
                one piece or in several
"""

from .ports import ContentPlane, DataPlane, SessionPorts, Storage
from .replica import ModelReplica, PlainSlots
from .session import Session

__all__ = [
    "ContentPlane",
    "DataPlane",
    "PlainSlots",
    "ModelReplica",
    "Session",
    "SessionPorts",
    "Storage",
]
