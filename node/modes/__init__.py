"""Modes of a run: what some runs ask for, behind doors of `atoll.node.session`.

choosing      which modes a run's settings ask for, for whoever makes its sessions
operations/   free-standing operations
distances     how far contributions lay from results, where the rule goes by it
btard/        rounds whose contributions follow from public seeds
secure/       rounds whose contributions are masked
recertifying  the organiser's word that members are lost for ever: checked, and how far it is
"""
