"""What a run asks of a member, from its manifest: parameters, bytes a round, disk, and what the others see."""

from __future__ import annotations

from typing import Any

from ...collectives.codecs.names import round_bytes_per_value
from ..manifest import Manifest
from .output import bytes_text, count_text, span_text
from .views import rule_text

_STATE_BYTES = 8  # float32 anchor and momentum on disk
_DDP_BYTES = 2  # bf16 gradients in a ring all-reduce every step: the comparison that "less than DDP" means


def describe(manifest: Manifest) -> dict[str, Any]:
    """A run's settings and costs, for JSON. Bytes are those of a round with many members; with n of them (n-1)/n of it."""
    parameters = manifest.parameters
    settings = manifest.settings()
    found: dict[str, Any] = {
        "run_id": manifest.run_id,
        "name": manifest.name,
        "description": manifest.description,
        "contact": manifest.contact,
        "model": manifest.model.entry,
        "parameters": parameters,
        "data": manifest.data.source,
        "method": settings.method,
        "sync_every": settings.sync_every,
        "round_s": settings.round_s,
        "rounds": settings.rounds,
        "codec": settings.codec,
        "codecs": settings.codecs,
        "rule": settings.reducer,
        "outer": {"kind": settings.outer.kind, "lr": settings.outer.lr, "momentum": settings.outer.momentum},
        "join": manifest.join.policy,
    }
    if parameters is not None:
        one_way = round(2 * parameters * round_bytes_per_value(settings.codec))
        found |= {"bytes_up_per_round": one_way, "bytes_down_per_round": one_way, "disk_bytes": parameters * _STATE_BYTES}
        if settings.sync_every is not None:
            found["ddp_ratio"] = round_bytes_per_value(settings.codec) / (_DDP_BYTES * settings.sync_every)
    return found


def _data_text(described: dict[str, Any]) -> str:
    if described["model"] != "builtin:gpt":
        return "what your script reads; it never leaves this machine"
    return "your own; it never leaves this machine" if described["data"] == "local" else described["data"]


def describe_lines(manifest: Manifest) -> list[str]:
    """The same for people."""
    d = describe(manifest)
    every = f"{d['sync_every']} steps" if d["sync_every"] is not None else span_text(d["round_s"])
    size = f"{count_text(d['parameters'])} parameters" if d["parameters"] else "as large as your script's"
    lines = [
        f"model    {d['model']}, {size}",
        f"data     {_data_text(d)}",
        f"rounds   every {every}, {d['method']}, outer {d['outer']['kind']} lr {d['outer']['lr']:g} momentum {d['outer']['momentum']:g}"
        + (f", {d['rounds']} in all" if d["rounds"] else ", without end"),
    ]
    if d["rule"] != "mean":
        lines.append(f"rule     {rule_text(d['rule'])}")
    codecs = ", ".join([d["codec"], *(f"{codec} for {pattern}" for pattern, codec in d["codecs"].items())])
    if d["parameters"]:
        wire = f"wire     up to {bytes_text(d['bytes_up_per_round'])} up and as much down a round ({codecs})"
        lines.append(
            wire + (f"; {100 * (1 - d['ddp_ratio']):.1f}% less than bf16 gradients every step" if d.get("ddp_ratio", 1) < 1 else "")
        )
        lines.append(f"disk     {bytes_text(d['disk_bytes'])} for the newest state, and two rounds of results")
    else:
        lines.append(f"wire     twice the encoded parameters ({codecs}) up and down a round")
    lines.append("privacy  members see your averaged update, how much you trained, and your IP address; bytes on the way are encrypted")
    lines.append("code     nothing is downloaded and executed")
    return lines
