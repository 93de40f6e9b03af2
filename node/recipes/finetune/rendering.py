"""From samples to tokens, and which of them are learned: those of answers, their end-of-turn token
included, or all.

A chat template may mark answers itself (``{% generation %}``). Where it does not, each answer is
what the template adds to the conversation before it with the prompt of an answer; both must be
beginnings of the whole. Where they are not (a template that drops earlier thinking), the
conversation becomes one sample for each of its answers. A template that is not even so is refused.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from ....collectives.errors import ConfigError
from ....collectives.foreign import escaped, quoted
from .records import UnfitRecord
from .samples import Chat, Passage, Sample

BEGIN, END = "⟦", "⟧"  # around what is learned, where a sample is shown
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class RenderedText:
    """Token ids of a document, and which of them are learned."""

    ids: list[int]
    learned: list[bool]

    def cut(self, length: int) -> RenderedText:
        """Its first ``length`` tokens."""
        return RenderedText(self.ids[:length], self.learned[:length])

    @property
    def targets(self) -> int:
        """Tokens that a model is to predict: the first has nothing before it."""
        return sum(self.learned[1:])


class ChatRenderer:
    """Renders by one tokenizer of transformers. ``way`` says by what means answers are found:
    ``marks``, ``prefixes``, or ``turns`` (a sample for each answer); "" before a chat was seen.
    ``notes``: what is to be said of the tokenizer.
    """

    def __init__(self, tokenizer: Any, loss: Literal["completion", "all"] = "completion") -> None:
        """Raises ConfigError for a tokenizer that does not say where in a text its tokens are."""
        self.tokenizer, self.loss = tokenizer, loss
        self.notes = list[str]()
        self.way = ""
        if not getattr(self.tokenizer, "is_fast", False):
            raise ConfigError(
                f"the model's tokenizer is a {type(self.tokenizer).__name__}",
                key="tokenizer",
                why="It does not say where in a text its tokens are, so answers cannot be marked.",
                hint="Take a model with a tokenizer.json.",
            )
        bare = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = self.tokenizer("a")["input_ids"]
        at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
        self._begins: list[int] = whole[:at]  # such as a bos, which some models were trained with
        self._ends: list[int] = [
            token for token in (self.tokenizer.eos_token_id,) if token is not None
        ]
        self._special: set[int] = {
            *self.tokenizer.all_special_ids,
            *(
                token
                for token, added in self.tokenizer.added_tokens_decoder.items()
                if added.special
            ),
        }
        tokens = self.tokenizer.convert_ids_to_tokens(sorted(self._special))
        self._controls = [token for token in tokens if len(token) > 2]
        if not self._ends:
            self.notes.append(
                "the tokenizer has no end-of-text token: the model does not learn where texts end"
            )

    def render(self, sample: Sample) -> list[RenderedText]:
        """The documents of a sample: one, or one for each answer. Raises UnfitRecord where the
        template refuses it, ConfigError where there is none, or where none of its answers can be
        found.
        """
        return [self._passage(sample)] if isinstance(sample, Passage) else self._chat(sample)

    def controls(self, sample: Sample) -> str:
        """A control token that stands in the text of a chat's messages, which the model would read
        as one; "" where there is none.
        """
        if isinstance(sample, Passage):
            return ""
        for message in sample.messages:
            for token in self._controls:
                if token in str(message.get("content", "")):
                    return token
        return ""

    def _passage(self, sample: Passage) -> RenderedText:
        # Tokenized apart: together the prompt's tokens would often be others than alone, which is
        # how the model will see them.
        prompt = self._ids(sample.prompt) if sample.prompt else []
        text = self._ids(sample.text)
        first = prompt or text
        if first[: len(self._begins)] != self._begins:  # many files have it in their text
            prompt = self._begins + prompt
        if text[-1:] != self._ends:
            text += self._ends
        learns = self.loss == "all" or not sample.prompt
        return RenderedText(prompt + text, [learns] * len(prompt) + [True] * len(text))

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _chat(self, chat: Chat) -> list[RenderedText]:
        if not self.tokenizer.chat_template:
            raise ConfigError(
                "these are conversations, and the model's tokenizer has no chat template",
                key="$.data.format",
                why="A base model was not trained to answer, and has no form of a turn.",
                hint="Name its instruct version in [model], or give records of text, or of prompt "
                "and completion.",
            )
        whole = self._text(chat.messages, chat)
        self._check_whole(chat, whole)
        if self.loss == "all":
            ids = self._ids(whole)
            return [RenderedText(ids, [True] * len(ids))]
        every = not chat.trained_from and not chat.unlearned
        marked = self._marked(chat) if self._has_marks and every else None
        if marked is not None:
            return [marked]
        spans = self._spans(chat, whole)
        if spans is not None:
            self.way = self.way or "prefixes"
            return [self._with(whole, spans)]
        self.way = "turns"
        return list(self._turns(chat))

    def _check_whole(self, chat: Chat, whole: str) -> None:
        """Raise UnfitRecord where the template leaves out a part of the conversation without a
        word: it would be trained on as if nobody had written that. ``whole``: what it makes of it.
        """
        for index, message in enumerate(chat.messages):
            content, role = message["content"].strip(), message["role"]
            which = f"message {index + 1}, of the role {quoted(role, 20)}"
            if content not in whole and self._ignores(chat, whole, index, content=content + "∎"):
                raise UnfitRecord(f"the model's chat template leaves out {which}")
            if message.get("tool_calls") and self._ignores(chat, whole, index, tool_calls=None):
                raise UnfitRecord(f"the model's chat template leaves out the calls of {which}")
        thought = [i for i, each in enumerate(chat.messages) if "reasoning_content" in each]
        if thought and self._ignores(chat, whole, thought[-1], reasoning_content=None):
            self._note_once("the chat template leaves out reasoning_content: it is not learned")
        if chat.tools and self._text(chat.messages, replace(chat, tools=())) == whole:
            raise UnfitRecord("the model's chat template leaves out its tools")

    def _ignores(self, chat: Chat, whole: str, index: int, **other: Any) -> bool:
        """Whether a message with other values gives the same text; None: without one."""
        messages = list(chat.messages)
        changed = messages[index] | other
        messages[index] = {key: value for key, value in changed.items() if value is not None}
        try:
            return self._text(messages, chat) == whole
        except UnfitRecord:  # it reads it
            return False

    def _note_once(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)

    @property
    def _has_marks(self) -> bool:
        return MARKS.search(str(self.tokenizer.chat_template)) is not None

    def _marked(self, chat: Chat) -> RenderedText | None:
        """By the template's own marks; None where they are around nothing."""
        found = self._apply(
            chat.messages, chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, learned = list(found["input_ids"]), [bool(each) for each in found["assistant_masks"]]
        if not any(learned):
            return None
        self.way = self.way or "marks"
        for at in range(1, len(ids)):  # many put the end of the turn behind the mark
            if learned[at - 1] and not learned[at] and ids[at] in self._special:
                learned[at] = ids[at - 1] not in self._special
        return RenderedText(ids, learned)

    def _spans(self, chat: Chat, whole: str) -> list[tuple[int, int]] | None:
        """Where answers are in the template's text, ``whole``; None where its beginnings are not
        those of the whole.
        """
        spans = list[tuple[int, int]]()
        for index in chat.answers:
            before = self._before(chat, index)
            upto = self._text(chat.messages[: index + 1], chat)
            if not (whole.startswith(upto) and upto.startswith(before)):
                return None
            spans.append((len(before), len(upto)))
        return spans

    def _turns(self, chat: Chat) -> Iterator[RenderedText]:
        for index in chat.answers:
            before = self._before(chat, index)
            upto = self._text(chat.messages[: index + 1], chat)
            if not upto.startswith(before):
                raise ConfigError(
                    "the model's chat template does not say where its answers begin",
                    key="$.data.loss",
                    why=f"The prompt of an answer ends {quoted(before[-40:], 48)}, and the "
                    "conversation with the answer does not begin with it; it marks nothing either.",
                    hint='loss = "all", or a template with {% generation %} marks',
                )
            yield self._with(upto, [(len(before), len(upto))])

    def _before(self, chat: Chat, index: int) -> str:
        if index == 0:
            return ""
        return self._text(chat.messages[:index], chat, add_generation_prompt=True)

    def _with(self, text: str, spans: Sequence[tuple[int, int]]) -> RenderedText:
        found = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        learned = [
            any(first <= start < last for first, last in spans) and end > start
            for start, end in found["offset_mapping"]
        ]
        return RenderedText(found["input_ids"], learned)

    def _text(self, messages: Sequence[dict[str, Any]], chat: Chat, **options: Any) -> str:
        return self._apply(messages, chat, tokenize=False, **options)

    def _apply(self, messages: Sequence[dict[str, Any]], chat: Chat, **options: Any) -> Any:
        options["tools"] = list(chat.tools) or None
        given = [_with_arguments(message) for message in messages]
        try:
            try:
                return self.tokenizer.apply_chat_template(given, **options)
            except Exception:
                if given == list(messages):
                    raise
                # few templates want arguments as text
                return self.tokenizer.apply_chat_template(list(messages), **options)
        except Exception as error:  # a template is a program, and raises what it likes
            raise UnfitRecord(
                f"the model's chat template refuses it: {quoted(error, 160)}"
            ) from None

    def learns_to_stop(self) -> bool:
        """Whether an answer's learned tokens have one that is special: its end-of-turn."""
        probe = Chat(
            ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}),
        )
        try:
            found = self._chat(probe)[-1]
        except (UnfitRecord, ConfigError):
            return True  # whatever is wrong will be said of a record
        return any(
            token in self._special
            for token, learned in zip(found.ids, found.learned, strict=True)
            if learned
        )

    def show(self, text: RenderedText, most: int = 2000) -> str:
        """The document as it is read, with what is learned between ⟦ and ⟧."""
        parts, start = list[str](), 0
        for at in range(1, len(text.ids) + 1):
            if at == len(text.ids) or text.learned[at] != text.learned[start]:
                part = self.tokenizer.decode(text.ids[start:at])
                parts.append(f"{BEGIN}{part}{END}" if text.learned[start] else part)
                start = at
        shown = "".join(parts)
        if len(shown) > most:
            shown = f"{shown[: most // 2]} … {shown[-most // 2 :]}"
        return escaped(shown, len(shown) + 1, keep="\n")


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The arguments of its calls as objects: most templates write them as JSON, and what is JSON
    already, as in OpenAI's files, would be so twice.
    """
    calls: Any = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return message | {"tool_calls": [_with_objects(call) for call in cast("list[Any]", calls)]}


def _with_objects(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    found = dict(cast("Mapping[str, Any]", call))
    if isinstance(found.get("function"), Mapping):
        found["function"] = _with_objects(found["function"])
    if isinstance(found.get("arguments"), str):
        with contextlib.suppress(ValueError, RecursionError):
            found["arguments"] = json.loads(found["arguments"])
    return found
