"""Arrivals: rounds that do not wait for everybody, and members with a number of steps each. Behind
`atoll.collectives.round.arrival_policy`; settings in `atoll.collectives.arrivals`.

policy         PartialArrivals, the policy: what a log is given
gathering      when a round by count or by period has what it waits for
grouping       FedCompass: groups whose contributions are a round, by what the log says
compass        its schedule, of runs and of simulations
dynamic_steps  DyLU: how many inner steps each member makes, by what the log says
"""
