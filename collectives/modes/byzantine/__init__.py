"""Byzantine quorum: some members of a configuration may do anything, and the log stays one. Behind
`atoll.collectives.round.faults`; docs/internals/protocol/byzantine.md.

model     Byzantine, the fault model: what a log is given
acceptor  the acceptor's side: claims, turns, pledges, echoes, votes
convener  the convener's side: shows why its proposal is the one it may make
judge     whether a proposal is justified by what others have signed
receipts  what members have signed of what they contribute, where parts have witnesses
missums   sums that are stated differently: who is in dispute, and who is proved to be wrong
blame     which owners of parts held up reductions, over rounds
signed    what members sign
"""
