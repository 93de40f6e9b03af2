"""Built-in recipes: what ``atoll join`` and the demo train. Bottom up: data, gpt, loop, train,
simulated; finetune in a folder of its own.

data    bytes to train on: the text that ships with Python, or a file or folder of one's own
gpt     a byte-level GPT
loop    the training loop and the evaluation, without any network
train   the loop attached to a run: ``python -m atoll.node.recipes.train``
simulated  what ``atoll simulate`` trains

    finetune/   fine-tuning of language models of transformers
"""
