"""Fine-tuning a causal language model of transformers: from a file of records to steps of `attach`.
Files, lowest first; whoever writes a recipe of their own reads `loop` first.

records     records as they lie in files, each with its file and line
samples     what a record says: a conversation, or a passage behind a prompt
rendering   samples as tokens, and which of them are learned
preparing   all records read once: what is wrong refused, the rest as tokens on disk
packing     documents into rows and micro-batches that do not see one another
keeping     what a machine keeps to go on where it stopped
sharding    one member on several cards: FSDP2, and what is added up or done by the first
losses      the loss as an exact sum, without logits of what is not learned
feeding     which documents come next: one's own, or those that are leased
optimizing  the inner optimizer, also one that steps in backward
loop        the training loop, alone or as a member
reporting   what the loop says, shown by the node, and kept for the card of an exported model
measuring   what a step takes on this machine, with random weights
train       from a file and a model to a ``final`` record
launching   a process a card, which end together

``python -m atoll.node.recipes.finetune`` is the loop attached to a run.
"""
