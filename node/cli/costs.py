"""What a run asks of a member, from its manifest: parameters, bytes a round, memory, disk, and what
the others see.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from ...collectives.codec_costs import most_exact, round_bytes_per_value
from ...collectives.codec_names import CODECS, MASKED_MEAN_BYTES
from ...collectives.codecs.accuracy import bytes_per_value, coarse_share, ladder
from ...optim.federated.methods import SUMS
from ...security.rule_names import parse_reducer
from ..home.output import bytes_text, count_text, span_text
from ..manifest import Manifest, adapters_of
from ..manifest.federated import PLAIN_LANES, masked_bits, privacy_lines
from ..manifest.limits import LimitsTable
from ..manifest.methods import counting, rounds_text
from ..manifest.optional_tables import liars_borne
from ..manifest.presets import growth_text, momentum_text, steps_of
from ..manifest.tables import AdaptersTable
from ..run.gain import DDP_BYTES
from ..views.documents import lying_text, rule_text
from .needs import FLOAT_BYTES, needs_document, needs_lines, needs_of

WARMUP_SHARE = 0.25  # of a run's steps: a longer warm-up is most of what it learns by


def no_id(manifest: Manifest) -> str:
    """What stands in the place of an id that is not known yet (`founding.id_of`)."""
    looked = " and the model's files" * manifest.model.pretrained
    return f"(its id follows from its founder's key{looked}: atoll new or atoll join says it)"


def describe(manifest: Manifest, down: float | None = None) -> dict[str, Any]:
    """A run's settings and costs, for JSON. Bytes are those of a round with many members; with n of
    them (n-1)/n of it. ``down``: bytes/s that a newcomer's link brings, where they are known.
    """
    parameters, settings = manifest.parameters, manifest.settings()
    federated = manifest.kind == "federated"
    found: dict[str, Any] = {
        "run_id": manifest.run_id,
        "name": manifest.name,
        "description": manifest.description,
        "contact": manifest.contact,
        "model": manifest.model.entry,
        "parameters": parameters,
        "data": manifest.data.source,
        "method": manifest.federated.method if federated else settings.method,
        "sync_every": settings.sync_every,
        "growth": settings.growth,
        "round_s": settings.round_s,
        "rounds": settings.rounds,
        "start_with": manifest.train.start_with,
        "kind": manifest.kind,
        "federated": msgspec.to_builtins(manifest.federated) if federated else None,
        "codec": "masked" if settings.secure else "fp32" if settings.btard else settings.codec,
        "error": settings.error,
        "codecs": settings.codecs,
        "rule": manifest.robust.reducer,
        "worker_momentum": manifest.robust.momentum,
        "lying": manifest.quorum.lying,
        "sums": sums_text(manifest),
        "bans": manifest.quorum.bans,
        "adapters": msgspec.to_builtins(manifest.adapters),
        "pretrained": _pretrained_document(manifest),
        "buffers": settings.buffers,
        "secure": msgspec.to_builtins(settings.secure),
        "btard": msgspec.to_builtins(settings.btard),
        "privacy": msgspec.to_builtins(settings.privacy),
        "outer": {
            "kind": settings.outer.kind,
            "lr": settings.outer.lr,
            "momentum": settings.outer.momentum,
            "momentum_dtype": settings.outer.momentum_dtype,
            "warmup": settings.outer.warmup,
            "hold": settings.outer.hold,
        },
        "join": manifest.join.policy,
        "limits": msgspec.to_builtins(manifest.limits),
        "keep_contributions": manifest.audit.keep_contributions,
        "evaluate": msgspec.to_builtins(manifest.evaluate),
    }
    if parameters is not None:
        value = (
            MASKED_MEAN_BYTES + masked_bits(manifest) // 8 * settings.secure.buckets
            if settings.secure
            else round_bytes_per_value(found["codec"])
            if settings.error is None
            else bytes_per_value(settings.error)
        )
        exact = 0.0  # for values of small tensors in fp32, at most
        if settings.exact and settings.codec in CODECS:
            exact = most_exact(settings.codec, parameters) * (FLOAT_BYTES - value)
        # Control variates travel beside the model.
        value += round_bytes_per_value("fp32") if SUMS[0] in settings.codecs else 0
        one_way = round(2 * (parameters * value + exact))
        found |= {
            "bytes_up_per_round": one_way,
            "bytes_down_per_round": one_way,
        }
        needs = needs_of(manifest)
        assert needs is not None
        found |= needs_document(needs, down)
        if settings.sync_every is not None:
            plain = DDP_BYTES * settings.sync_every
            found["ddp_ratio"] = 2 * (value + exact / parameters) / plain
    return found


def _entry_lines(manifest: Manifest) -> list[str]:
    """Who may enter, where that is not whoever shows an invite; and how a run with newcomers on
    probation begins.
    """
    join, least = manifest.join, manifest.least
    if join.policy == "allow":
        return [f"join     the {len(join.allow)} peers that the manifest names, and the organiser"]
    if join.policy == "invite":
        return []
    sentence = "join     whoever has the run's id"
    if join.probation:
        sentence += f", on probation for {join.probation} rounds"
    found = [
        sentence + (f"; at most {join.per_hour} become members in an hour" if join.per_hour else "")
    ]
    if join.probation and least > 1:  # nobody's work can be compared before there is a round
        found.append(
            f"{'':7}  the first round takes {least} members: let {least - 1} in yourself (atoll "
            "trust PEER; who is there: atoll peers)"
        )
    return found


def _data_text(described: dict[str, Any]) -> str:
    if described["model"].startswith("local:"):
        return "what your script reads; it never leaves this machine"
    return (
        "your own; it never leaves this machine"
        if described["data"] == "local"
        else described["data"]
    )


def _adapters_text(adapters: AdaptersTable) -> str:
    """Which factors train, and how members see that they have the same model beneath."""
    trains = {
        "plain": "both factors train",
        "alternate": "A and B train by turns of rounds",
        "ffa": "B trains, A stays as it was drawn",
    }[adapters.mode]
    compared = {
        "values": "names, shapes and values of what is frozen",
        "shapes": "names and shapes of what is frozen, not its values",
    }[adapters.base]
    return f"{adapters.mode}: {trains}; members compare by a digest {compared}"


def _steps_text(manifest: Manifest) -> str:
    """What a round does."""
    settings = manifest.settings()
    if manifest.kind == "federated":
        table = manifest.federated
        own = [f"Ditto with pull {table.pull:g}"] if table.own else []
        asked = [f"{_sample_text(table.sample)} a round"] if table.sample is not None else []
        return ", ".join(
            [
                table.method,
                *(f"{key} {getattr(table, key)}" for key in counting(table)),
                *own,
                *asked,
            ]
        )
    return (
        f"{settings.method}, outer {settings.outer.kind} lr {settings.outer.lr:g} momentum "
        + momentum_text(settings.outer, settings.rounds)
        + (" in bf16" if settings.outer.momentum_dtype == "bf16" else "")
    )


def _sample_text(sample: float) -> str:
    return (
        f"{sample} members drawn"
        if isinstance(sample, int)
        else f"{sample:.0%} of the members drawn"
    )


def _codec_text(described: dict[str, Any]) -> str:
    """The codec of what no pattern names; with a wished error, those that it picks."""
    error = described["error"]
    if error is None:
        return described["codec"]
    (fine, coarse), share = ladder(error), coarse_share(error)
    picked = fine if coarse is None or share < 5e-4 else f"{fine}, {coarse} for {share:.1%}"
    return f"{picked}: {error:g} of a round may be lost"


def sums_text(manifest: Manifest) -> str:
    """Whether what owners of parts state is checked, where some members may be hostile; "" in any
    other run."""
    rule, lying = parse_reducer(manifest.robust.reducer), manifest.quorum.lying
    if not lying:
        return (
            ""
            if rule is None or manifest.secure is not None
            else "not checked: the rule bounds what members contribute. One that changes its "
            "program plans itself as owner of all parts, and states any sum of them; [quorum] "
            "lying = 1 bears one"
        )
    if (plan := manifest.exchange.plan) != "butterfly":
        return f'each its owner\'s word: with plan = "{plan}" they are not checked'
    return (
        f"each part's is stated by {lying + 1} members, and decided where they state the same; "
        f"a round has {1 + lying / 2:g} times the bytes"
    )


def explain_rule(manifest: Manifest) -> list[str]:
    """What the values of [robust] mean, for people; empty where contributions are averaged."""
    robust, sentences = manifest.robust, list[str]()
    if robust.rule == "multi_krum":
        keep, near = robust.keep or "n-f", robust.neighbours or "n-f-2"
        source = "the paper's score" if near == "n-f-2" else "byzfl's score"
        sentences.append(
            f"the mean of the {keep} of n contributions that lie nearest to their {near} nearest "
            f"others ({source}); fewer kept are noisier"
        )
    if robust.rule == "krum" and robust.neighbours:
        sentences.append(
            f"the contribution nearest to its {robust.neighbours} nearest others; the paper "
            "takes n-f-2, byzfl n-f-1"
        )
    if robust.rule == "centred_clip" and robust.radius != "round":
        sentences.append(
            "clips at the median, over up to 50 rounds, of how far contributions lay from the "
            f"result, as members state it with theirs; until {2 * (robust.f or 0) + 1} of them do, "
            "at that of the same round"
        )
    elif robust.rule == "centred_clip":
        sentences.append(
            "clips at the median distance of the same round's contributions from where it starts"
        )
    if robust.momentum:
        sentences.append(
            f"each member contributes the running mean of its contributions, {robust.momentum:g} "
            f"of the last and {1 - robust.momentum:.3g} of the new: honest ones differ less. Who "
            "joins begins at zero, and is at full length after some "
            f"{3 / (1 - robust.momentum):.0f} rounds; it is in place of momentum in [train.outer]"
        )
    return sentences


def explain_evaluate(manifest: Manifest) -> str:
    """What [evaluate] means, or that nothing is evaluated and why, for people."""
    table, lying = manifest.evaluate, manifest.quorum.lying
    if table is None:
        return "nobody evaluates: without [evaluate] a run is not told whether averaging helps"
    every = "every round" if table.every == 1 else f"every {table.every} rounds"
    share = f"{100 * table.share:.3g} %"
    text = (
        "members whose script says how (attach(evaluate=)) compare each round's model with their "
        f"own weights before it on held-out data, {every} at most and for {share} of their time at "
        f"most. {table.rounds} readings in a row against averaging: V21"
    )
    if manifest.settings().outer.watch:
        return f"{text}, and the governor takes the plain mean, at all members from one entry"
    if manifest.train.outer.governor and lying:
        who = f"{lying} member{'s' if lying > 1 else ''}"
        return f"{text}; the governor says so and changes nothing, since {who} may lie"
    return f"{text}; with [train.outer] governor = true the outer step then takes the plain mean"


def describe_lines(manifest: Manifest, down: float | None = None) -> list[str]:
    """The same for people."""
    d = describe(manifest, down)
    every = f"{d['sync_every']} steps" if d["round_s"] is None else span_text(d["round_s"])
    size = (
        f"{count_text(d['parameters'])} parameters"
        if d["parameters"]
        else "as large as your script's"
    )
    lines = [
        *(_pretrained_lines(manifest) or [f"model    {d['model']}, {size}"]),
        f"data     {_data_text(d)}",
        f"rounds   {rounds_text(manifest, every)}, {_steps_text(manifest)}"
        + (f", {d['rounds']} in all" if d["rounds"] else ", without end")
        + (f"; the first waits for {d['start_with']} members" if (d["start_with"] or 1) > 1 else "")
        + (f"; {growth_text(manifest)}" if d["growth"] else ""),
    ]
    lines += [f"{'':7}  {each}" for each in schedule_lines(manifest)]
    if manifest.adapters != AdaptersTable():
        lines.append(f"adapters {_adapters_text(manifest.adapters)}")
    if d["buffers"]:
        declared = ", ".join(f"{pattern} {kind}" for pattern, kind in d["buffers"].items())
        lines.append(f"buffers  {declared}")
    if d["rule"] != "mean":
        lines.append(f"rule     {rule_text(d['rule'])}")
        if d["worker_momentum"]:
            lines.append(
                f"{'':7}  of running means: each member's contributions with momentum "
                f"{d['worker_momentum']:g}"
            )
    lines += _btard_lines(d)
    lines += _entry_lines(manifest)
    if d["lying"]:
        lines.append(f"lying    {lying_text(d['lying'], 0)}")
        if d["bans"] == "quorum":
            lines.append(
                f"{'':7}  who organises bans no member alone: {2 * d['lying'] + 1} members do"
            )
    if d["sums"]:
        lines.append(f"sums     {d['sums']}")
    lines += _wire_lines(manifest, d)
    if (needs := needs_of(manifest)) is not None:
        lines += needs_lines(needs, down)
    lines += _taken_lines(manifest)
    lines += _privacy_lines(manifest)
    lines.append("code     nothing is downloaded and executed")
    return lines


def _pretrained_document(manifest: Manifest) -> dict[str, Any] | None:
    """The same for JSON; None where there is none."""
    if not manifest.model.pretrained:
        return None
    lora = msgspec.to_builtins(adapters_of(manifest))
    return {**msgspec.to_builtins(manifest.model), "lora": lora}


def schedule_lines(manifest: Manifest) -> list[str]:
    """Where the learning rate's schedule does not end with the run, or hardly begins in it."""
    inner, made = manifest.train.inner, steps_of(manifest)
    own = manifest.model.entry.startswith("local:")  # a script has a schedule of its own
    if own or made is None or inner.samples is not None:
        return []
    lines = list[str]()
    ends = inner.steps if inner.schedule == "cosine" and inner.steps is not None else made
    if ends > made:
        left = 0.5 * (1 + math.cos(math.pi * made / ends))
        lines.append(
            f"the learning rate is still {left:.0%} of lr at the end: the run makes {made} steps, "
            f"its schedule {ends}; [train.inner] steps = {made}"
        )
    elif ends < made:
        lines.append(
            f"the last {made - ends} of {made} steps are made at 1 % of lr: "
            f"[train.inner] steps = {made}"
        )
    if inner.warmup > WARMUP_SHARE * made:
        lines.append(
            f"the learning rate warms up for {inner.warmup} of {made} steps: [train.inner] warmup "
            f"= {max(1, made // 20)}"
        )
    return lines


