"""What a tokenizer does, as digests: two members whose tokenizers differ in any of them would train
on other numbers for the same text. Versions of libraries differ in this, too, with equal files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....collectives.errors import ConfigError
from .libraries import library, reading, versions

PROBE = (
    "Peers train together: 3.14159, 1,234,567 and 0x1F.\n\n"
    "\tdef f(x):\r\n        return x  # indented,  twice \n"
    "Zażółć gęślą jaźń; Größe; naïve façade; Ελληνικά; русский текст; "
    "עברית; العربية; हिन्दी; 日本語の文章；中文，标点。 한국어 "
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 "
    "\U0001f3f3\ufe0f e\u0301 \u00e9 \u200b\ufeff ﬁ ½ ①\n"
    "<s>[INST] user </s> <|im_start|>assistant<|im_end|> <|endoftext|> "
    "don't can't WE'RE I'd http://example.org/a?b=c&d=%20 a_b-c…—“quotes” 'single'   end "
)
"""Text in which tokenizers differ: scripts, numbers, spaces, what looks like a special token."""


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder. Raises ConfigError E415."""
    transformers = library("transformers")
    with reading(
        "the tokenizer of the run's model cannot be loaded",
        why=f"It is read by {versions()}.",
        hint="A model whose tokenizer.json is beside its weights needs nothing else.",
    ):
        return transformers.AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )


def marks_of(tokenizer: Any) -> dict[str, str]:
    """sha256 of what the tokenizer does, by what it is of."""
    text = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "special-tokens": [
            sorted((key, str(value)) for key, value in tokenizer.special_tokens_map.items()),
            sorted(tokenizer.all_special_ids),
            tokenizer.eos_token_id,
            tokenizer.bos_token_id,
        ],
        "chat-template": tokenizer.chat_template or "",
        "ids-of-a-text": [
            list(tokenizer(PROBE, add_special_tokens=False)["input_ids"]),
            list(tokenizer(PROBE)["input_ids"]),
        ],
    }
    return {
        key: hashlib.sha256(json.dumps(value, ensure_ascii=True).encode()).hexdigest()
        for key, value in text.items()
    }


def compare_marks(tokenizer: Any, wanted: Mapping[str, str], read_with: str) -> None:
    """Raise ConfigError E415, naming what differs. ``read_with``: the founder's libraries."""
    mine = marks_of(tokenizer)
    if wrong := [key for key in wanted if mine.get(key) != wanted[key]]:
        names = ", ".join(key.replace("-", " ") for key in wrong)
        raise ConfigError(
            f"the tokenizer here is not the run's: other {names}",
            code="E415",
            why=f"The founder read it with {read_with}, this machine does with {versions()}; "
            "the same text would be other numbers here.",
            hint="The founder's versions of these libraries, and the model's own tokenizer files.",
        )
