"""new, validate, export, rm: a run's manifest, its result, and its end on this machine."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...collectives.codec_names import CODECS
from ...collectives.errors import ConfigError, StateError, StorageError
from ..home.durations import duration_s
from ..home.output import bytes_text, current
from .costs import describe, describe_lines, explain_evaluate, explain_rule, no_id, schedule_lines
from .daemon import finished_words, running
from .founding import founding_of, id_of, keep_founding
from .invites import addresses_in_use, check_addresses, fresh_invite
from .needs import machine_document, machine_lines, needs_of, this_machine
from .options import GIVEN, RUN, GivenPath, asking_options, shared_options
from .templates import MODEL_LINE, TEMPLATES, with_model

if TYPE_CHECKING:
    from ..home.output import Terminal
    from ..manifest import Manifest, SignedManifest

PRIVACY_FILE = "privacy"

COLUMN = 35  # of comments in the example


def _choices(names: Iterable[str]) -> str:
    """A comment of all that may stand in a place."""
    lines = textwrap.wrap(" | ".join(names), 98 - COLUMN)
    return f"\n{COLUMN * ' '}# ".join(lines)


EXAMPLE = """\
# A run's manifest. Its hash is the run: whoever changes a value makes another run.
#     atoll new run.toml
schema = 1
name = "my-run"
description = "a byte-level GPT on the text that ships with Python"

[model]
entry = "builtin:gpt"              # or "local:NAME": every member brings the same model in her own
                                   # script, without the next two lines
config = { width = 128, layers = 4, heads = 4, context = 64 }
init = "seed:1337"
# buffers = { "*.codebook" = "mean" }  # of your own model: "mean" | "same" | "own", what members
                                   # do with what training changes in them (docs/buffers.md)

[data]
source = "builtin:stdlib-text"     # or "local": a member's own text, atoll join RUN --data FILE

[train]
method = "diloco"                  # or "local_sgd"
sync_every = 20                    # inner steps a round; or round_s = 60.0
# rounds = 500                     # where the run ends; without, it goes on until everybody has
#                                  # left
start_with = 2                     # the first round waits for so many members; Enter, or atoll
                                   # begin RUN, begins without. Left out, who is first trains alone,
                                   # and uses up the short rounds that a run like this begins with

[train.inner]
optimizer = "adamw"
lr = 2e-3
steps = 2000                       # length of the cosine schedule
batch = 8

# [train.outer]                    # without it the new model is the mean of the members' models,
#                                  # in runs like this with short rounds first, and momentum later
# preset = "published"             # DiLoCo's values, or another preset: docs/presets.md
# optimizer = "nesterov"           # or values of your own: these three, in place of preset
# lr = 0.7
# momentum = 0.9
# warmup = 20                      # lr and momentum grow over so many rounds, after `hold` of them

[exchange]
codec = "int8_dither"              # CODECS
# error = 0.05                     # in place of codec: what a round may lose picks a codec for each
#                                  # tensor (docs/operating/links.md)
# codecs = { "*.norm.*" = "bf16" }  # for tensors whose names match
# exact = false                    # all others in that codec; if left out, running statistics and
#                                  # small tensors travel in fp32
# plan = "two-level"               # sums within a site (atoll up --site LABEL) before they cross to
#                                  # others; butterfly | ring | two-level | three-level (labels
#                                  # SITE/HOST: within a machine first)
# tree = { lab = { box-1 = 4, box-2 = 4 }, home = 1 }  # in place of plan: places and how many peers
#                                  # each (docs/operating/links.md); atoll validate RUN.toml --draw
# check = true                     # ... and another member of the site adds up what its head does;
#                                  # default: in federated runs

