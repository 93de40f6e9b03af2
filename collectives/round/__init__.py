"""The round and its decision: one log entry per outer step. Sans I/O.

timing        every duration, with its reason
entering      by what peers enter, and whom limited invites have let in
entrance      who asks to enter a log, and whom the next entry may let in
site_names    the door at which a mode gives members names, to count their privacy
log           the decided entries: the newest in memory, every other read where it is kept
journal       the Journal seam: what a member must not forget; MemoryJournal
certificate   what votes sign; checking a chain of entries
own_results   the door at which a mode has members make a round's result themselves
state         volatile state of the open round, shape of the vector, the actions a machine asks for
returning     what a process may have forgotten that was started again, and who can tell
raises        whose later ballots came to nothing
recovery      what such a process asks before it votes, and as which life it goes on
catching_up   whoever lags asks for decided entries, and others answer
patience      how long a reduction may take, from measured rates
arrival_policy   the door at which a mode changes whom a round waits for
turns         until when a round waits for the work of all who take part
thin          which members' links are so thin that they are in every n-th round
sampling      who takes part in a round of a run that asks some of its members only
dissemination the door at which a mode changes how the news of a round travels
routes        the trees of a plan, who holds one up, who disputes a sum
acceptor      the acceptor's side: promise, accept, vote
faults        the door at which a mode changes which faults of members a round bears
convener      the convener's side: collect, plan, revise, propose
seals         the door at which a mode ends a round that a quorum will never end
log_modes     what stands at all these doors of one log
machine       RoundMachine: the whole life of a round at one member. Start to read here
"""

from .certificate import (
    check_genesis,
    check_log,
    genesis_payload,
    seal_payload,
    sealed_payload,
    vote_payload,
)
from .convener import Convener, Phase
from .dissemination import Dissemination, DisseminationMaker, everybody
from .entering import OPEN, Doors, InviteTally
from .journal import Journal, MemoryJournal, SealRecord
from .log import MOST_SAMPLES, RECENT, SPAN, Log, rounds_in, samples_in
from .machine import RoundMachine
from .returning import LastSaid
from .seals import gone
from .state import KIN_BYTES, OpenRound, RoundActions, Shape
from .timing import Timing

__all__ = [
    "KIN_BYTES",
    "Convener",
    "Dissemination",
    "DisseminationMaker",
    "Doors",
    "LastSaid",
    "Journal",
    "Log",
    "MOST_SAMPLES",
    "MemoryJournal",
    "OPEN",
    "RECENT",
    "SPAN",
    "OpenRound",
    "Phase",
    "RoundActions",
    "RoundMachine",
    "SealRecord",
    "Shape",
    "InviteTally",
    "Timing",
    "check_log",
    "check_genesis",
    "everybody",
    "genesis_payload",
    "gone",
    "rounds_in",
    "samples_in",
    "seal_payload",
    "sealed_payload",
    "vote_payload",
]
