"""Modes of training: what some runs ask of a script, beside the plain replica of
`atoll.optim.rounds`.

site       a replica whose method corrects inner steps, or whose member keeps something for itself
arriving   a replica of runs whose rounds do not wait for everybody
grouped    one of runs whose members come in groups, each with as many steps as let it
gradients  a replica that contributes gradients instead of progress
privacy/   single examples, protected in a site's own inner steps
clusters   members by the direction of their updates, with names that stay
adapters   which of two factors of an adapter trains, and how far a mean of factors is off
"""
