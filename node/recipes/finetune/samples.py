"""What a record says: a conversation, or a passage of text behind a prompt. Five schemas, known by
their keys; the first record of a file says which it is, and the others must be of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ....collectives.foreign import quoted
from .records import UnfitRecord

KEYS: dict[str, tuple[tuple[str, ...], ...]] = {
    "messages": (("messages",),),
    "conversations": (("conversations",),),
    "completion": (("prompt", "completion"), ("prompt", "response")),
    "instruction": (("instruction", "output"), ("instruction", "response")),
    "text": (("text",),),
}
"""By a schema's name: keys of which a record has one set, all of it."""
RENAMED = (
    ("question", "answer"),
    ("query", "response"),
    ("query", "answer"),
    ("input", "output"),
    ("user", "assistant"),
    ("human", "assistant"),
    ("problem", "solution"),
)
"""Keys that question and answer have elsewhere."""
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Roles of messages, by what files call them; a template may know fewer."""
PASSED_ON = ("name", "tool_calls", "tool_call_id", "reasoning_content")
"""Keys of a message that a template may read, beside role and content."""
LEARNED_BY = ("weight", "train", "loss")
"""Keys of a message by which files say whether an answer is learned: 1 or true, 0 or false."""
NO_TEXT = ("images", "image", "videos", "audios", "audio")
"""Keys under which a record has something else than text."""
_BESIDE: dict[str, tuple[str, ...]] = {
    "messages": ("system", "tools"),
    "conversations": ("system", "tools"),
    "completion": ("system", "tools"),
    "instruction": ("input", "system", "history"),
    "text": (),
}
"""By a schema's name: keys that are read where they are there, beside those of `KEYS`."""


_LEARNED = "\0learned"  # of a message, on its way to `Chat.unlearned`


