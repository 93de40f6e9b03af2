"""Manifests to start from, by name: `atoll new --template NAME` prints one."""

from __future__ import annotations

import json
import re
from pathlib import Path

from ...collectives.errors import ConfigError

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
kind = "federated"

[model]
entry = "local:hospitals"          # every site runs the same script, with the same model, on its
                                   # own data

[data]
source = "local"                   # what a function in a file of each site's own returns; no sample
                                   # ever leaves the site

[train]
start_with = 4                     # the first round waits for so many sites
rounds = 50                        # each spends of epsilon: atoll validate says how much, and
                                   # refuses more than the limit

[federated]
method = "fedavg"                  # fedavg | fedavgm | fedadam | fedyogi | fedadagrad | fedprox
work = { epochs = 1 }              # what a site does in a round, at its own pace; or
                                   # { steps = 100 }, which does not tell how large a site is
weights = "examples"               # a site counts by its examples, as its script says them:
                                   # attach(..., examples=N); or "equal"
topology = "serverless"            # or "coordinator": one site adds up (masked) contributions

[secure]
threshold = 4                      # nobody, the organiser included, sees more than a sum of so many
                                   # sites; fewer, and the round waits: of four none may be away, of
                                   # five or six one, of seven two
# max_weight = 1000                # needed without [privacy], where sites count by their examples:
                                   # as many as the largest site has

[privacy]                          # bounds what all data of one site can show through; with few
                                   # sites its noise drowns what they learn: atoll validate
                                   # --explain --peers N says how large it is, and atoll simulate
                                   # run.toml --task task.py:hospitals --clients 20 what can be
                                   # learnt under it (scripts/examples/hospital). Without this
                                   # table contributions are masked all the same
noise = 5.0
clip = 1.0                         # largest norm of a site's contribution; look at usual norms in a
                                   # trial on public data
delta = 1e-5
stop_at_epsilon = 12
most_examples = 1000               # a site of so many counts in full, one of 20 a fiftieth of that
normaliser = 3.0                   # the sum is divided by it: about what your sites count together

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

FINETUNE = """\
# A language model fine-tuned by several machines, each on its own file (docs/finetune.md):
#     atoll join run.toml --data chats.jsonl       founds the run and prints the others' invite
schema = 1
name = "finetune"

[model]
hub = "ORG/NAME"                   # with revision = "main"; or folder = "DIR", gguf = "FILE.gguf"
method = "lora"                    # "full": all of it trains; "qlora": on a base in four bits

[data]
source = "local"                   # each member's own: --data FILE of chats, pairs or text
length = 1024                      # tokens of a sample, at most

[train]
sync_every = 10                    # inner steps a round
rounds = 30                        # where the run ends
start_with = 2                     # the first round waits for so many members

[train.inner]
lr = 2e-4                          # with method = "full": 1e-5
steps = 300                        # length of the cosine: sync_every * rounds
tokens_per_step = 8192             # of each member

[evaluate]                         # members are told when averaging does not help
"""

PRETRAIN = """\
# A language model trained further by several machines, each on its own texts (docs/finetune.md):
#     atoll join run.toml --data FILE         founds the run and prints the others' invite
schema = 1
name = "pretrain"

[model]
hub = "ORG/NAME"                   # with revision = "main"; or folder = "DIR", gguf = "FILE.gguf"
method = "full"                    # weights in float32, 16 bytes each; "lora" takes far less

[data]
source = "local"                   # each member's own: --data FILE or a folder of texts
length = 2048                      # tokens of a piece
loss = "all"                       # every token is learned, of chats too

[train]
sync_every = 50                    # inner steps a round: all weights travel
rounds = 40                        # where the run ends
start_with = 2                     # the first round waits for so many members

[train.inner]
lr = 2e-5                          # with method = "lora": 2e-4
steps = 2000                       # length of the cosine: sync_every * rounds
tokens_per_step = 32768            # of each member

[evaluate]                         # members are told when averaging does not help
"""

_ADDRESS = re.compile(r"\A(https?://)?(huggingface\.co|hf\.co)/")
_ON_HUB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
MODEL_LINE = 'hub = "ORG/NAME"'


def with_model(text: str, model: str) -> str:
    """The template with this model: a folder or a GGUF file that exists, else a name on the hub, or
    its address; the run is called after it. Raises ConfigError for what is none of these.
    """
    path = Path(model).expanduser()
    if not path.exists():
        model = _ADDRESS.sub("", model).rstrip("/")
        if not _ON_HUB.fullmatch(model):
            raise ConfigError(
                f"there is no folder or file {model}, and no model on the hub is called so",
                key="--model",
                why="There it is ORG/NAME; a revision is written into run.toml.",
                hint="--model ORG/NAME, --model DIR or --model FILE.gguf",
                exit_code=2,
            )
    key = "gguf" if path.is_file() else "folder" if path.is_dir() else "hub"
    where = model if key == "hub" else str(path.absolute())
    name = re.sub(r"[^a-z0-9.-]+", "-", Path(model).name.removesuffix(".gguf").lower()).strip("-.")
    for purpose, ending in (("finetune", "tuned"), ("pretrain", "trained")):
        named = f'name = "{name[:54] or "model"}-{ending}"'
        text = text.replace(f'name = "{purpose}"', named, 1)
    head, _, rest = text.partition(MODEL_LINE)
    return f"{head}{key} = {json.dumps(where, ensure_ascii=False)}\n{rest.partition(chr(10))[2]}"


TEMPLATES = {
    "federated-hospital": FEDERATED_HOSPITAL,
    "lora": LORA,
    "finetune": FINETUNE,
    "pretrain": PRETRAIN,
}
