"""A site's own data, by a function in a file of its own: `site_data()` in a script, ``atoll join
--data`` for the built-in recipe.

Which file is a setting of the machine that has the data (``[data] factory`` in its ``atoll.toml``,
``ATOLL_DATA__FACTORY``, ``--data``), and is in no manifest, invite or message: what an organiser or
a peer says never names code that is run here.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from ...collectives.errors import ConfigError
from ...collectives.foreign import shown
from .config import Loaded, load_config
from .paths import Paths, find_paths
from .site_files import import_site_file

if TYPE_CHECKING:
    from torch.utils.data import Dataset

FORM = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)")
KEY = "data.factory"
PATH_KEY = "data.path"
LEAST = 2  # samples of a site
HINT = "FILE.py:NAME, a function without arguments that returns a torch Dataset"


@runtime_checkable
class SiteData(Protocol):
    """A site's samples by index, as a map-style ``torch.utils.data.Dataset`` has them. A factory in
    a file of the site's own returns one, and a DataLoader takes it as it is. In ``site.py``:

        def ours():
            rows = torch.from_numpy(numpy.load("patients.npy"))
            return torch.utils.data.TensorDataset(rows[:, :-1], rows[:, -1])

    Then ``atoll config set data.factory /srv/site.py:ours``, and in the script `site_data()`.
    """

    def __len__(self) -> int:
        """How many samples there are."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """A sample; index 0 to len - 1."""
        ...


def is_factory(where: str) -> bool:
    """Whether ``where`` has the form FILE.py:NAME."""
    return FORM.fullmatch(where) is not None


def factory_of(paths: Paths, environ: Mapping[str, str] = os.environ) -> str:
    """The factory that this machine's settings name, or an empty string. Raises ConfigError.

    A line on stderr names an ``atoll.toml`` of the current folder that is left aside because nobody
    has trusted it.
    """
    return factory_in(_loaded(paths, environ))


def data_of(paths: Paths, environ: Mapping[str, str] = os.environ) -> str:
    """What this machine's settings name for a built-in model to train on (`data_in`), told of an
    untrusted file as `factory_of` tells.
    """
    return data_in(_loaded(paths, environ))


def _loaded(paths: Paths, environ: Mapping[str, str]) -> Loaded:
    loaded = load_config(paths, environ=environ)
    if loaded.unused:
        print(f"atoll: {shown(loaded.unused)}", file=sys.stderr, flush=True)
    return loaded


def factory_in(loaded: Loaded) -> str:
    """The factory that these settings name, or an empty string. A path in a settings file is
    relative to that file, one in the environment to the current folder."""
    return _named(loaded, loaded.config.data.factory, KEY)


def data_in(loaded: Loaded) -> str:
    """What these settings name for a built-in model to train on: a factory, else a file or folder,
    else an empty string.
    """
    return factory_in(loaded) or _named(loaded, loaded.config.data.path, PATH_KEY)


def _named(loaded: Loaded, where: str, key: str) -> str:
    origin = loaded.origins.get(key, "")
    if not where or not Path(origin).is_absolute():  # files are absolute, variables are not
        return where
    return str(Path(origin).parent / Path(where).expanduser())


def site_data(
    where: str | None = None, *, home: str | None = None, environ: Mapping[str, str] = os.environ
) -> Dataset[Any]:
    """This site's data: what the factory returns that its settings name, or ``where``
    (FILE.py:NAME) if that is given.

    Raises ConfigError where none is named, the file is missing or does not define it, or it returns
    something else or nothing. What the file or the factory raises itself comes through as it is.
    """
    where = where or factory_of(find_paths(home), environ)
    if not where:
        raise ConfigError(
            "this machine's settings name no data",
            key=KEY,
            why="Where data lie is said by the site that has them, not by the run.",
            hint=(
                "atoll config set data.factory /path/site.py:make  (a function that returns a "
                "torch Dataset), or atoll join --data site.py:make"
            ),
        )
    data: Any = made_in_file(where, KEY, HINT)
    if not isinstance(data, SiteData):
        why = (
            "It has no length or cannot be indexed. A stream (IterableDataset) has no number of "
            "samples to count a site by."
        )
        raise ConfigError(
            f"{where} returns a {type(data).__name__}, which is no data set",
            key=KEY,
            why=why,
            hint=HINT,
        )
    if len(data) < LEAST:
        raise ConfigError(
            f"{where} returns a data set of {'no samples' if len(data) < 1 else 'one sample'}",
            key=KEY,
            why="Of one nothing can be held out, and what a site gives would be that one's alone.",
            hint="Look at what it reads. A site with less takes part together with another.",
        )
    for sentence in oddities(data):
        print(f"atoll: {where}: {sentence}", file=sys.stderr, flush=True)
    from ...optim.data.declared import declare

    declare(len(data))
    return cast("Dataset[Any]", data)  # which takes no more than that


def example_ledger(name: str, *, home: str | None = None) -> Path:
    """The file in which this machine counts what is spent of the privacy of one data set's
    examples, over all runs (`optim.modes.privacy.examples.PrivateExamples`). ``name``: the data
    set's, of letters, digits, dots, dashes and underscores. Raises ConfigError for another.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ConfigError(
            f"{name!r} is no name of a data set",
            key="name",
            hint='1 to 64 letters, digits, dots, dashes and underscores, such as "patients-2026"',
        )
    return find_paths(home).state_dir / "examples" / f"{name}.json"


