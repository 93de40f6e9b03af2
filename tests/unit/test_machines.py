"""Examples for machines that come and go do nothing but start `atoll join`, with less time to end
than the system gives.
"""

from __future__ import annotations

import re
import subprocess

from click import Command
from house import ROOT

from atoll.node.cli import cli

FOLDER = ROOT / "scripts" / "examples" / "machines"
GIVEN_S = {"slurm.sh": 60, "sky.yaml": 30, "kubernetes.yaml": 30}


def test_all_are_here_and_give_less_than_they_have() -> None:
    assert {path.name for path in FOLDER.iterdir()} == GIVEN_S.keys()
    join = cli.get_command(None, "join")  # type: ignore[arg-type]
    assert isinstance(join, Command)
    known = {option for param in join.params for option in param.opts}
    for name, seconds in GIVEN_S.items():
        text = (FOLDER / name).read_text()
        (call,) = re.findall(r"exec atoll (join .*)|args: \[(join, .*)\]", text)
        words = re.split(r"[ ,\"]+", "".join(call))
        assert {word for word in words if word.startswith("--")} <= known
        assert float(words[words.index("--drain") + 1]) < seconds
    assert "terminationGracePeriodSeconds: 30" in (FOLDER / "kubernetes.yaml").read_text()
    assert "--signal=B:TERM@60" in (FOLDER / "slurm.sh").read_text()


def test_the_slurm_script_is_shell() -> None:
    subprocess.run(["bash", "-n", FOLDER / "slurm.sh"], check=True)


def test_the_image_copies_every_folder_of_the_package() -> None:
    text = (ROOT / "scripts" / "Containerfile").read_text()
    for folder in ("collectives", "security", "optim", "node"):
        assert f"COPY {folder} /src/{folder}\n" in text
    assert "ATOLL_HOME=/state" in text
    assert "VOLUME /state" in text
