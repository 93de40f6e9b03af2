"""A member's rounds. Files, lowest first:

schedule   when a round ends, what counts as a step, how long a script waits
events     what attach tells telemetry
outliers   whether a member's own progress is one, and is not contributed
way_back   whether what was trained leads back to an earlier anchor, and is not contributed
slow       whether waiting for this member costs the others more than it brings
extras     the door of what changes or drops contributions
run_extras   what a run asks for there: residuals, momentum, outliers, ways back
replica    live parameters between two anchors: freeze, wait, adopt, or train on meanwhile
composing  which replica, vector and turns a run's settings ask for
again      how long the next round is, from what the log says of the last one
pacing     the door of rounds that are planned again, and of slow members
run_pacing   what a run asks for there
wait_budget  how long a script waits for a round
strand     a replica with its schedule; one a fragment of the model
fragments  the strands of a run
"""