# [robust]                         # members may be hostile, as far as their contributions go:
#                                  # docs/operating/hostile.md
# rule = "trimmed_mean"            # mean (of trusted members) | median | trimmed_mean | meamed |
#                                  # krum | multi_krum | mda | geometric_median | centred_clip | caf
#                                  # | flag
# f = 1                            # of the contributions of a round, which needs 2 f + 1
#                                  # contributors (krum, multi_krum: 2 f + 3)
# before = ["nnm"]                 # steps before the rule: nnm | arc | bucketing2 | clipping10
# momentum = 0.8                   # members contribute running means, so that honest ones differ
#                                  # less

# [btard]                          # training that anybody can do again from public seeds: who gives
#                                  # another result is found, proven and removed;
# validators = 1                   # needs kind = "seeded" at the top, [join] policy = "allow" with
#                                  # all peers, and a script with SeededTraining:
#                                  # docs/operating/hostile.md

# [quorum]
# lying = 1                        # though so many members do anything at all, the log stays one:
#                                  # takes 3 lying + 1 members
# bans = "organiser"               # with lying, "quorum": a ban by the organiser evicts no member
#                                  # by itself; 2 lying + 1 members that ban it do

# [adapters]                       # LoRA: docs/adapters.md
# mode = "ffa"                     # plain | alternate | ffa: which factors train, and whether their
#                                  # mean is that of the products
# base = "values"                  # what is compared of frozen parameters; "shapes" for QLoRA

# kind = "federated"               # at the top of the file: data stay at home, see
#                                  # docs/operating/private.md; [train.outer] is then [federated]
# [federated]
# method = "fedavg"                # fedavg | fedavgm | fedadam | fedyogi | fedadagrad; sites of
#                                  # unlike speed: fedasync | fedbuff | fedfix | fedcompass
# [secure]                         # nobody sees more than the sum of at least so many
#                                  # contributions; not with [robust]
# threshold = 3
# [privacy]                        # each contribution bounded, with noise; a site stops before it
#                                  # has spent stop_at_epsilon; needs [secure]
# noise = 2.0                      # and  clip, delta, stop_at_epsilon, and  rounds  under [train]

[evaluate]                         # members compare a round's model with their own weights on
                                   # held-out data, and are told when averaging does not help
# share = 0.01                     # of their time, at most; every = 1: rounds apart, at least
# rounds = 3                       # readings in a row that speak against it (docs/presets.md)

[checkpoint]
every = 10                         # rounds
""".replace("CODECS", _choices(CODECS))


@click.command("validate")
@click.argument("manifest", type=GivenPath(dir_okay=False, path_type=Path), metavar="RUN.toml")
@click.option(
    "--explain",
    is_flag=True,
    help=(
        "Say where the outer optimizer's values come from, what those of [robust] and [evaluate] "
        "mean, and how large [privacy] noise is, too."
    ),
)
@click.option(
    "--peers",
    default=4,
    show_default=True,
    type=click.IntRange(1, 100_000),
    help=(
        "How many peers you expect, for the noise of --explain, and for --draw where [exchange] "
        "has no tree."
    ),
)
@click.option("--draw", is_flag=True, help="Draw the tree over which a part is added up, too.")
@shared_options
def validate_command(manifest: Path, explain: bool, peers: int, draw: bool) -> None:
    """Check a run's manifest and say what it means."""
    from ...collectives.swarm import LEAST_SITES
    from ..manifest import load_manifest
    from ..manifest.federated import noise_text, privacy_lines, site_lines, too_few_sites
    from ..manifest.methods import check_work
    from ..manifest.presets import explain_outer
    from .drawing import tree_of

    terminal = current()
    found = load_manifest(manifest)
    check_work(found, manifest.name)
    asked = click.get_current_context().get_parameter_source("peers")
    if asked is click.core.ParameterSource.COMMANDLINE and (few := too_few_sites(found, peers)):
        raise ConfigError(
            f"{manifest.name}: {few}",
            key="$.secure.threshold",
            code="E414",
            why="Every round would wait for ever.",
            hint="A smaller [secure] threshold, or more sites."
            if found.secure is not None and found.secure.threshold > LEAST_SITES
            else "More sites: of fewer than three, each would know the other's.",
        )
    run_id = id_of(terminal, found)
    head = terminal.style(f"{found.name}  {run_id or no_id(found)}", sys.stdout, bold=True)
    lines = describe_lines(found)
    described = {"valid": True, **describe(found), "run_id": run_id or None}
    described["schedule"] = schedule_lines(found)
    needs, machine = needs_of(found), this_machine(terminal.paths.state_dir)
    lines += machine_lines(needs, machine)
    described |= machine_document(needs, machine)
    if sites := site_lines(found, peers):
        lines += [f"{'' if number else 'sites':7}  {line}" for number, line in enumerate(sites)]
        described["sites"] = sites
    if explain:
        outer = explain_outer(found)
        lines.append(f"why      outer values: {outer}")
        described["explained"] = {"outer": outer} | (
            {"who_sees_what": privacy_lines(found)} if found.kind == "federated" else {}
        )
        if rule := explain_rule(found):
            lines += [
                f"{'why' if number == 0 else '':7}  {'rule: ' if number == 0 else ''}{sentence}"
                for number, sentence in enumerate(rule)
            ]
            described["explained"]["rule"] = rule
        evaluate = described["explained"]["evaluate"] = explain_evaluate(found)
        lines.append(f"{'':7}  evaluations: {evaluate}")
        if (noise := noise_text(found, peers)) is not None:
            lines.append(f"noise    {noise}")
            described["explained"]["noise"] = noise
    text = [head, *(f"  {line}" for line in lines)]
    if draw:
        drawing = tree_of(found, peers)
        described["tree"] = drawing.document
        text += ["", *drawing.lines(terminal.width)]
    terminal.data("\n".join(text), described)