def _pretrained_lines(manifest: Manifest) -> list[str]:
    """Which pretrained model, under which licence, how large, and what of it trains; empty where
    the run has none.
    """
    model = manifest.model
    if not model.pretrained:
        return []
    where = getattr(model, model.entry)
    base, lora = model.base, adapters_of(manifest)
    if base is None:
        lines = [f"model    {where}, looked at when the run is founded (atoll new, atoll join)"]
    else:
        at = f" at {model.revision[:12]}" if model.hub is not None else ""
        licence = f"licence {base.licence}" if base.licence else "its licence is not known"
        files = f"{len(base.files)} file{'' if len(base.files) == 1 else 's'}"
        lines = [
            f"model    {where}{at}, {count_text(base.parameters)} parameters, {licence}"
            + (", gated: each member accepts it on the hub" if base.gated else ""),
            f"{'':7}  {bytes_text(base.size)} in {files}, compared by sha256",
        ]
    if lora is not None:
        layers = lora.targets if isinstance(lora.targets, str) else ", ".join(lora.targets)
        lines.append(
            f"trains   {'4-bit ' * (model.method == 'qlora')}LoRA of rank {lora.rank}, alpha "
            f"{lora.alpha:g}, on {layers}"
            + (f": {count_text(manifest.parameters)} parameters" if manifest.parameters else "")
        )
    else:
        lines.append("trains   all of it" + (f", in {model.dtype}" if base is not None else ""))
    return lines


