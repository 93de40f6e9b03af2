"""What a run is beside its manifest: who may enter, who is kept out, who is there, how it goes.
Lowest first:

capability, invite   what the organiser signs, and the line that hands it on
standing, entrants   what got this node in, and by which invites others came
signing, proof, evidence   the domain of signatures; what is handed on of a lie, and proves
banning              who is kept out
gate, doors, inner_doors   who is let in; by what peers enter the log's configuration
same_order           which members read the same data in the same order
partners, hearsay, hearing   who beats to whom in a large run; what partners say of the others;
                     what membership asks of that
membership_records, membership   who is in the run, where, and alive
gain, rate           how much sooner the run is with this machine, and than it alone; how much all
                     and each train on in a second
registry             where the modes are that a node asks for: one row each
quorum               whether enough are, for people and tools
events               what happened: each kind of event, from its place to its line for people
status               what a node says of a run, and the figures that people see
diary, duty, verdicts, clocks   what happened, on disk; whether this machine does its part; what is
                     wrong over many rounds; what peers say of this machine's clock
"""
