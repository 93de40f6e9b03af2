"""The smallest run of the built-in recipe: a few seconds of training on one core."""

TINY = """
schema = 1
name = "tiny"
[model]
config = { width = 32, layers = 1, heads = 2, context = 16 }
[train]
sync_every = 10
rounds = 6
[train.inner]
steps = 60
lr = 0.01
batch = 8
[train.outer]
lr = 0.9
momentum = 0.6
[checkpoint]
every = 1
"""