def _taken_lines(manifest: Manifest) -> list[str]:
    """What other members, and a check of rounds, may take of this machine, where the manifest says
    so.
    """
    lines, limits, kept = list[str](), manifest.limits, manifest.audit.keep_contributions
    if limits != LimitsTable():
        lines.append(
            "limits   operations of one other member may take "
            f"{bytes_text(limits.member_bytes)} of memory and disk, of all others "
            f"{bytes_text(4 * limits.member_bytes)};"
        )
        lines.append(
            f"{'':7}  {limits.operations} at once, of {count_text(limits.operation_elements)} "
            "values at most"
        )
    if kept:
        lines.append(
            f"kept     this machine signs its contributions and keeps those to the newest {kept} "
            "entries of each log,"
        )
        lines.append(f"{'':7}  so that rounds can be recomputed (atoll audit RUN --recompute 5)")
    return lines


def _btard_lines(d: dict[str, Any]) -> list[str]:
    lines = list[str]()
    if d["btard"]:
        lines.append(
            (
                f"btard    vectors from public seeds, checked by {d['btard']['validators']} of "
                f"{len(d['btard']['peers'])} peers a round"
            )
            + (
                f", one of {d['btard']['intervals']} intervals of each"
                if d["btard"]["intervals"]
                else ""
            )
        )
        lines.append(
            f"{'':7}  {liars_borne(len(d['btard']['peers']))} that lie cannot end the run: who "
            "lies is removed on a proof, alone, and 3 must be left"
        )
    return lines


