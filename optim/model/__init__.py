"""The model as one float32 vector. Files, lowest first:

frozen      what lies frozen under what is trained: one digest
buffers     how each buffer takes part: averaged, compared, or a member's own
traits      what changes the function beside tensors: an adapter's scale, a norm's epsilon
flat        the vector: parameters and running statistics, in segments, from any device
tensor_file a safetensors file, written from where its tensors lie
card        what an export needs beside the anchor: in the run's folder
adapter_names   PEFT's saved names of live tensors
pseudograd  anchor - parameters, into the shared buffer: what a member contributes
momentum    worker momentum: running means in place of contributions
feedback    what a codec loses of it, carried into the next one
factors     which parameters are factors of an adapter
registry    where the modes are that a script's side asks for: one row each
accuracy    what a round with a wished error really loses
reconcile   what live parameters become after a commit, or while one is under way
"""
