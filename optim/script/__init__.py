"""What a training script holds. Files, lowest first:

checks      what attach refuses, and why
state       what a checkpoint of an attachment holds, and resuming from it
attachment  attach(), the optimizer hook: a script's own loop becomes a member
diloco      DiLoCo as one torch.optim.Optimizer
local_sgd   plain averaging, likewise
"""
