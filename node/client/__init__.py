"""The script's side of the node: blocking, without trio and libp2p; torch only where tensors are
touched. `node.joining` puts it together.

* eager        getting the interpreter soon while others compute in Python
* link         one connection: requests, answers, descriptors, pushes
* reclaiming   memory of decided contributions goes back to the system
* memory       the mappings of an opened run, and the views of its anchor
* shared       tensors that the node reads where they lie: `Swarm.buffer`
* shelf        where a script keeps what is its own in a run
* seeded       what the node asks for by seed
* pending      what `contribute` and `all_reduce` return
* farewell     how a script ended, for its node
* swarm        RunClient: what a script asks of a run; survives its node
* reattach     how it gets a node again
* starting     waiting for the members that a run is to begin with
"""
