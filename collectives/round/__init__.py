"""The round and its decision: one log entry per outer step. Sans I/O.

timing        every duration, with its reason
entering      by what peers enter, and whom limited invites have let in
log           the decided entries: the newest in memory, every other read where it is kept
journal       the Journal seam: what a member must not forget; MemoryJournal
certificate   what votes sign; checking a chain of entries
signed        what is signed where members may lie
state         volatile state of the open round, shape of the vector, the actions a machine asks for
returning     what a process may have forgotten that was started again, and who can tell
patience      how long a reduction may take, from measured rates
gathering     when a round that does not wait for everybody has what it waits for
dynamic_steps DyLU: how many inner steps each member makes, by what the log says
grouping      FedCompass: groups whose contributions are a round, by what the log says
sampling      who takes part in a round of a run that asks some of its members only
relays        the grid over which news of a round goes in large configurations
routes        the trees of a plan, who holds one up, who disputes a sum
blame         which owners of parts held up reductions, over rounds
acceptor      the seam at which a fault model changes how an acceptor takes part
convener      the convener's side: collect, plan, revise, propose
sealing       without a quorum for ever: the organiser seals the round and signs its entry
judge         where some members may be Byzantine: whether a proposal is justified by what
              others have signed
byzantine_acceptor    there the acceptor's side: claims, turns, pledges, echoes, votes
byzantine_convener    there the convener's side: shows why its proposal is the one it may make
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
from .entering import OPEN, Doors, InviteTally
from .journal import Journal, MemoryJournal, SealRecord
from .log import MOST_SAMPLES, RECENT, SPAN, Log, rounds_in, samples_in
from .machine import RoundMachine
from .relays import RELAYED_ABOVE
from .returning import LastSaid
from .sampling import drawn
from .sealing import Sealing, gone
from .signed import Kind, claim_payload, pledge_payload, reduced_payload, slot_payload
from .state import KIN_BYTES, OpenRound, RoundActions, Shape
from .timing import Timing

__all__ = [
    "KIN_BYTES",
    "Convener",
    "Doors",
    "LastSaid",
    "Journal",
    "Kind",
    "Log",
    "MOST_SAMPLES",
    "MemoryJournal",
    "OPEN",
    "RECENT",
    "RELAYED_ABOVE",
    "SPAN",
    "OpenRound",
    "Phase",
    "RoundActions",
    "RoundMachine",
    "SealRecord",
    "Sealing",
    "Shape",
    "InviteTally",
    "Timing",
    "check_log",
    "claim_payload",
    "check_genesis",
    "drawn",
    "genesis_payload",
    "gone",
    "pledge_payload",
    "reduced_payload",
    "rounds_in",
    "samples_in",
    "seal_payload",
    "sealed_payload",
    "slot_payload",
    "vote_payload",
]
