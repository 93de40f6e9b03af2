"""What a folder that `atoll export` wrote says of texts, in a process that knows nothing of atoll:
transformers and peft alone load it. Prints one JSON object.

    _finetune_loss.py loss    FOLDER BASE TEXT PART summed nll and tokens of a part of its windows
    _finetune_loss.py logits  FOLDER BASE TEXT      sha256 of the float32 logits of its first tokens
    _finetune_loss.py compare FOLDER BASE OTHER     distance of logits, and whether greedy texts are
                                                    equal, of an adapter's folder and a merged one
BASE is `-` where FOLDER holds a whole model, and FOLDER is `-` for the base alone.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

WINDOW, MOST, ROWS, FIRST, GREEDY = 256, 204, 8, 64, 32
PARTS = 4  # of equal rows, which several processes may read
PROMPTS = ("What does the with statement do?", "Explain Python's yield.", "What is a slice?")


def load(folder: str, base: str, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """A model, in the type of its files or in ``dtype``, and its tokenizer."""
    import transformers

    # Folders of this machine: nothing is downloaded.
    whole = folder if base == "-" else base
    model = transformers.AutoModelForCausalLM.from_pretrained(  # nosec B615
        whole, dtype=dtype or "auto", local_files_only=True
    )
    if "-" not in (folder, base):
        import peft

        model = peft.PeftModel.from_pretrained(model, folder)
    named = whole if folder == "-" else folder
    words = transformers.AutoTokenizer.from_pretrained(named, local_files_only=True)  # nosec B615
    return model.eval(), words


def windows(tokenizer: Any, file: str) -> torch.Tensor:
    """The text as `MOST` rows of `WINDOW` tokens at most."""
    ids = tokenizer(Path(file).read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    rows = min(MOST, len(ids) // WINDOW)
    return torch.tensor(ids[: rows * WINDOW]).view(rows, WINDOW)


def loss_of(model: Any, rows: torch.Tensor) -> dict[str, Any]:
    """Sums over all tokens but the first of each window, in float64."""
    nll, tokens = 0.0, 0
    for part in rows.split(ROWS):
        logits = model(input_ids=part).logits[:, :-1]
        each = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), part[:, 1:].flatten(), reduction="none"
        )
        nll += float(each.double().sum())
        tokens += each.numel()
    return {"tokens": tokens, "nll": nll, "loss": nll / tokens}


def logits_of(model: Any, tokenizer: Any, prompt: str) -> torch.Tensor:
    """Of a question as the template writes it."""
    asked = [{"role": "user", "content": prompt}]
    given = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    return model(input_ids=given["input_ids"]).logits[0].float()


def greedy(model: Any, tokenizer: Any, prompt: str) -> str:
    """The likeliest answer."""
    asked = [{"role": "user", "content": prompt}]
    given = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    out = model.generate(**given, max_new_tokens=GREEDY, do_sample=False)
    return tokenizer.decode(out[0, given["input_ids"].shape[1] :])


def compare(folder: str, base: str, other: str) -> dict[str, Any]:
    """An adapter on its base beside the merged model."""
    (model, tokenizer), (merged, _) = load(folder, base), load(other, "-")
    apart = list[float]()
    for prompt in PROMPTS:
        mine, theirs = (logits_of(each, tokenizer, prompt) for each in (model, merged))
        apart.append(float((mine - theirs).norm() / mine.norm()))
    texts = [[greedy(each, tokenizer, prompt) for prompt in PROMPTS] for each in (model, merged)]
    return {"relative": max(apart), "same_text": texts[0] == texts[1], "texts": texts[0]}


@torch.no_grad()
def main() -> None:
    """The command line above."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    what, folder, base, rest, *part = sys.argv[1:]
    if what == "compare":
        found = compare(folder, base, rest)
    else:
        # twice as fast; the loss of 1,020 random tokens was 0.99993 of that in float32
        model, tokenizer = load(folder, base, torch.bfloat16 if what == "loss" else None)
        rows = windows(tokenizer, rest)
        if what == "loss":
            found = loss_of(model, rows.chunk(PARTS)[int(part[0])])
        else:
            logits = model(input_ids=rows[:2, :FIRST]).logits.float().contiguous()
            found = {"sha256": hashlib.sha256(logits.numpy().tobytes()).hexdigest()}
    assert not [name for name in sys.modules if name.startswith("atoll.")]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
