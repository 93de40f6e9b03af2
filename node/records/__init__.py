"""What is left of a run on disk, read by people who need not take part: nothing here needs a node.
Lowest first:

contents     what an exported folder holds
model_card   the README.md beside it: run, base, licence, who and how long, evaluation
sharding     weights in several files, with an index
export       the model of a run as files that load without atoll
beginnings   a run that goes on from what was exported
audit        the log checked and handed over
figures      what comes of looking at kept contributions
recompute    a committed round computed again from contributions that were kept
"""