def _wire_lines(manifest: Manifest, d: dict[str, Any]) -> list[str]:
    """What a round takes of the link."""
    lines = list[str]()
    codecs = ", ".join(
        [_codec_text(d), *(f"{codec} for {pattern}" for pattern, codec in d["codecs"].items())]
    )
    if d["parameters"]:
        wire = (
            f"wire     up to {bytes_text(d['bytes_up_per_round'])} up and as much "
            f"down a round ({codecs})"
        )
        lines.append(
            wire
            + (
                f"; {100 * (1 - d['ddp_ratio']):.1f}% less than bf16 gradients every step"
                if d.get("ddp_ratio", 1) < 1
                else ""
            )
        )
    else:
        times = (
            f"{2 * manifest.secure.buckets + 1} times the parameters in float32"
            if manifest.secure
            else "twice the encoded parameters"
        )
        lines.append(f"wire     {times} ({codecs}) up and down a round")
    return lines


def _privacy_lines(manifest: Manifest) -> list[str]:
    lines = list[str]()
    if manifest.kind == "federated":
        lines += [
            f"{'privacy' if number == 0 else '':7}  {line}"
            for number, line in enumerate(privacy_lines(manifest))
        ]
    else:
        address = "your IP address (not with --relay-only)"
        way = (
            "bytes on the way are encrypted"
            if manifest.lanes.encrypt
            else f"{PLAIN_LANES} ([lanes] encrypt = false)"
        )
        what = "your averaged update, how much you trained"
        what += ", your losses on held-out data" if manifest.evaluate is not None else ""
        lines.append(f"privacy  members see {what}, and {address}; {way}")
    return lines
