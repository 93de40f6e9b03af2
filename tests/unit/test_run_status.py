"""A run's status: filled once, decoded from nodes of any version, and its figures everywhere."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from atoll.node.home.output import Terminal
from atoll.node.look.document import document
from atoll.node.look.frame import frame
from atoll.node.look.metrics import NodeDocuments, exposition
from atoll.node.look.view import EVERYTHING, RunPicture
from atoll.node.run.status import FIGURES, Figure, RunStatus, read_run_status
from atoll.node.views.documents import run_lines

SHOWN: dict[str, tuple[Any, str]] = {
    "left_s": (7300.0, "about 2 h 1 min, at the present pace"),
    "disk_bytes": (3 << 20, "3.0 MiB"),
}
"""Of each figure a value, and what people read for it."""


def test_a_status_is_its_own_document() -> None:
    status = RunStatus(run_id="abc", members=["p"], banned={"q": "why"}, progress=["ready", 1, 1])
    told = msgspec.json.decode(msgspec.json.encode(status))
    assert msgspec.json.encode(read_run_status(told)) == msgspec.json.encode(status)
    assert list(told) == [f.name for f in msgspec.structs.fields(RunStatus)]


def test_what_another_version_says_is_left_out() -> None:
    told = {"round": "many", "members": ["p", 7], "left_s": None, "coming": 1, "name": "tide"}
    assert read_run_status(told) == RunStatus(name="tide")


def test_each_figure_is_a_field_and_has_a_value_here() -> None:
    fields = {field.name for field in msgspec.structs.fields(RunStatus)}
    assert set(SHOWN) == {figure.field for figure in FIGURES} <= fields


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.field)
def test_text_page_live_view_and_metrics_show_a_figure(figure: Figure) -> None:
    value, words = SHOWN[figure.field]
    run = RunStatus(run_id="abc", **{figure.field: value})
    assert f"  {figure.label:7}  {words}" in run_lines(Terminal(no_color=True), run)
    assert len(run_lines(Terminal(no_color=True), RunStatus(run_id="abc"))) == 2, "nothing to say"
    view = RunPicture()
    view.take_status(run, {})
    found = document(view, 0.0)
    assert found["quick"]["figures"] == [[figure.label, words]]
    assert f"{figure.label} {words}" in "\n".join(frame(found, 200, 40))
    told = NodeDocuments({"runs": [msgspec.to_builtins(run)]}, {}, {"abc": EVERYTHING})
    line = f'{figure.metric}{{run="abc",run_name=""}} '
    (given,) = [row for row in exposition(told).decode().splitlines() if row.startswith(line)]
    assert float(given.removeprefix(line)) == value
