#!/usr/bin/env python
"""Fine-tune random two-layer models of many architectures as a user types it, and load what is
exported elsewhere. Each architecture is named as a folder and trained by LoRA and in full: two
members, each with a file and a home of its own, three rounds that their sessions commit, and
`atoll export` by both. The sessions play in one process and in virtual time (`LocalSwarm`); all else
is the product's: the run is founded from a text, the model found, bound, brought and loaded, the
recipe trains. With --typed two nodes of the command line do all of it, in minutes a case.

An environment without atoll (links to all packages but it; `find_spec("atoll")` is None there) then
loads the folders by transformers and peft. A case is well where

* both members' folders give the same logits, and those are the logits of the run's model (the base,
  loaded as members load it, with the anchor of the last checkpoint put into it), bit for bit;
* they are not the base's;
* with LoRA, merged in float32: logits within 1e-5 of the size of the adapter's, and the same
  greedy tokens.

    ./scripts/check_architectures.py FOLDER
    ./scripts/check_architectures.py FOLDER --only gemma2,mixtral --dtype bfloat16
    ./scripts/check_architectures.py FOLDER --only llama --typed

Goes on behind what stands in FOLDER. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shutil
import site
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts" / "bench")]

import random_models  # noqa: E402
import torch  # noqa: E402
from bench_finetune import TypedHome  # noqa: E402
from exporting_kit import write_checkpoint  # noqa: E402

from atoll.node.cli import run as command  # noqa: E402
from atoll.node.home.paths import find_paths  # noqa: E402
from atoll.node.local import LocalSwarm  # noqa: E402
from atoll.node.manifest import (  # noqa: E402
    adapters_of,
    decode_manifest,
    load_manifest,
    load_run,
    save_run,
    sign_manifest,
)
from atoll.node.recipes.finetune.loop import FineTuning  # noqa: E402
from atoll.node.recipes.finetune.preparing import prepare_data  # noqa: E402
from atoll.node.recipes.finetune.train import settings_of_run  # noqa: E402
from atoll.node.recipes.models.bringing import base_folder, bring_model  # noqa: E402
from atoll.node.recipes.models.finding import find_model  # noqa: E402
from atoll.node.recipes.models.loading import load_model  # noqa: E402
from atoll.node.records.export import read_info, verified_checkpoint  # noqa: E402
from atoll.security.identity import Identity  # noqa: E402

ELSEWHERE = Path(__file__).with_name("_load_elsewhere.py")
DEFAULT = (
    *("llama", "llama_tied", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"),
    *("gemma2", "gemma3", "phi3", "gpt2", "gpt_neox"),
)
ALONE = ("falcon",)  # whose packed documents see one another
METHODS = ("lora", "full")
ROUNDS, HIDDEN, NEARLY = 3, 64, 1e-5
IDS = [[(7 * row + 3 * at) % 300 + 5 for at in range(24)] for row in range(3)]


def write_records(path: Path, word: str) -> Path:
    """Short conversations."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{word} {number}"},
                {"role": "assistant", "content": f"the {word} answers {number % 7}"},
            ]
        }
        for number in range(120)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def settings(architecture: str, method: str, dtype: str) -> str:
    """The run's text."""
    packing = "packing = false\n" * (architecture in ALONE)
    return (
        f'schema = 1\nname = "{architecture.replace("_", "-")}-{method}"\n'
        f'[model]\nfolder = "base"\nmethod = "{method}"\ndtype = "{dtype}"\n'
        f'[data]\nsource = "local"\nlength = 64\nheld_out = 0.1\n{packing}'
        f"[train]\nsync_every = 2\nrounds = {ROUNDS}\nstart_with = 2\n"
        f"[train.inner]\nlr = 1e-2\nsteps = {2 * ROUNDS}\ntokens_per_step = 128\n"
        "[checkpoint]\nevery = 1\n"
    )


class WithFolder:
    """A member of a LocalSwarm whose run has a folder, as a node's has."""

    def __init__(self, member: Any, folder: Path) -> None:
        self._member, self.model_folder = member, folder / "model"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._member, name)


