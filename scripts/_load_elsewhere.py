"""Loads folders by transformers and peft in an environment that has no atoll, for
check_architectures.py: `python -I -S _load_elsewhere.py` with one JSON object on stdin.

packages  the folder of the environment's packages
ids       token ids, rows of equal length
jobs      [name, folder of a whole model, folder of an adapter or null, dtype or null]
out       a safetensors file of float32 logits (rows, tokens, vocabulary) by name
Prints one JSON object: the tokens that each goes on with, the likeliest every time.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import warnings
from typing import Any

GREEDY = 16


def main() -> None:
    """Load, compute, print."""
    given: dict[str, Any] = json.load(sys.stdin)
    sys.path.append(given["packages"])
    import torch
    import transformers
    from safetensors.torch import save_file

    assert importlib.util.find_spec("atoll") is None
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    ids, logits, said = torch.tensor(given["ids"]), dict[str, Any](), dict[str, Any]()
    for name, whole, adapter, dtype in given["jobs"]:
        # Folders of this machine: nothing is downloaded.
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(  # nosec B615
            whole, dtype=dtype or "auto", local_files_only=True
        )
        if adapter is not None:
            import peft

            model = peft.PeftModel.from_pretrained(model, adapter)
        with torch.no_grad():
            model.eval()
            logits[name] = model(input_ids=ids, use_cache=False).logits.float().contiguous()
            out = model.generate(input_ids=ids[:1], max_new_tokens=GREEDY, do_sample=False)
        said[name] = out[0, ids.shape[1] :].tolist()
    save_file(logits, given["out"])
    print(json.dumps(said))


if __name__ == "__main__":
    main()
