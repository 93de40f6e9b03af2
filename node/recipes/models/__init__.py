"""Pretrained models: found, bound by their files, loaded. transformers and peft are loaded when
they are used, and not before. Bottom up:

libraries   whether they are installed, and which are refused beside them
files       which files make a model, which are refused, digests, links
hub         the model hub, asked by its own client with the user's own cache
gguf        one GGUF file made a folder, once
tokens      what a tokenizer does, as digests
shapes      how many parameters a model has, of what config.json says
sizing      how much memory a step of training takes, by the shape
counting    the same, counted by a step on the meta device
finding     what a founder finds out of a model before she signs a manifest
bringing    a member's own copy, compared with what the manifest says
loading     the model and its tokenizer, with adapters, ready to train
merging     an adapter merged into its base
chatting    the answers of an exported model
"""