def train(folder: Path, architecture: str, method: str, dtype: str) -> dict[str, Any]:
    """Two members to the run's end; what each exported lies in FOLDER."""
    base, files = begin(folder, architecture, method, dtype)
    founder = find_paths(folder / "one")
    founder.ensure()
    found = find_model(load_manifest(folder / "run.toml"), folder, founder.cache_dir)
    signed = sign_manifest(found.manifest, Identity.generate())
    run_id, names = signed.run_id, ("one", "two")

    def script(swarm: Any) -> list[int]:
        name = names[swarm.index]
        paths = find_paths(folder / name)
        paths.ensure()
        kept = save_run(paths, signed)
        manifest = decode_manifest(signed.manifest)
        brought = bring_model(paths, run_id, manifest.model, base)
        loaded, how = (
            load_model(brought, manifest.model, adapters_of(manifest)),
            settings_of_run(manifest),
        )
        data = prepare_data(str(files[name]), loaded.tokenizer, how.data, folder=kept)
        rounds = list[int]()
        member = FineTuning(
            loaded.model,
            loaded.tokenizer,
            data,
            how,
            WithFolder(swarm, kept),  # type: ignore[arg-type]
            folder=kept,
            say=lambda record: (
                rounds.append(len(record["contributors"])) if record["event"] == "round" else None
            ),
        )
        while not member.finished():
            member.step()
            member.after_step()
        assert member.attachment is not None
        layout, view = member.attachment._flat.layout, swarm.anchor()
        write_checkpoint(kept, run_id, layout, view)
        view.release()
        member.finish()
        return rounds

    contributors = LocalSwarm(2, settings=signed.open().settings()).run(script, step_s=1.0)[0]
    for name in names:
        given = ["--home", str(folder / name), "export", run_id]
        typed([*given, str(folder / f"out-{name}")])
    if method == "lora":
        typed(["--home", str(folder / "one"), "export", run_id, str(folder / "merged"), "--merge"])
    return {"run": run_id, "contributors": contributors}


def typed(words: list[str]) -> None:
    """A command line, in this process. Raises RuntimeError where it fails."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = command(words)
    if status:
        raise RuntimeError(f"atoll {' '.join(words)}: {status}\n{out.getvalue()}")


def begin(folder: Path, architecture: str, method: str, dtype: str) -> tuple[Path, dict[str, Path]]:
    """The model's folder, the settings, and a file of records for each member."""
    base = random_models.write_model(folder / "base", architecture, hidden=HIDDEN)
    (folder / "run.toml").write_text(settings(architecture, method, dtype), encoding="utf-8")
    files = {
        "one": write_records(folder / "mine.jsonl", "swarm"),
        "two": write_records(folder / "other.jsonl", "model"),
    }
    return base, files


def train_typed(folder: Path, architecture: str, method: str, dtype: str) -> dict[str, Any]:
    """As `train`, by two nodes and commands of their own."""
    base, files = begin(folder, architecture, method, dtype)
    one, two = (TypedHome(folder / name) for name in ("one", "two"))
    given = "--yes --no-input --threads 1"
    one.start(f"atoll join {folder / 'run.toml'} --data {files['one']} {given}")
    invite = one.until(lambda: re.search(r"atoll2:[\w-]+", one.said()), "invite").group()
    two.start(f"atoll join {invite} --data {files['two']} --model {base} {given}")
    one.end()
    two.end()
    rounds = {each["round"]: each for each in one.rounds()}
    run_id = str(rounds[ROUNDS]["run"])
    for home in (one, two):
        home.run(f"atoll export {run_id} {folder / f'out-{home.home.name}'}")
    if method == "lora":
        one.run(f"atoll export {run_id} {folder / 'merged'} --merge")
    contributors = [len(rounds[number]["contributors"]) for number in sorted(rounds)]
    return {"run": run_id, "contributors": contributors}


def logits_of_run(home: Path, run_id: str) -> Any:
    """Of the run's model: what a member begins with, with the anchor of the last checkpoint."""
    paths = find_paths(home)
    manifest, base = load_run(paths, run_id).open(), base_folder(paths, run_id)
    checkpoint = paths.run_dir(run_id) / "checkpoint"
    saved = verified_checkpoint(checkpoint)
    assert base is not None
    assert saved is not None
    assert saved.rounds == ROUNDS
    model: Any = load_model(base, manifest.model, adapters_of(manifest)).model
    named = dict(model.named_parameters())
    with torch.no_grad():
        for spec in read_info(checkpoint).layout.tensors:
            values = saved.anchor[spec.offset : spec.offset + spec.numel]
            named[spec.name].copy_(values.view(spec.shape))
        ids = torch.tensor(IDS)
        return model.eval()(input_ids=ids, use_cache=False).logits.float().contiguous()


def packages_without_atoll(folder: Path) -> Path:
    """Links to all packages of this environment but atoll."""
    made = folder / "packages"
    if not made.exists():
        made.mkdir()
        for packages in site.getsitepackages():
            for path in Path(packages).iterdir():
                if "atoll" not in path.name.lower():
                    (made / path.name).symlink_to(path)
    return made


