"""A site's own data, by a function in a file of its own: `site_data()` in a script, ``atoll join
--data`` for the built-in recipe.

Which file is a setting of the machine that has the data (``[data] factory`` in its ``atoll.toml``,
``ATOLL_DATA__FACTORY``, ``--data``), and is in no manifest, invite or message: what an organiser or
a peer says never names code that is run here.
"""

from __future__ import annotations

import importlib.util
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

if TYPE_CHECKING:
    from torch.utils.data import Dataset

FORM = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)")
KEY = "data.factory"
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
    loaded = load_config(paths, environ=environ)
    if loaded.unused:
        print(f"atoll: {shown(loaded.unused)}", file=sys.stderr, flush=True)
    return factory_in(loaded)


def factory_in(loaded: Loaded) -> str:
    """The factory that these settings name, or an empty string. A path in a settings file is
    relative to that file, one in the environment to the current folder."""
    where, origin = loaded.config.data.factory, loaded.origins.get(KEY, "")
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
    if len(data) < 1:
        raise ConfigError(
            f"{where} returns a data set of no samples", key=KEY, hint="Look at what it reads."
        )
    return cast("Dataset[Any]", data)  # which takes no more than that


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
    found = importlib.util.spec_from_file_location(f"atoll_{path.stem}", path)
    assert found is not None, path  # the suffix says how it is read
    assert found.loader is not None, path
    folder = str(path.absolute().parent)
    if folder not in sys.path:  # last: for what lies beside it, in nothing's place
        sys.path.append(folder)
    module = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
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
