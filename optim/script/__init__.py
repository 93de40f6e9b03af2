"""What a training script holds. Files, lowest first:

checks              what attach refuses, and why
adoption            what adopting an anchor does to the losses that a script logs
lookout             who is there, and what the node is shown of training
evaluation          the held-out loss around an adoption, without disturbing training
saving              a model as its own state_dict(), or PEFT, saves it
keeping             what of it is left in the run's folder for exports
buffer_watch        buffers that differ between members, or are learnt by one
frozen              frozen parameters outside of the run that the script changes
training_parts      what is frozen or trained otherwise than at attach
silence             training that is seen and not counted: the rules
second_steps        steps on gradients that were stepped already
recurrence          whether changes of the weights are a habit of the script or an event
slots               which places of a model hold other tensors than those that were attached
weights             who changed the weights: a sample of them around each step
uncounted           sees what `silence` rules on, and contributions of zero, and says so
optimizer_state     tensors that an optimizer keeps beside the parameters
probe               asks an optimizer's class, on toys, whether it remembers where parameters were
consent             what it remembers: moved along with each adopted anchor, or named
state               what a checkpoint of an attachment holds, as numbers and strings
rates               what a learning rate does, and where it is when the run ends
step_times          how long steps take, for the node's verdicts on this machine
resume              saving strands and going on from them
schedules           how many steps a run has left, and whether learning-rate schedules end with it
attachment          attach(), the optimizer hook: a script's own loop becomes a member
tuning              a site's own model, fine-tuned from the anchor
diloco              DiLoCo as one torch.optim.Optimizer
local_sgd           plain averaging, likewise
gradient_averaging  one large batch, likewise
seeded              training that anybody can do again, for runs with BTARD
"""
