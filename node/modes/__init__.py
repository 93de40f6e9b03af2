"""Modes of a run: what some runs ask for, behind doors of `atoll.node.session`.

operations/   free-standing operations
distances     how far contributions lay from results, where the rule goes by it
btard/        rounds whose contributions follow from public seeds
secure/       rounds whose contributions are masked
splitting     clusters of a run's members, for a run of each
leaning       whose contributions keep pointing one way over many rounds
byzantine     what proves that a member has stated a false sum
recertifying  the organiser's word that members are lost for ever: checked, and how far it is
"""
