"""Manifests to start from, by name: `atoll new --template NAME` prints one."""

from __future__ import annotations

FEDERATED_HOSPITAL = """\
# Several hospitals train one model; patients' data stay where they are.   atoll new run.toml
# Who can see what of whom, in plain words:   atoll validate run.toml --explain
# A site takes part with:   atoll join INVITE --script train.py --data site.py:make
# (docs/federated.md: "A site's data")
# Who takes part is in no DHT with:   atoll up --no-dht   and a firewall that lets out web ports
# only is no hindrance (docs/operating/networks.md)
schema = 1
name = "hospitals"
description = "say here what is trained, on what, and who answers for it"
contact = "somebody@hospital.example"
mode = "federated"

[model]
entry = "local:hospitals"          # every site runs the same script, with the same model, on its
                                   # own data

[data]
source = "local"                   # what a function in a file of each site's own returns; no sample
                                   # ever leaves the site

[train]
sync_every = 50                    # inner steps a round
rounds = 50                        # each spends of epsilon: atoll validate says how much, and
                                   # refuses more than the limit

[federated]
method = "fedavg"                  # fedavg | fedavgm | fedadam | fedyogi | fedadagrad
topology = "serverless"            # or "coordinator": one site adds up (masked) contributions

[secure]
threshold = 4                      # nobody, the organiser included, sees more than a sum of so many
                                   # sites; fewer, and the round waits

[privacy]                          # bounds what all data of one site can show through; with few
                                   # sites its noise drowns what they learn: atoll validate
                                   # --explain --peers N says how large it is, and atoll simulate
                                   # run.toml --task task.py:hospitals --clients 20 what can be
                                   # learnt under it (scripts/examples/hospital). Without [privacy]
                                   # contributions are masked all the same
noise = 5.0
clip = 1.0                         # largest norm of a site's contribution; look at usual norms in a
                                   # trial on public data
delta = 1e-5
stop_at_epsilon = 12

[join]
policy = "invite"                  # better, once all have run atoll id:  policy = "allow"  and
                                   # allow = ["PEER", "PEER"]

[checkpoint]
every = 1
"""

LORA = """\
# An adapter (LoRA) of a model that all members have.   atoll new run.toml
# In the script, the same at every member (docs/adapters.md):
#     model = AutoModelForCausalLM.from_pretrained(NAME, revision=REVISION)
#     torch.manual_seed(1337)               # lora_A is drawn here, and must be the same everywhere
#     model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
#     attachment = attach(model, optimizer, join(), batch_size=8)
schema = 1
name = "my-adapter"
description = "say here which model, in which revision, and what it learns"

[model]
entry = "local:my-adapter"         # every member runs the same script, with the same frozen model
init = "seed:1337"                 # what the script gives to torch.manual_seed

[data]
source = "local"

[adapters]
mode = "ffa"                       # B trains, A is frozen: the mean is that of the products, with
                                   # any outer step. "alternate": A and B by rounds, without
                                   # momentum. "plain": both; a biased mean
base = "values"                    # "shapes" where members hold the model in other precisions
                                   # (QLoRA): names and shapes are compared, values are not

[train]
sync_every = 50                    # inner steps a round
rounds = 100                       # where the run ends

[evaluate]                         # with attach(…, evaluate=): members are told when averaging
                                   # does not help (docs/presets.md)

[exchange]
codec = "int8_dither"

[checkpoint]
every = 1
"""

TEMPLATES = {"federated-hospital": FEDERATED_HOSPITAL, "lora": LORA}
