"""`attach` inside other people's training loops. Each file needs an extra of its own, and is loaded
when its name is used.

trainer    AtollCallback: transformers' Trainer
lightning  AtollLightningCallback: Lightning's Trainer
loaders    the order of samples, and how many a batch has
"""