@click.command("new")
@click.argument(
    "manifest", type=GivenPath(dir_okay=False, path_type=Path), metavar="RUN.toml", required=False
)
@click.option(
    "--example", is_flag=True, help="Print a manifest to start from, and do nothing else."
)
@click.option(
    "--template",
    type=click.Choice(sorted(TEMPLATES)),
    help="Print the manifest for this purpose, and do nothing else.",
)
@click.option(
    "--model",
    type=GIVEN,
    metavar="ORG/NAME|PATH",
    help="For --template finetune, pretrain: a model of the hub, a folder or a GGUF file.",
)
@click.option(
    "--bootstrap",
    multiple=True,
    type=GIVEN,
    metavar="ADDRESS",
    help="Address to put into the invite; repeatable.",
)
@click.option(
    "--expires",
    default="7d",
    show_default=True,
    help="How long the invite is valid: 90s, 30min, 12h, 7d.",
)
@click.option(
    "--from",
    "start",
    type=GivenPath(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Start from the model or adapter that atoll export or atoll split wrote there.",
)
@click.option(
    "--name",
    type=GIVEN,
    metavar="NAME",
    help="The run's name in place of the one in the file: another run.",
)
@shared_options
def new_command(
    manifest: Path | None,
    example: bool,
    template: str | None,
    model: str | None,
    bootstrap: tuple[str, ...],
    expires: str,
    start: Path | None,
    name: str | None,
) -> None:
    """Check and sign a run's manifest; print its id and an invite.

    The run is stored on this machine; whoever signed it is its organiser. Nothing starts yet: atoll
    join RUN

    --from: the run begins with that model, not with the parameters that the organiser's script, or
    the manifest's seed, would give it. Without RUN.toml its settings are those of the run that was
    exported: atoll new --from DIR --name NAME
    """
    from ..records.beginnings import check_unbegun, keep_start, weights_in

    terminal = current()
    if example:
        terminal.data(EXAMPLE.rstrip(), {"example": EXAMPLE})
        return
    if template is not None or model is not None:
        text = _template(template, model)
        terminal.data(text.rstrip(), {"template": template, "text": text})
        return
    found, life_s = _settings(manifest, start, name), duration_s(expires)
    check_addresses(bootstrap)
    terminal.paths.ensure()
    founding = founding_of(terminal, found, manifest.parent if manifest is not None else Path())
    signed, known = founding.signed, founding.known
    weights = weights_in(start) if start is not None else None
    if known and weights is not None:
        check_unbegun(terminal.paths, signed, weights)
    folder = keep_founding(terminal, founding)
    if weights is not None:
        keep_start(weights, folder)
    invite = why = ""
    try:
        addresses = addresses_in_use(terminal, bootstrap, signed)
        invite = fresh_invite(terminal, signed, addresses, life_s).encode()
    except (
        ConfigError
    ) as error:  # the run is made all the same; an invite can be had when there is an address
        why = error.message
    finished = ""
    if (client := running(terminal)) is not None:
        with client:
            finished = finished_words(client, signed.run_id) if known else ""
    lines = [
        f"run     {signed.run_id}  {found.name}",
        f"invite  {invite}" if invite else "invite  none yet",
    ]
    terminal.data(
        "\n".join(lines),
        {
            "run_id": signed.run_id,
            "name": found.name,
            "organiser": signed.organiser,
            "invite": invite or None,
            "known": known,
            "finished": bool(finished),
        },
    )
    if known:
        terminal.say(
            "This machine knows the run already, since the same settings are the same run: nothing "
            "begins anew. For another run change anything in the file, such as its name."
        )
    if why:
        first = "atoll up --background && " * (client is None)
        each = " --name SITE, once for each site" * found.names_sites
        terminal.say(f"No invite yet: {why}. Type  {first}atoll invite new {found.name}{each}")
    terminal.say(finished or f"Train in it: atoll join {signed.run_id[:8]}")


def _template(template: str | None, model: str | None) -> str:
    """The text of a template, with this model where one is named."""
    text = TEMPLATES.get(template or "", "")
    if model is None:
        return text
    if MODEL_LINE not in text:
        raise click.UsageError(
            "--model is for --template finetune or pretrain; a file says its own model"
        )
    return with_model(text, model)


def _settings(manifest: Path | None, start: Path | None, name: str | None) -> Manifest:
    """Those of the file, else those of the run that was exported."""
    from ..manifest import load_manifest
    from ..records.beginnings import exported_manifest, renamed

    if manifest is not None:
        found = load_manifest(manifest)
    elif start is not None:
        found = exported_manifest(start)
    else:
        raise click.UsageError("RUN.toml is missing; atoll new --example prints one to start from")
    return found if name is None else renamed(found, name)


@click.command("export")
@click.argument("run", type=RUN)
@click.argument("folder", type=GivenPath(file_okay=False, path_type=Path), metavar="DIR")
@click.option("--force", is_flag=True, help="Replace files that are there.")
@click.option(
    "--adapter",
    type=GivenPath(exists=True, file_okay=False, path_type=Path),
    metavar="PEFT_DIR",
    help=(
        "Where no script ran on this machine: what save_pretrained wrote of the PEFT model before "
        "training. Such an adapter is written."
    ),
)
@click.option(
    "--dtype",
    type=click.Choice(("float32", "bfloat16", "float16")),
    help="Convert floating tensors; default: as trained.",
)
@click.option(
    "--merge",
    is_flag=True,
    help="Of adapters on a pretrained model: write the whole model, with the adapters merged in.",
)
@click.option(
    "--shard-size",
    type=click.IntRange(1_000_000),
    metavar="BYTES",
    help="Write a model of transformers that is larger in several files of so many bytes (5 GB).",
)
@click.option(
    "--credit",
    multiple=True,
    type=GIVEN,
    metavar="NAME",
    help="Name a member who agreed to stand on the model's card; repeatable. Nobody else is named.",
)
@shared_options
def export_command(
    run: str,
    folder: Path,
    force: bool,
    adapter: Path | None,
    dtype: str | None,
    merge: bool,
    shard_size: int | None,
    credit: tuple[str, ...],
) -> None:
    """Write a run's model as safetensors that load without atoll.

    RUN is an id, its beginning, or a name. Written: model.safetensors with all that the script's
    state_dict() has, the model's own configuration and tokenizer, atoll.json, a card (README.md);
    of a PEFT model the folder that PeftModel.from_pretrained loads. What is not the whole model is
    called partial.safetensors.
    """
    from ...collectives.round_settings import MOST_REPLAYED
    from ..manifest import load_run
    from ..records.export import export_run
    from ..records.sharding import LARGEST

    terminal = current()
    signed = load_run(terminal.paths, run)
    if merge:
        _merge(terminal, signed, folder, dtype, shard_size or LARGEST, credit, force=force)
        return
    done = export_run(
        terminal.paths,
        signed,
        folder,
        force=force,
        adapter=adapter,
        dtype=dtype,
        largest=shard_size or LARGEST,
        credited=credit,
    )
    human = (
        f"{folder}  round {done.round}, {done.parameters:,} parameters in {len(done.tensors)} "
        f"tensors, {bytes_text(done.bytes)}"
    )
    terminal.data(
        human,
        {
            "run_id": signed.run_id,
            "folder": folder,
            "round": done.round,
            "parameters": done.parameters,
            "bytes": done.bytes,
            "files": done.files,
            "load": done.load,
            "missing": done.missing,
            "notes": done.notes,
        },
    )
    if done.missing:
        terminal.say(f"This is not the whole model. Missing: {'; '.join(done.missing)}")
    for note in done.notes:
        terminal.say(note)
    _say_untrained(terminal, done.round)
    every = min(signed.open().checkpoint.every, MOST_REPLAYED)
    if every > 1:
        terminal.say(
            f"This is the newest checkpoint; the node writes one every {every} rounds "
            "([checkpoint] every), and at the run's last."
        )
    what = "Load what there is" if done.missing else "Load it"
    terminal.say(f"{what}: {done.load}")
    if "adapter_config.json" in done.files and (where := _base_in_words(terminal, signed)):
        terminal.say(where)


def _base_in_words(terminal: Terminal, signed: SignedManifest) -> str:
    """How the model is loaded that an adapter lies on; "": a script of somebody's own knows."""
    from ..records.model_card import base_loaded

    model = signed.open().model
    if not (line := base_loaded(model)):
        return ""
    said = f"There, model is the base: {line}"
    if model.hub is None:
        from ..recipes.models.bringing import base_folder

        folder = base_folder(terminal.paths, signed.run_id)
        said += f"; on this machine from_pretrained({str(folder)!r})" if folder is not None else ""
        said += ". Without a base: atoll export RUN DIR --merge"
    return said


def _merge(
    terminal: Terminal,
    signed: SignedManifest,
    folder: Path,
    dtype: str | None,
    largest: int,
    credited: Sequence[str],
    *,
    force: bool,
) -> None:
    """Export the adapter, and write the model that it and its base are together. Raises
    ConfigError, StorageError.
    """
    import tempfile

    from ..manifest import adapters_of
    from ..records.export import export_run

    manifest = signed.open()
    if adapters_of(manifest) is None:
        raise ConfigError(
            f"{manifest.name} has no adapters on a pretrained model that atoll knows",
            key="--merge",
            hint="Leave --merge out; adapters of a script of your own: merge_and_unload() of peft.",
            exit_code=2,
        )
    from ..recipes.models.bringing import base_folder
    from ..recipes.models.merging import merge_adapter

    base = base_folder(terminal.paths, signed.run_id)
    if base is None:
        raise StateError(
            "the run's pretrained model is not on this machine",
            exit_code=73,
            hint="atoll join RUN brings it; the adapter alone needs none: leave --merge out.",
        )
    if folder.exists() and any(folder.iterdir()) and not force:
        raise StorageError(
            f"{folder} is not empty",
            why="Nothing is replaced unasked.",
            hint="Add --force, or give another folder.",
            exit_code=73,
        )
    with tempfile.TemporaryDirectory() as made:
        done = export_run(terminal.paths, signed, Path(made))
        difference = merge_adapter(
            base, Path(made), folder, dtype, manifest.model.hub or "", largest
        )
    _write_card(terminal, signed, folder, done.round, credited)
    files = sorted(path.name for path in folder.iterdir())
    load = f'transformers.AutoModelForCausalLM.from_pretrained("{folder}")'
    terminal.data(
        f"{folder}  round {done.round}, merged; its logits in float32 differ by {difference:.2g} "
        "of their size",
        {
            "run_id": signed.run_id,
            "folder": folder,
            "round": done.round,
            "difference": difference,
            "files": files,
            "load": load,
        },
    )
    _say_untrained(terminal, done.round)
    terminal.say(f"Load it: import transformers; model = {load}")


def _say_untrained(terminal: Terminal, round_: int) -> None:
    if round_ == 0:
        terminal.say(
            "Nothing was trained yet: no round is committed, and this is the model that the run "
            "begins with."
        )


def _write_card(
    terminal: Terminal,
    signed: SignedManifest,
    folder: Path,
    round_: int,
    credited: Sequence[str],
) -> None:
    """The card of a merged model."""
    from ..home.paths import write_atomic
    from ..records.model_card import CARD_FILE, card_of, energy_in, evaluation_in, worked_in

    card = card_of(
        signed,
        round_,
        worked=worked_in(terminal.paths, signed),
        evaluation=evaluation_in(terminal.paths.run_dir(signed.run_id)),
        energy=energy_in(terminal.paths.run_dir(signed.run_id)),
        credited=credited,
        how='import transformers; model = transformers.AutoModelForCausalLM.from_pretrained(".")',
        merged=True,
    )
    write_atomic(folder / CARD_FILE, card, 0o644)


@click.command("rm")
@click.argument("run", type=RUN)
@asking_options
@shared_options
def rm_command(run: str) -> int:
    """Forget a run that this machine is not in any more: its log, its model and its events are
    deleted here.

    RUN is an id, its beginning, or a name. Leave it first: atoll leave RUN. What a site has spent
    of its privacy stays, so that it still counts if the site joins again.
    """
    from ..home.refusals import storage_error
    from ..manifest import load_run
    from .daemon import running

    terminal = current()
    signed = load_run(terminal.paths, run)
    name, given = signed.open().name, signed.run_id[:8]
    client = running(terminal)
    if client is not None:
        with client:
            if any(entry.get("run_id") == signed.run_id for entry in client.runs()):
                raise StateError(
                    f"this node is in {name} ({given})",
                    exit_code=73,
                    hint=f"atoll leave {given}, then: atoll rm {given}",
                )
    folder = terminal.paths.run_dir(signed.run_id)
    size = sum(
        file.stat().st_size
        for file in folder.rglob("*")
        if file.is_file() and not file.is_symlink()  # a pretrained model stays where it is
    )
    if not terminal.confirm(f"Delete {bytes_text(size)} of {name} ({given}) for good?"):
        return 1
    try:
        kept = _forget(folder)
    except OSError as error:
        raise storage_error(f"cannot delete {folder}", error) from None
    terminal.data(
        f"{name} ({given}) is forgotten; {bytes_text(size)} are free",
        {"run_id": signed.run_id, "name": name, "bytes": size, "kept": kept},
    )
    return 0


def _forget(folder: Path) -> list[Path]:
    """Delete a run's folder but for what counts on re-entry; what is left. Raises OSError."""
    # Without its manifest a run is none: an interruption leaves files, and no half of a run.
    (folder / "manifest").unlink()
    files = [path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()]
    for path in files:
        if path.name != PRIVACY_FILE:
            path.unlink()
    folders = sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True)
    for path in [*folders, folder]:
        if not any(path.iterdir()):
            path.rmdir()
    return [path for path in files if path.name == PRIVACY_FILE]