def load_elsewhere(top: Path, folder: Path, method: str, dtype: str) -> tuple[Any, dict[str, Any]]:
    """Logits and greedy tokens by name: base, one, two, merged."""
    from safetensors.torch import load_file

    base, outs = str(folder / "base"), [str(folder / f"out-{name}") for name in ("one", "two")]
    jobs: list[Any] = [["base", base, None, dtype]]
    for name, out in zip(("one", "two"), outs, strict=True):
        jobs.append([name, base, out, dtype] if method == "lora" else [name, out, None, None])
    if method == "lora":
        jobs.append(["adapter", base, outs[0], "float32"])
        jobs.append(["merged", str(folder / "merged"), None, "float32"])
    given: dict[str, Any] = {
        "packages": str(packages_without_atoll(top)),
        "ids": IDS,
        "jobs": jobs,
        "out": str(folder / "logits.safetensors"),
    }
    command = [sys.executable, "-I", "-S", str(ELSEWHERE)]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, cwd="/")
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return load_file(given["out"]), json.loads(done.stdout.splitlines()[-1])


def judge(top: Path, folder: Path, found: dict[str, Any]) -> dict[str, Any]:
    """What holds of a run that has ended."""
    method, dtype = found["method"], found["dtype"]
    logits, said = load_elsewhere(top, folder, method, dtype)
    mine = logits_of_run(folder / "one", found["run"])
    found["twins"] = bool((logits["one"] == logits["two"]).all())
    found["equal"] = bool((logits["one"] == mine).all())
    found["learned"] = not bool((logits["one"] == logits["base"]).all())
    if method == "lora":
        apart = (logits["merged"] - logits["adapter"]).norm() / logits["adapter"].norm()
        found["merged"] = float(apart)
        found["same_text"] = said["merged"] == said["adapter"]
    exact = dtype == "float32" or method == "full"  # merged weights are rounded to the base's type
    good = found["twins"] and found["equal"] and found["learned"]
    near = found.get("merged", 0.0) <= NEARLY and found.get("same_text", True)
    found["well"] = good and (near or not exact)
    return found


def play(top: Path, architecture: str, method: str, dtype: str, *, typed: bool) -> dict[str, Any]:
    """One case, from nothing."""
    folder = top / f"{architecture}-{method}-{dtype}{'-typed' * typed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    found = {"architecture": architecture, "method": method, "dtype": dtype, "typed": typed}
    way = train_typed if typed else train
    try:
        return judge(top, folder, found | way(folder, architecture, method, dtype))
    except Exception as error:
        return found | {"well": False, "error": f"{type(error).__name__}: {error}"}


def main() -> int:
    """1 where a case is not well."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where all of it lies")
    parser.add_argument("--only", default=",".join(DEFAULT), help="architectures, or all")
    parser.add_argument("--method", choices=METHODS, action="append")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--typed", action="store_true", help="two real nodes, by commands")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    began_s, top = time.monotonic(), options.folder.absolute()
    top.mkdir(parents=True, exist_ok=True)
    kept, known = top / "cases.jsonl", list[dict[str, Any]]()
    if kept.exists():
        known = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]
    names = options.only.split(",") if options.only != "all" else [*random_models.ARCHITECTURES]
    found = list[dict[str, Any]]()
    for architecture in names:
        for method in options.method or METHODS:
            case: dict[str, Any] = {"architecture": architecture, "method": method}
            case |= {"dtype": options.dtype, "typed": options.typed}
            before = [each for each in known if each["well"] and case.items() <= each.items()]
            if not before:
                before = [play(top, **case)]
                with kept.open("a", encoding="utf-8") as file:
                    print(json.dumps(before[0]), file=file)
                print(json.dumps(before[0]), file=sys.stderr, flush=True)
            found.append(before[-1])
    wrong = [f"{each['architecture']} {each['method']}" for each in found if not each["well"]]
    print(
        json.dumps(
            {
                "cases": len(found),
                "architectures": len(names),
                "dtype": options.dtype,
                "typed": options.typed,
                "contributors": Counter(str(each.get("contributors")) for each in found),
                "equal": sum(each.get("equal", False) for each in found),
                "worst_merged": max((each.get("merged", 0.0) for each in found), default=None),
                "same_text": sum(each.get("same_text", False) for each in found),
                "wrong": wrong,
                "wall_s": round(time.monotonic() - began_s, 1),
            }
        )
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
