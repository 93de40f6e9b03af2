"""Functions of papers that no run of atoll imports, for scripts of your own. README.md has, for
each, the paper, when to use it, and who calls it.

    from atoll.optim.lab.coding import GradientCode

coding     exact sums of gradients although machines straggle, or some lie
experts    clusters of the data, and one model of a router and an expert for each
gossip     training in pairs, without a shared anchor
pipeline   SkipPipe: which stages of a pipeline each microbatch visits
recovery   CheckFree: a lost stage of a pipeline, from its neighbours
schemes    any graph of who sends to whom: checked, and compiled to a plan that atoll has
"""
