"""Secure rounds: what a round's members contribute is masked, and nobody sees more than the sum.
Sans I/O, beside a session.

A round of a run with ``[secure]`` has three parts. The members who contribute agree on masks; a
free-standing operation adds the masked words up, so that the run's own consensus decides whose are
in the sum, once; and with shares from enough of those the masks are taken off the sum. What comes
out, the mean, is the same at all of them, and each gives it to the run's log as its contribution: a
copy of one vector. So log, results, state transfer and restarts are those of any run, and never
hold a member's own vector.

wire      what members tell each other of a masking, bounded
vectors   a vector on its way into a sum: bounded, with noise, as whole numbers
bound     what a vector's norm is bounded by, where that follows a quantile
budget    what has been spent of a member's privacy
spending  what a site has given over all its lives, and may give yet
evidence  what proves that a dealer's shares do not fit
masking   one attempt at it: who has said what, what is missing
results   the mean that was unmasked, as plans and entries of the log say
rounds    a session's part: attempts, the operation, what the script is told
simulated what comes out of them, for simulations without sessions
"""
