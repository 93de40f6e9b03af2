"""A member's rounds. Files, lowest first:

schedule   when a round ends, what counts as a step, how long a script waits
events     what attach tells telemetry
outliers   whether a member's own progress is one, and is not contributed
way_back   whether what was trained leads back to an earlier anchor, and is not contributed
slow       whether waiting for this member costs the others more than it brings
replica    live parameters between two anchors: freeze, wait, adopt, or train on meanwhile
gradients  a replica that contributes gradients instead of progress
site       a replica whose method corrects inner steps, or whose member keeps something for itself
arriving   a replica of runs whose rounds do not wait for everybody
grouped    one of runs whose members come in groups, each with as many steps as let it
strand     a replica with its schedule; one a fragment of the model
"""
