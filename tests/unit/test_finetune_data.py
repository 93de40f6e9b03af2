"""Records of a file: forty that are wrong are each named with file and line, or trained rightly."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from finetune_kit import (
    CHATML,
    FORGETFUL,
    MARKED,
    STRICT,
    chat,
    many_chats,
    tiny_tokenizer,
    write_jsonl,
)

from atoll.collectives.errors import ConfigError
from atoll.node.manifest.tables import DataTable
from atoll.node.recipes.finetune import records
from atoll.node.recipes.finetune.preparing import PreparedData, prepare_data
from atoll.node.recipes.finetune.rendering import ChatRenderer
from atoll.node.recipes.finetune.samples import sample_of, share_of

GOOD = json.dumps(chat("hi", "yes"))
TABLE = DataTable(held_out=0.0, length=64)


def prepare(path: Path, template: str | None = CHATML, **settings: Any) -> PreparedData:
    table = DataTable(**{"held_out": 0.0, "length": 64, **settings})
    return prepare_data(str(path), tiny_tokenizer(template), table, vocabulary=304)


def line(value: Any) -> str:
    return json.dumps(value)


def said(role: str, content: Any = "x") -> dict[str, Any]:
    return {"role": role, "content": content}


def messages(*given: Any) -> str:
    return line({"messages": list(given)})


Content = str | bytes
REFUSED: list[tuple[str, str, Content, str]] = [
    # (what it is, file, contents, what is said: its place first)
    ("empty", "a.jsonl", "", "a.jsonl:1: the file holds no record"),
    ("only blank lines", "a.jsonl", "\n \n\n", "a.jsonl:1: the file holds no record"),
    ("half a line", "a.jsonl", f"{GOOD}\n{GOOD[:30]}", "a.jsonl:2: the line ends within its JSON"),
    ("not JSON", "a.jsonl", f"{GOOD}\nhello\n", "a.jsonl:2: it is not JSON: it begins “hello”"),
    ("two objects", "a.jsonl", f"{GOOD}{GOOD}\n", "a.jsonl:1: it is not JSON: Extra data"),
    ("single quotes", "a.jsonl", "{'text': 'a'}\n", "a.jsonl:1: it is not JSON"),
    ("a trailing comma", "a.jsonl", '{"text": "a",}\n', "a.jsonl:1: it is not JSON"),
    ("an array that is cut", "a.json", f"[\n{GOOD},\n{GOOD[:30]}", "a.json:3: the file ends within a record"),
    ("an array without its end", "a.json", f"[\n{GOOD}\n", "a.json:3: the file ends within its array"),
    ("an array without a comma", "a.json", f"[{GOOD}\n{GOOD}]", "a.json:2: a comma or ] is wanted"),
    ("an array and more", "a.json", f"[{GOOD}]\n{GOOD}\n", "a.json:2: something stands behind the array's ]"),
    ("an array with a bad record", "a.json", f'[{GOOD},\n{{"text": a}}]', "a.json:2: it is not JSON: Expecting value at line 2"),
    ("an array with a number", "a.json", f"[{GOOD},\n3]", "a.json:2: it is a number"),
    ("an array of messages", "a.json", json.dumps([said("user"), said("assistant")], indent=1),
     "a.json:2: it is a message, so the array is one conversation; make records of it: jq -c '{messages: .}' a.json > a.jsonl"),
    ("an array of conversations", "a.json", json.dumps([[said("user"), said("assistant")]], indent=1),
     "a.json:2: it is a list, and an object {…} is wanted; make records of it: jq -c '.[] | {messages: .}' a.json > a.jsonl"),
    ("10 MB in an array", "a.json", f'[{GOOD},\n{{"text": "{"a" * 10_000_000}"}}]', "a.json:2: the record has more than 4 MiB"),
    ("an array in Latin-1", "a.json", b'[{"text": "caf\xe9"}]', "a.json:1: what follows is not UTF-8"),
    ("an object of several lines", "a.json", json.dumps({"data": [chat("a", "b")]}, indent=1),
     "a.json:1: it begins an object of several lines; make records of it: jq -c '.' a.json > a.jsonl"),
    ("records below a key", "a.json", line({"data": [chat("a", "b")]}), ". data is a list: jq -c '.data[]' FILE makes records of it"),
    ("question and answer", "a.jsonl", line({"question": "a", "answer": "b"}), ". Call question instruction, and answer output"),
    ("preferences", "a.jsonl", line({"prompt": "a", "chosen": "b", "rejected": "c"}), ". Preferences (chosen, rejected) are not trained on"),
    ("an empty array", "a.json", "[]\n", "a.json:1: the file holds no record"),
    ("deep in an array", "a.json", '[{"text":' + "[" * 100_000, "a.json:1: it cannot be read as JSON"),
    ("an array by the name of lines", "my chats.jsonl", f"[{GOOD}]\n",
     "make records of it: jq -c '.[]' 'my chats.jsonl' > 'my chats-lines.jsonl'"),  # never onto itself
    ("lists of messages", "a.jsonl", line([said("user"), said("assistant")]),
     "a.jsonl:1: it is a list of messages; make records of it: jq -c '{messages: .}' a.jsonl > a-lines.jsonl"),
    ("a string", "a.jsonl", f'{GOOD}\n"a"\n', "a.jsonl:2: it is a string"),
    ("null", "a.jsonl", f"{GOOD}\nnull\n", "a.jsonl:2: it is null"),
    ("a number", "a.jsonl", "3\n", "a.jsonl:1: it is a number"),
    ("a list", "a.jsonl", f"{GOOD}\n[]\n", "a.jsonl:2: it is an array"),
    ("too deep", "a.jsonl", "[" * 100_000 + "\n", "a.jsonl:1: it begins a JSON array"),
    ("deep inside", "a.jsonl", '{"text":' + "[" * 100_000, "a.jsonl:1: it cannot be read as JSON"),
    ("10 MB in one line", "a.jsonl", f'{GOOD}\n{{"text": "{"a" * 10_000_000}"}}\n{GOOD}\n',
     "a.jsonl:2: the line has more than 4 MiB"),
    ("UTF-16", "a.jsonl", (GOOD + "\n").encode("utf-16"), "a.jsonl:1: the file is UTF-16"),
    ("Latin-1", "a.jsonl", f"{GOOD}\n".encode() + b'{"text": "caf\xe9"}\n',
     "a.jsonl:2: byte 14 of the line is not UTF-8"),
    ("half a surrogate", "a.jsonl", '{"text": "a\\ud800"}\n', "a.jsonl:1: text holds half a surrogate"),
    ("compressed", "a.jsonl", b"\x1f\x8b\x08\x00rest", "a.jsonl:1: the file is compressed"),
    ("parquet by another name", "a.jsonl", b"PAR1rest", "a.jsonl:1: the file is parquet"),
    ("wrong keys", "a.jsonl", line({"q": 1, "a": 2}), "a.jsonl:1: its keys are “q”, “a”; known are"),
    ("no keys", "a.jsonl", "{}\n", "a.jsonl:1: its keys are none"),
    ("mixed schemas", "a.jsonl", f'{GOOD}\n{{"text": "a"}}\n',
     "a.jsonl:2: its keys are “text”; this file's records have messages"),
    ("text of another type", "a.jsonl", line({"text": 5}), "a.jsonl:1: text is of type int"),
    ("messages as text", "a.jsonl", line({"messages": "hi"}), "a.jsonl:1: messages is of type str"),
    ("a message as text", "a.jsonl", messages("hi"), "a.jsonl:1: message 1 of messages is of type str"),
    ("no role", "a.jsonl", messages({"content": "a"}), "a.jsonl:1: message 1 of messages has no role"),
    ("no content", "a.jsonl", messages(said("user"), {"role": "assistant"}),
     "a.jsonl:1: message 2 of messages has no text"),
    ("a strange role", "a.jsonl", messages(said("narrator"), said("assistant")),
     "a.jsonl:1: message 1 of messages has the role “narrator”"),
    ("an image", "a.jsonl", messages(said("user", [{"type": "image"}]), said("assistant")),
     "a.jsonl:1: message 1 of messages holds something else than text"),
    ("no assistant turn", "a.jsonl", f"{GOOD}\n{messages(said('user'))}\n",
     "a.jsonl:2: no message of it is an assistant's"),
    ("a prompt alone", "a.jsonl", line({"prompt": "a"}), "a.jsonl:1: its keys are “prompt”"),
    ("tools as text", "a.jsonl", line({**chat("a", "b"), "tools": "search"}),
     "a.jsonl:1: tools is of type str"),
    ("pictures beside the text", "a.jsonl", line({**chat("a", "b"), "images": ["a.png"]}),
     "a.jsonl:1: it has images, and only text is trained on"),
    ("two system prompts", "a.jsonl", line({**chat("a", "b", system="be kind"), "system": "be short"}),
     "a.jsonl:1: its key system and its first message are both a system prompt"),
    ("half a weight", "a.jsonl", messages(said("user"), {**said("assistant"), "weight": 0.5}),
     "a.jsonl:1: message 2 of messages has the weight “0.5”, and 0 or 1 is known"),
    ("a question to be learned", "a.jsonl", messages({**said("user"), "train": True}, said("assistant")),
     "a.jsonl:1: message 1 of messages has the train “True”, and only answers are learned"),
    ("half a turn of history", "a.jsonl", line({"instruction": "a", "output": "b", "history": [["c"]]}),
     "a.jsonl:1: turn 1 of history is no pair of a question and its answer"),
    ("csv with a short row", "a.csv", "prompt,completion\na,b\nc\n",
     "a.csv:3: 1 columns, and the header has 2"),
    ("csv with an open quote", "a.csv", 'prompt,completion\na,"b\nc,d\n', "a.csv:2: it is not CSV"),
    ("csv with no header", "a.csv", "a,a\nb,c\n", "a.csv:1: its header names a column twice"),
    ("csv of other columns", "a.csv", "instruction;output\na;b\n", "a.csv:2: its keys are"),
    ("an empty text", "a.txt", "", "a.txt:1: the file holds no record"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "content", "words"), [row[1:] for row in REFUSED],
                         ids=[row[0] for row in REFUSED])  # fmt: skip
def test_a_bad_file_is_named_with_file_and_line(
    tmp_path: Path, file: str, content: Content, words: str
) -> None:
    path = tmp_path / file
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        prepare(path)
    assert words in caught.value.message
    assert caught.value.code == "E417"
    assert len(caught.value.message) < 4000


def shown(data: PreparedData) -> str:
    return data.shown


RIGHTLY: list[tuple[str, str, Content, Callable[[PreparedData], object], object]] = [
    # (what it is, file, contents, what is looked at, what it is)
    ("BOM", "a.jsonl", b"\xef\xbb\xbf" + GOOD.encode(), lambda d: d.summary.records, 1),
    ("CRLF", "a.jsonl", f"{GOOD}\r\n{GOOD}\r\n", lambda d: d.training.targets, 10),
    ("no last newline", "a.jsonl", f"{GOOD}\n{GOOD}", lambda d: d.summary.records, 2),
    ("blank lines between", "a.jsonl", f"{GOOD}\n\n{GOOD}\n\n", lambda d: len(d.training), 2),
    ("conversations", "a.jsonl", line({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}),
     shown, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>\n⟧"),
    ("prompt and completion", "a.jsonl", line({"prompt": "one", "completion": " two"}), shown, "one⟦ two<|im_end|>⟧"),
    ("instruction, input, output", "a.jsonl", line({"instruction": "a", "input": "b", "output": "c"}),
     shown, "<|im_start|>user\na\n\nb<|im_end|>\n<|im_start|>assistant\n⟦c<|im_end|>\n⟧"),
    ("messages as prompt", "a.jsonl", line({"prompt": [said("user"), said("assistant", "no"), said("user")], "completion": [said("assistant", "yes")]}),
     lambda d: d.shown.count("⟦"), 1),
    ("content in parts", "a.jsonl", messages(said("user", [{"type": "text", "text": "a"}]), said("assistant", "b")),
     lambda d: "user\na<" in d.shown, True),
    ("a last turn of the user", "a.jsonl", line(chat("a", "b", "c")), lambda d: d.shown.endswith("user\nc<|im_end|>\n"), True),
    ("text", "a.jsonl", line({"text": "the swarm"}), shown, "⟦the swarm<|im_end|>⟧"),
    ("csv with a newline in quotes", "a.csv", 'prompt,completion\r\na,"b\r\nc"\r\n', shown, "a⟦b\nc<|im_end|>⟧"),
    ("tsv", "a.tsv", "prompt\tcompletion\na, b\tc\n", shown, "a, b⟦c<|im_end|>⟧"),
    ("an array", "a.json", f"\ufeff[{GOOD},\r\n {GOOD}]\n", lambda d: d.summary.records, 2),
    ("an array as json.dumps writes it", "a.json", json.dumps([chat("a", "b"), chat("c", "d " * 30)], indent=2), lambda d: len(d.training), 2),
    ("alpaca in an array", "a.json", json.dumps([{"instruction": "a", "input": "", "output": "c"}] * 300, indent=4),
     lambda d: (d.summary.records, d.shown), (300, "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦c<|im_end|>\n⟧")),
    ("txt", "a.txt", "\n\none\ntwo\n\nthree\n", lambda d: d.training.targets > 8, True),
    ("an empty answer among others", "a.jsonl", f"{line(chat('a', ''))}\n{GOOD}\n",
     lambda d: (d.summary.left_out.total(), next(iter(d.summary.first.values()))), (1, "a.jsonl:1")),
    ("one longer than the length", "a.jsonl", f"{line(chat('x' * 90, 'b'))}\n{GOOD}\n",
     lambda d: d.lines(64)[-1], "left out: 1 because nothing learned is in its first 64 tokens (first: a.jsonl:1)"),
    ("one cut within its answer", "a.jsonl", line(chat("a", "x" * 90)), lambda d: (d.summary.cut, d.training.tokens), (1, 64)),
    ("a system prompt beside the turns", "a.jsonl", line({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
     "system": "be kind"}),
     lambda d: d.shown.startswith("<|im_start|>system\nbe kind<|im_end|>\n"), True),
    ("history and a system prompt of an instruction", "a.jsonl", line({"instruction": "c", "output": "d", "system": "s", "history": [["a", "b"]]}),
     shown, "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>\n⟧"
     "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n⟦d<|im_end|>\n⟧"),
    ("an answer that is not to be learned", "a.jsonl", messages(said("user"), {**said("assistant", "no"), "weight": 0}, said("user"),
     {**said("assistant", "yes"), "weight": 1}),
     lambda d: [part.partition("⟧")[0] for part in d.shown.split("⟦")[1:]], ["yes<|im_end|>\n"]),
    ("no answer is to be learned", "a.jsonl", f"{messages(said('user'), {**said('assistant'), 'train': False})}\n{GOOD}\n",
     lambda d: d.lines(64)[-1], "left out: 1 because none of its answers is to be learned (first: a.jsonl:1)"),
    ("keys that nobody reads", "a.jsonl", f"{GOOD}\n{line({**chat('a', 'b'), 'id': 3, 'label': False})}\n"
     f"{messages({**said('user'), 'mood': 'x'}, said('assistant'))}\n",
     lambda d: d.lines(64)[-1], "not read, and where first: “id” (a.jsonl:2), “label” (a.jsonl:2), “mood” of messages (a.jsonl:3)"),
    ("text with its end", "a.jsonl", line({"text": "the swarm<|im_end|>"}), shown, "⟦the swarm<|im_end|>⟧"),
    ("a control token in a message", "a.jsonl", line(chat("<|im_end|>", "b")),
     lambda d: d.summary.notes[0].startswith("a.jsonl:1: a message holds <|im_end|>"), True),
]  # fmt: skip


@pytest.mark.parametrize(("file", "content", "look", "value"), [row[1:] for row in RIGHTLY],
                         ids=[row[0] for row in RIGHTLY])  # fmt: skip
def test_an_odd_file_is_trained_rightly(
    tmp_path: Path,
    file: str,
    content: Content,
    look: Callable[[PreparedData], object],
    value: object,
) -> None:
    path = tmp_path / file
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert look(prepare(path)) == value


def test_all_that_is_wrong_is_listed_up_to_ten_and_reading_goes_on(tmp_path: Path) -> None:
    rows = [GOOD, "no", *[GOOD] * 3, *["{}"] * 30]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    with pytest.raises(ConfigError) as caught:
        prepare(tmp_path / "a.jsonl")
    found = caught.value.message.splitlines()
    assert found[0].startswith("a.jsonl:2: ")
    assert found[1].startswith("a.jsonl:6: ")
    assert (len(found), found[-1]) == (11, "and 21 others")


def test_nothing_left_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", chat("x" * 90, "b"), chat("y" * 90, "b"))
    with pytest.raises(ConfigError) as caught:
        prepare(path)
    assert "nothing learned is in its first 64 tokens (first: a.jsonl:1)" in caught.value.message
    with pytest.raises(ConfigError, match="does not exist"):
        prepare(tmp_path / "none.jsonl")
    (tmp_path / "a.xlsx").write_text("x")
    with pytest.raises(ConfigError, match="of a kind that is not read"):
        prepare(tmp_path / "a.xlsx")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="holds no file of records"):
        prepare(tmp_path / "folder")


def test_a_line_is_never_held_beyond_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.truncate(64 << 20)  # sparse, without a newline
    tracemalloc.start()
    try:
        (fault,) = records.read_records(str(path))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * records.MOST_LINE_BYTES
    assert isinstance(fault, records.RecordFault)
    assert fault.where == "a.jsonl:1"


def test_a_role_that_the_template_lacks_is_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", chat("a", "b"), chat("a", "b", system="be kind"))
    with pytest.raises(ConfigError) as caught:
        prepare(path, STRICT)
    assert "a.jsonl:2: the model's chat template refuses it" in caught.value.message
    assert "System role not supported" in caught.value.message
    with pytest.raises(ConfigError, match="no chat template"):
        prepare(path, None)


USERS_ONLY = (  # as several do: what it does not know vanishes
    "{% for message in messages %}{% if message['role'] in ('user', 'assistant') %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALLING = CHATML.replace(
    "+ '<|im_end|>'",
    "+ (message.tool_calls | tojson if message.tool_calls else '') + '<|im_end|>'",
)
CALL = {"type": "function", "function": {"name": "look", "arguments": '{"at": "a"}'}}


@pytest.mark.parametrize(
    ("template", "record", "words"),
    [
        (USERS_ONLY, chat("a", "b", system="be kind"), "message 1, of the role “system”"),
        (
            USERS_ONLY,
            {"messages": [said("user"), said("assistant", "b"), said("tool", "3"), said("assistant")]},
            "message 3, of the role “tool”",
        ),
        (CHATML, {**chat("a", "b"), "tools": [{"name": "look"}]}, "its tools"),
        (
            CHATML,
            {"messages": [said("user"), {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
            "the calls of message 2, of the role “assistant”",
        ),
    ],
    ids=["system", "tool", "tools", "calls"],
)  # fmt: skip
def test_what_a_template_leaves_out_is_named(
    template: str, record: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", chat("a", "b"), record)
    for loss in ("completion", "all"):
        with pytest.raises(ConfigError) as caught:
            prepare(path, template, loss=loss)
        assert f"a.jsonl:2: the model's chat template leaves out {words}" in caught.value.message


def test_arguments_of_calls_are_written_once_as_json(tmp_path: Path) -> None:
    record = {"messages": [said("user"), {**said("assistant", "so: "), "tool_calls": [CALL]}]}
    path = write_jsonl(tmp_path / "a.jsonl", record)
    assert '"arguments": {"at": "a"}' in prepare(path, CALLING, length=128).shown
    joined = CALLING.replace(
        "message.tool_calls | tojson", "message.tool_calls[0].function.arguments + ''"
    )
    assert 'so: {"at": "a"}' in prepare(path, joined).shown  # a template that wants text


def test_thinking_that_a_template_leaves_out_is_said(tmp_path: Path) -> None:
    record = {"messages": [said("user"), {**said("assistant"), "reasoning_content": "hm"}]}
    data = prepare(write_jsonl(tmp_path / "a.jsonl", record, record))
    assert data.summary.notes == [
        "the chat template leaves out reasoning_content: it is not learned"
    ]


def test_a_beginning_that_stands_in_a_text_is_not_put_there_twice() -> None:
    tokenizer = tiny_tokenizer()
    begin = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    renderer = ChatRenderer(tokenizer)
    renderer._begins = [begin]  # as of a tokenizer that adds one
    for text in ("the swarm", "<|endoftext|>the swarm"):
        (found,) = renderer.render(sample_of({"text": text}, "text"))
        assert found.ids.count(begin) == 1


@pytest.mark.parametrize(
    ("template", "way", "answers"),
    [
        (CHATML, "prefixes", ["one<|im_end|>\n", "two<|im_end|>\n"]),
        (MARKED, "marks", ["one<|im_end|>", "two<|im_end|>"]),
        (FORGETFUL, "turns", ["think one<|im_end|>\n", "think two<|im_end|>\n"]),
    ],
)
def test_answers_with_their_end_of_turn_are_what_is_learned(
    template: str, way: str, answers: list[str]
) -> None:
    tokenizer = tiny_tokenizer(template)
    renderer = ChatRenderer(tokenizer)
    found = renderer.render(sample_of(chat("hi", "one", "and", "two", system="be"), "messages"))
    shown = "".join(renderer.show(each) for each in found)
    assert renderer.way == way
    assert [part.partition("⟧")[0] for part in shown.split("⟦")[1:]] == answers
    assert renderer.learns_to_stop()
    if way != "turns":  # the ids are those that a chat is given
        whole = tokenizer.apply_chat_template(
            chat("hi", "one", "and", "two", system="be")["messages"], return_dict=True
        )
        assert found[0].ids == whole["input_ids"]


def test_a_template_that_hides_where_answers_begin_is_refused(tmp_path: Path) -> None:
    hidden = CHATML.replace("<|im_start|>assistant\n' }}{% endif", "Answer:' }}{% endif")
    path = write_jsonl(tmp_path / "a.jsonl", chat("a", "b"))
    with pytest.raises(ConfigError, match="does not say where its answers begin"):
        prepare(path, hidden)
    assert prepare(path, hidden, loss="all").shown.startswith("⟦")


def test_a_template_without_an_end_of_turn_is_said(tmp_path: Path) -> None:
    endless = CHATML.replace("<|im_end|>", "")
    data = prepare(write_jsonl(tmp_path / "a.jsonl", chat("a", "b")), endless)
    assert "does not learn to stop" in data.summary.notes[0]


def test_text_is_cut_in_pieces_of_which_none_is_lost(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", {"text": "".join(map(str, range(100)))})
    data = prepare(path)
    ids = [int(each) for at in range(len(data.training)) for each in data.training[at][0]]
    assert [len(data.training[at][0]) for at in range(len(data.training))][:-1] == [64] * (
        len(data.training) - 1
    )
    assert tiny_tokenizer().decode(ids) == "".join(map(str, range(100))) + "<|im_end|>"


def test_held_out_follows_from_the_record_alone(tmp_path: Path) -> None:
    given = many_chats(400)
    one = prepare(write_jsonl(tmp_path / "a.jsonl", *given), held_out=0.1)
    assert 20 < len(one.held_out) < 60
    turned = [
        {"conversations": [{"from": m["role"], "value": m["content"]} for m in each["messages"]]}
        for each in reversed(given)
    ]
    other = prepare(write_jsonl(tmp_path / "b.jsonl", *turned), held_out=0.1)
    held = [
        {tuple(data.held_out[i][0].tolist()) for i in range(len(data.held_out))}
        for data in (one, other)
    ]
    assert held[0] == held[1]
    trained = {tuple(one.training[i][0].tolist()) for i in range(len(one.training))}
    assert not trained & held[1]
    sample = sample_of(given[0], "messages")
    assert share_of(sample, 0) != share_of(sample, 1)


def test_text_makes_the_same_records_wherever_it_stands(tmp_path: Path) -> None:
    paragraphs = [f"paragraph {i} of a book\nwith a second line" for i in range(200)]
    (tmp_path / "a.txt").write_text("\n\n".join(paragraphs))
    (tmp_path / "b.txt").write_text("A preface.\r\n\r\n" + "\n\n\n".join(paragraphs[50:]))
    found = [
        [each.value for each in records.read_records(str(tmp_path / name)) if isinstance(each, records.RecordLine)]
        for name in ("a.txt", "b.txt")
    ]  # fmt: skip
    assert 5 < len(found[0]) < 40
    ends = [[str(value).splitlines()[-2] for value in each] for each in found]
    assert set(ends[1][1:]) <= set(ends[0])


def test_files_of_a_folder_are_read_in_order_and_one_may_be_of_another_schema(
    tmp_path: Path,
) -> None:
    write_jsonl(tmp_path / "b.jsonl", chat("a", "b"))
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "c.bin").write_bytes(b"\x00")
    (tmp_path / ".hidden.jsonl").write_text("no")
    data = prepare(tmp_path)
    assert data.summary.schemas == {"text": 1, "messages": 1}
    assert data.shown.startswith("⟦some text")


def test_a_function_of_the_machine_may_give_records(tmp_path: Path) -> None:
    (tmp_path / "site.py").write_text(
        "def ours():\n    return [{'prompt': 'a', 'completion': 'b'}, 5]\n"
    )
    with pytest.raises(ConfigError, match=r"site.py:ours\[1\]: it is of type int"):
        prepare_data(f"{tmp_path}/site.py:ours", tiny_tokenizer(), TABLE)


def test_one_file_of_all_members_is_compared(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", chat("a", "b"))
    digest = records.file_digest(str(path))
    assert len(prepare(path, source="shared", sha256=digest).training) == 1
    with pytest.raises(ConfigError, match="is not this run's data set"):
        prepare(path, source="shared", sha256="0" * 64)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", chat("a", "b"))
    with pytest.raises(ConfigError, match="and the model has 100"):
        prepare_data(str(path), tiny_tokenizer(), TABLE, vocabulary=100)


def test_parquet_is_read_by_row_groups(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    rows = arrow.Table.from_pylist([*many_chats(5), chat("last")])
    parquet.write_table(rows, path, row_group_size=2)
    with pytest.raises(ConfigError, match=r"a\.parquet:row 6: no message of it is an assistant's"):
        prepare(path)