def oddities(data: Any) -> list[str]:
    """What of a data set of tensors will not train as it is meant, a sentence each. Others are not
    looked into: what reading one sample costs, only the site knows.
    """
    tensors: Any = getattr(data, "tensors", None)
    if not isinstance(tensors, tuple):
        return []
    found = list[str]()
    for at, each in enumerate(cast("tuple[Any, ...]", tensors)):
        if each.is_floating_point():
            bad = int((~each.isfinite()).reshape(len(each), -1).any(1).sum())
            if bad:
                found.append(
                    f"{bad} of {len(each)} samples hold NaN or infinity (part {at} of a sample). "
                    "What is trained with them is NaN and is not contributed: fill them in, or "
                    "leave those samples out"
                )
    labels = cast("tuple[Any, ...]", tensors)[-1]
    if (
        len(cast("tuple[Any, ...]", tensors)) > 1
        and labels.dim() == 1
        and len(labels.unique()) == 1
    ):
        found.append(
            f"all {len(labels)} samples are of one class ({labels[0].item()}). The model learns to "
            "say it here; that is no fault where other sites have the others"
        )
    return found


def made_in_file(where: str, key: str, hint: str) -> object:
    """What the function NAME of a local FILE.py returns, ``where`` being FILE.py:NAME. Raises
    ConfigError, naming ``key``, where there is none.
    """
    return _function(where, key, hint)()


def _function(where: str, key: str, hint: str) -> Callable[[], object]:
    parts = FORM.fullmatch(where)
    if parts is None or "://" in where:
        raise ConfigError(
            f"{where!r} is not FILE.py:NAME",
            key=key,
            why="A function in a file of this machine is meant.",
            hint=hint,
        )
    path = Path(parts["file"]).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"there is no file {path}",
            key=key,
            why=f"It is to define {parts['name']}().",
            hint=hint,
        )
    try:
        module = import_site_file(path)
    except (OSError, SyntaxError) as error:
        raise ConfigError(f"cannot read {path}: {error}", key=key, hint=hint) from None
    function: Any = getattr(module, parts["name"], None)
    if not callable(function):
        what = "nothing" if function is None else f"a value of type {type(function).__name__}"
        raise ConfigError(
            f"{path} defines {what} named {parts['name']!r}, and no such function",
            key=key,
            hint=hint,
        )
    return function