class EmptyRecord(UnfitRecord):
    """A record that is in order and holds nothing to learn from: it is left out, and counted."""


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages as a chat template takes them. Answers before message ``trained_from`` are not
    learned, nor are those whose numbers, from 0, are in ``unlearned``.
    """

    messages: tuple[dict[str, Any], ...]
    trained_from: int = 0
    tools: tuple[Any, ...] = ()
    unlearned: frozenset[int] = frozenset()

    @property
    def answers(self) -> list[int]:
        """Numbers of the messages that are learned."""
        return [
            index
            for index, message in enumerate(self.messages)
            if message["role"] == "assistant"
            and index >= self.trained_from
            and index not in self.unlearned
        ]


@dataclass(frozen=True, slots=True)
class Passage:
    """Text that is learned, behind a ``prompt`` that is not."""

    prompt: str
    text: str


Sample = Chat | Passage


def schema_of(value: Mapping[str, Any] | str) -> str:
    """The schema of a record. Raises UnfitRecord, which names its keys."""
    if isinstance(value, str):
        return "text"
    for name, sets in KEYS.items():
        if any(all(key in value for key in keys) for keys in sets):
            return name
    known = "; ".join(" and ".join(sets[0]) for sets in KEYS.values())
    keys = ", ".join(quoted(key, 40) for key in list(value)[:8]) or "none"
    raise UnfitRecord(f"its keys are {keys}; known are: {known}{_cure(value)}")


def _cure(value: Mapping[str, Any]) -> str:
    """What to do with keys that other tools have a name for."""
    for asked, said in RENAMED:
        if asked in value and said in value:
            return f". Call {asked} instruction, and {said} output"
    if "chosen" in value:
        return (
            ". Preferences (chosen, rejected) are not trained on: make messages of what is chosen"
        )
    lists = [
        key for key, each in value.items() if isinstance(each, list) and each and key.isidentifier()
    ]
    if lists and isinstance(value[lists[0]][0], Mapping):
        return f". {lists[0]} is a list: jq -c '.{lists[0]}[]' FILE makes records of it"
    return ""


def sample_of(value: Mapping[str, Any] | str, schema: str) -> Sample:
    """The record as a sample. Raises UnfitRecord where it is not of that schema, EmptyRecord where
    it is and says nothing.
    """
    if isinstance(value, str):
        value = {"text": value}
    keys = next((keys for keys in KEYS[schema] if all(key in value for key in keys)), None)
    if keys is None:
        wanted = " or ".join(" and ".join(keys) for keys in KEYS[schema])
        found = ", ".join(quoted(key, 40) for key in list(value)[:8]) or "none"
        raise UnfitRecord(f"its keys are {found}; this file's records have {wanted}")
    if other := next((key for key in NO_TEXT if value.get(key)), None):
        raise UnfitRecord(f"it has {other}, and only text is trained on")
    if schema in ("messages", "conversations"):
        return _chat(_messages(value[keys[0]], keys[0]), 0, value)
    if schema == "text":
        return Passage("", _said(_text(value, "text"), "text"))
    if schema == "completion" and isinstance(value["prompt"], list):
        asked = _messages(value["prompt"], "prompt")
        return _chat(asked + _messages(value[keys[1]], keys[1]), len(asked), value)
    answer = _said(_text(value, keys[1]), keys[1])
    if schema == "completion":
        return Passage(_text(value, "prompt"), answer)
    question = _said(_text(value, "instruction"), "instruction")
    if value.get("input"):
        question += "\n\n" + _text(value, "input")
    turns = [
        {"role": role, "content": text}
        for asked, said in _history(value)
        for role, text in (("user", asked), ("assistant", said))
    ]
    turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return _chat(turns, 0, value)


def unread_of(value: Mapping[str, Any] | str, schema: str) -> list[str]:
    """What a record of a schema holds that nobody reads, in words: its own keys, and those of its
    messages.
    """
    if isinstance(value, str):
        return []
    first = next(keys for keys in KEYS[schema] if all(key in value for key in keys))
    known = {*first, *_BESIDE[schema]}
    if schema == "completion" and not isinstance(value["prompt"], list):
        known = {*first}
    found = [quoted(key, 40) for key in value if key not in known and value[key] is not None]
    read = {"role", "from", "content", "value", *PASSED_ON, *LEARNED_BY}
    lists: list[Any] = [value[key] for key in first if isinstance(value[key], list)]
    inner = dict.fromkeys(
        key
        for each in lists
        for message in each
        if isinstance(message, Mapping)
        for key in cast("Mapping[str, Any]", message)
        if key not in read and message[key] is not None
    )
    return [*found, *(f"{quoted(key, 40)} of messages" for key in inner)]


def share_of(sample: Sample, seed: int) -> float:
    """A number from 0 to 1 of the sample's content alone: below the held-out share, it is held out.
    The same for equal samples in whatever file, schema, spelling of JSON, or machine.
    """
    said: Any = (
        [sample.prompt.strip(), sample.text.strip()]
        if isinstance(sample, Passage)
        else [sample.messages, sample.trained_from]
    )
    text = json.dumps(said, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str)
    digest = hashlib.sha256(f"atoll/held-out/{seed}/".encode() + text.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _text(value: Mapping[str, Any], key: str) -> str:
    found = value[key]
    if not isinstance(found, str):
        raise UnfitRecord(f"{key} is of type {type(found).__name__}, not text")
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise UnfitRecord(
            f"{key} holds half a surrogate pair, at character {error.start + 1}"
        ) from None
    return found


def _said(text: str, key: str) -> str:
    if not text.strip():
        raise EmptyRecord(f"{key} is empty")
    return text


def _chat(messages: list[dict[str, Any]], trained_from: int, value: Mapping[str, Any]) -> Chat:
    answers = [each for each in messages[trained_from:] if each["role"] == "assistant"]
    if not answers:
        raise UnfitRecord("no message of it is an assistant's, so there is nothing to learn")
    if value.get("system") and (system := _text(value, "system")).strip():
        if messages[0]["role"] == "system":
            raise UnfitRecord("its key system and its first message are both a system prompt")
        messages = [{"role": "system", "content": system}, *messages]
        trained_from += 1 if trained_from else 0
    unlearned = frozenset(
        index for index, message in enumerate(messages) if not message.pop(_LEARNED, True)
    )
    chat = Chat(tuple(messages), trained_from, _tools(value), unlearned)
    if not chat.answers:
        raise EmptyRecord("none of its answers is to be learned")
    return chat


def _tools(value: Mapping[str, Any]) -> tuple[Any, ...]:
    """A list, or JSON of one, which files of columns have."""
    found: Any = value.get("tools") or ()
    if isinstance(found, str):
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(found)
    if not isinstance(found, list | tuple):
        raise UnfitRecord(f"tools is of type {type(found).__name__}, not a list")
    return tuple(cast("Sequence[Any]", found))


def _history(value: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Earlier turns of an instruction: pairs of question and answer."""
    found: Any = value.get("history") or []
    if not isinstance(found, list):
        raise UnfitRecord(f"history is of type {type(found).__name__}, not a list of pairs")
    pairs = list[tuple[str, str]]()
    for number, each in enumerate(cast("list[Any]", found), 1):
        which = f"turn {number} of history"
        if not isinstance(each, list | tuple) or len(cast("Sequence[Any]", each)) != 2:
            raise UnfitRecord(f"{which} is no pair of a question and its answer")
        asked, said = cast("Sequence[Any]", each)
        pairs.append((_text({which: asked}, which), _text({which: said}, which)))
    return pairs


