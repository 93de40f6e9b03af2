"""Modes of a log: what some runs ask for, behind doors of `atoll.collectives.round`. The kernel
works without this folder.

arrivals     ArrivalPolicy: rounds that do not wait for everybody
byzantine    FaultModel: some members may do anything
site_ledger  SiteNames: one key a name, and what a lost disk may have spent
sealing      RoundSeal: without a quorum for ever the organiser seals the round, signs its entry
relays       Dissemination: in a large configuration the news of a round goes over a grid of members
"""
