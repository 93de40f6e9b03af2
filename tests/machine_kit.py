"""A machine of its own with systemd as process 1: this machine's files under an overlay that goes
with it, in namespaces of systemd-nspawn.

    with Machine(lab.hosts[1].namespace, tmp_path) as machine:
        machine.run("systemctl", "is-system-running")
        machine.run("atoll", "service", "install", user="ada")

Nothing that it writes reaches the files of this machine, and no service of this machine runs in it.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = {
    "systemd-nspawn": "systemd-container",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "systemctl": "systemd",
    "loginctl": "systemd",
}
LOGIN, LOGIN_PACKAGES = (
    Path("/usr/share/pam-configs/systemd"),
    ("libpam-systemd", "dbus-user-session"),
)
PATIENCE_S = 60.0  # a bound for hangs
LOOK_S = 0.05

_START = """
set -e
mount -t tmpfs none "$1" && mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
rm -rf "$1/root/etc/systemd/system" "$1/root/var/log/journal" && mkdir "$1/root/etc/systemd/system"
for folder in $3; do while [ "$folder" != / ]; do
    [ ! -d "$1/root$folder" ] || chmod a+x "$1/root$folder"; folder=${folder%/*}; folder=${folder:-/}
done; done
root=$1/root network=$2; shift 3
status=133  # so it says that the machine boots again
while [ "$status" -eq 133 ]; do status=0; setpriv --pdeathsig KILL systemd-nspawn --quiet \\
    --register=no --keep-unit --console=pipe --hostname=machine --directory="$root" \\
    --network-namespace-path="/run/netns/$network" "$@" --boot || status=$?
done
exit "$status"
"""


class MachineError(Exception):
    """A machine did not start, or a command on it failed."""


def missing() -> str:
    """Why no machine can be had here, and what to do about it; "" when one can."""
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    packages = {TOOLS[tool] for tool in lacking} | (set() if LOGIN.exists() else {*LOGIN_PACKAGES})
    if packages:
        return f"apt-get install {' '.join(sorted(packages))}"
    return ""


class Machine:
    """A machine that has booted, in the network namespace ``network``. ``folder`` is empty and its
    own. A context manager. Raises MachineError.
    """

    def __init__(self, network: str, folder: Path) -> None:
        own = [ROOT, Path(sys.prefix), Path(sys.base_prefix)]
        shown = " ".join(str(path) for path in own)
        folder.mkdir(exist_ok=True)
        self._console = folder.with_suffix(".console")
        with self._console.open("wb") as console:
            self._shell = subprocess.Popen(
                [
                    *("unshare", "--mount", "--propagation", "private", "sh", "-c", _START, "sh"),
                    *(str(folder), network, shown),
                    *(f"--bind-ro={path}" for path in own),
                ],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
            )
        self.leader = 0
        self.users: dict[str, int] = {}
        try:
            self.booted()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Pull its plug. Idempotent."""
        self._shell.kill()
        self._shell.wait()

    def off(self) -> None:
        """Wait until it has powered itself off."""
        self._shell.wait(PATIENCE_S)

    def booted(self, after: int = 0) -> None:
        """Wait until its boot is over, one with another process 1 than ``after``."""

        def up() -> bool:
            if self._shell.poll() is not None:
                raise MachineError(f"it ended with {self._shell.returncode}: {self.console()}")
            self.leader = _child(_child(self._shell.pid))
            if self.leader in (0, after):
                return False
            found = self.call("systemctl", "is-system-running")
            return found.stdout.strip() in ("running", "degraded")

        self.wait(up, "it did not boot")

    def add_user(self, name: str) -> None:
        """A user, of whom systemd takes care without a login (lingering)."""
        self.run("useradd", "--create-home", name)
        self.run("loginctl", "enable-linger", name)
        self.users[name] = int(self.run("id", "-u", name))
        self.wait(
            lambda: (
                self.call("systemctl", "--user", "is-active", "basic.target", user=name).stdout
                == "active\n"
            ),
            "the user's own systemd did not start",
        )

    def command(self, *argv: str, user: str = "") -> list[str]:
        """The command line that runs ``argv`` on it, as root or as this user with a session."""
        before = ["nsenter", "--target", str(self.leader), "--all"]
        environment = ["HOME=/root"]
        if user:
            before += ["runuser", "-u", user, "--"]
            environment = [f"HOME=/home/{user}", f"XDG_RUNTIME_DIR=/run/user/{self.users[user]}"]
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        environment += [f"PATH={path}", "CI=1", "LANG=C.UTF-8"]
        return [*before, "env", "-i", "--chdir=/", *environment, *argv]

    def call(self, *argv: str, user: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command on it."""
        return subprocess.run(
            self.command(*argv, user=user),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=PATIENCE_S,
            check=False,
        )

    def run(self, *argv: str, user: str = "", status: int = 0) -> str:
        """The stdout of a command on it, which must end with ``status``."""
        done = self.call(*argv, user=user)
        if done.returncode != status:
            raise MachineError(
                f"{shlex.join(argv)}: status {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done.stdout

    def file(self, path: str) -> Path:
        """A file or folder of it, for this process."""
        return Path(f"/proc/{self.leader}/root{path}")

    def wait(self, what: Callable[[], bool], why: str) -> None:
        """Until something is so."""
        end = time.monotonic() + PATIENCE_S
        while not what():
            if time.monotonic() > end:
                raise MachineError(f"{why}: {self.console()}")
            time.sleep(LOOK_S)

    def console(self) -> str:
        """The end of what it wrote while it booted and ended."""
        return self._console.read_text(errors="replace")[-3000:]


def _child(pid: int) -> int:
    """The one child of a process; 0: it has none yet."""
    try:
        return int((Path(f"/proc/{pid}/task/{pid}/children").read_text().split() or ["0"])[0])
    except OSError:
        return 0