def _messages(found: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(found, list):
        raise UnfitRecord(f"{key} is of type {type(found).__name__}, not a list of messages")
    if not found:
        raise EmptyRecord(f"{key} is empty")
    return [_message(each, number, key) for number, each in enumerate(found, 1)]


def _message(each: Any, number: int, key: str) -> dict[str, Any]:
    which = f"message {number} of {key}"
    if not isinstance(each, Mapping):
        raise UnfitRecord(f"{which} is of type {type(each).__name__}, not an object")
    message = cast("Mapping[str, Any]", each)
    role, said = ("from", "value") if "from" in message else ("role", "content")
    if role not in message:
        raise UnfitRecord(f"{which} has no role")
    name = message[role]
    if not isinstance(name, str) or name.lower() not in ROLES:
        known = ", ".join(dict.fromkeys(ROLES.values()))
        raise UnfitRecord(f"{which} has the role {quoted(name, 40)}, which is none of {known}")
    out = {kept: message[kept] for kept in PASSED_ON if message.get(kept) is not None}
    content = message.get(said)
    if isinstance(content, list):
        content = _joined(cast("list[Any]", content), which)
    if content is None and "tool_calls" in out:
        content = ""
    if not isinstance(content, str):
        raise UnfitRecord(f"{which} has no text: {said} is of type {type(content).__name__}")
    _text({which: content}, which)
    if not content.strip() and "tool_calls" not in out and ROLES[name.lower()] == "assistant":
        raise EmptyRecord(f"{which}, an answer, is empty")
    if not _is_learned(message, ROLES[name.lower()], which):
        out[_LEARNED] = False
    return {"role": ROLES[name.lower()], "content": content, **out}


def _is_learned(message: Mapping[str, Any], role: str, which: str) -> bool:
    """Whether a message's own keys leave it to be learned."""
    for key in LEARNED_BY:
        value = message.get(key)
        if value is None:
            continue
        if value not in (0, 1):
            raise UnfitRecord(f"{which} has the {key} {quoted(value, 40)}, and 0 or 1 is known")
        if value and role != "assistant":
            raise UnfitRecord(
                f"{which} has the {key} {quoted(value, 40)}, and only answers are learned"
            )
        if not value:
            return False
    return True


def _joined(parts: list[Any], which: str) -> str:
    """Content in parts, of which all are text."""
    found: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) < len(found):
        raise UnfitRecord(f"{which} holds something else than text")
    return "".join(texts)
