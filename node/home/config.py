"""This node's settings: flag > ``ATOLL_NODE__PORT`` > ./atoll.toml > the user's config.toml >
default. Unknown keys are errors.

``./atoll.toml`` counts only where it is named or trusted (`local_settings`)."""

from __future__ import annotations

import math
import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ...collectives.errors import ConfigError
from ...collectives.foreign import WORDS
from ..net.transport.addresses import everywhere
from .bandwidth import bytes_per_s
from .endpoint import Endpoint, endpoint_of
from .hours import Hours, hours_of
from .local_settings import local_settings, read_settings, unused_words
from .paths import Paths, write_atomic
from .strict_toml import Address, convert, parse_toml

ENV_PREFIX = "ATOLL_"
DEFAULT_PORT = 4150

Addresses = Annotated[tuple[Address, ...], msgspec.Meta(max_length=64)]


class NodeTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[node]``: how this machine takes part in the network."""

    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = DEFAULT_PORT  # 0: any free port
    listen: Addresses = ()  # multiaddrs; empty: /ip4/0.0.0.0/tcp/PORT and /ip6/::/tcp/PORT
    bootstrap: Addresses = ()  # peers to ask first, beside those of invites and of the peer cache
    # addresses that others should dial, where they differ (a forwarded port)
    announce: Addresses = ()
    # TCP port for bulk data; 0: any free port.
    lane_port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 0
    max_up: str = ""  # what bulk data may send, such as 20Mbit/s; empty: no limit
    max_down: str = ""  # and receive
    hours: str = ""  # of the day in which scripts of this machine train, such as 22-06; empty: all
    # seconds that it may take to end, once told to: less than what the system gives
    drain_s: Annotated[float, msgspec.Meta(ge=1, le=3600)] = 30.0
    # where `atoll up` serves metrics to Prometheus, such as :9464 on loopback; empty: nowhere
    metrics: Annotated[str, msgspec.Meta(max_length=300)] = ""
    # the same label at all nodes of one fast network, or SITE/HOST: the same SITE there, and the
    # same HOST at all nodes of one machine
    site: Annotated[
        str,
        msgspec.Meta(
            pattern=r"\A(?=.{0,64}\Z)([A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)?)?\Z",
            description="at most 64 letters, digits, dots, dashes, underscores; or two, SITE/HOST",
        ),
    ] = ""


class NodeNetworkTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[network]``: what this node does to be found without being told."""

    lan_discovery: bool = True  # find peers in the house by multicast DNS, and be found
    port_mapping: bool = True  # behind a router, ask it to lead a port here (NAT-PMP, UPnP)
    # be a node of the DHT: find members of runs there, be found, and keep records for others
    dht: bool = True
    # No member learns this machine's address: only bootstrap nodes and relays do.
    relay_only: bool = False
    # behind a symmetric router, or towards one: find a port for a direct lane by guessing, where
    # both ends do
    port_guessing: bool = False


class NodeDataTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[data]``: what this machine has to train on. Of the machine, never of a run: no manifest
    has such a key.
    """

    # FILE.py:NAME, a function that returns a torch Dataset (`site_data`)
    factory: Annotated[
        str,
        msgspec.Meta(
            pattern=r"\A(.+\.py:[A-Za-z_]\w*)?\Z",
            max_length=4096,
            description="FILE.py:NAME, a function that returns a Dataset",
        ),
    ] = ""
    # A file or folder of records, for the built-in models; `factory` goes before it.
    path: Annotated[
        str,
        msgspec.Meta(
            max_length=4096, pattern=WORDS, description="a path without control characters"
        ),
    ] = ""


class NodeModelsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[models]``: pretrained models of this machine."""

    # hand the base of a run on to members that lack it; one that is gated never is
    share: bool = True


class NotifyTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``[notify]``: who is told of verdicts on this machine's runs."""

    # a program and its arguments, run without a shell (`service.judging.Notifier`)
    command: Annotated[str, msgspec.Meta(max_length=4096)] = ""


class NodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of a node."""

    node: NodeTable = NodeTable()
    network: NodeNetworkTable = NodeNetworkTable()
    data: NodeDataTable = NodeDataTable()
    models: NodeModelsTable = NodeModelsTable()
    notify: NotifyTable = NotifyTable()

    @property
    def listen_addresses(self) -> tuple[str, ...]:
        return self.node.listen or everywhere(self.node.port)

    @property
    def notify_command(self) -> tuple[str, ...]:
        """What is run for each verdict, in words; none where nothing is set. Raises ConfigError."""
        try:
            return tuple(shlex.split(self.notify.command))
        except ValueError as error:
            raise ConfigError(
                f"notify.command cannot be read: {error}",
                key="$.notify.command",
                code="E413",
                why=(
                    "It is a program and its arguments, with quotes as in a "
                    "shell; no shell runs it."
                ),
                hint="""notify.command = "notify-send atoll" """.strip(),
            ) from None

    @property
    def hours(self) -> Hours | None:
        """When scripts may train; None: always. Raises ConfigError."""
        return hours_of(self.node.hours, "node.hours")

    @property
    def metrics(self) -> Endpoint | None:
        """Where metrics are served; None: nowhere. Raises ConfigError."""
        return endpoint_of(self.node.metrics, "node.metrics")

    @property
    def limits(self) -> tuple[int, int]:
        """What bulk data may take up and down, in bytes/s; 0 for no limit. Raises ConfigError."""
        return bytes_per_s(self.node.max_up, "node.max_up"), bytes_per_s(
            self.node.max_down, "node.max_down"
        )


class Loaded(msgspec.Struct, frozen=True):
    """Settings and, for each dotted key that is not a default, where its value came from.

    ``unused``: one line for a person about a file of the current folder that was left aside; ""
    when there is none."""

    config: NodeConfig
    origins: dict[str, str]
    unused: str = ""


def load_config(
    paths: Paths,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    named: str | None = None,
) -> Loaded:
    """The settings in use. ``flags``: dotted key → value from the command line; None values do not
    count. ``named``: a settings file in place of ``./atoll.toml``. Raises ConfigError."""
    table: dict[str, Any] = {}
    origins: dict[str, str] = {}
    local = local_settings(paths, environ, named=named)
    texts = [(paths.config_file, read_settings(paths.config_file))]
    if local is not None and local.trusted:
        texts.append((local.path, local.text))
    for file, text in texts:
        if text is not None:
            _merge(table, entries(text, file), str(file), origins)
    for key, value in _from_environment(environ).items():
        _merge(table, _nested(key, value), f"{ENV_PREFIX}{key.replace('.', '__').upper()}", origins)
    for key, value in (flags or {}).items():
        if value is not None and value != ():
            _merge(table, _nested(key, value), "command line", origins)
    unused = unused_words(local) if local is not None and not local.trusted else ""
    return Loaded(convert(table, NodeConfig, "settings"), origins, unused)


def entries(text: str, file: Path) -> dict[str, Any]:
    """The tables of a settings file, checked. Raises ConfigError."""
    found = parse_toml(text, str(file))
    convert(found, NodeConfig, str(file))
    return found


def flat(config: NodeConfig) -> dict[str, Any]:
    """Dotted key → value, all of them."""
    return {
        f"{table}.{key}": value
        for table, rows in msgspec.to_builtins(config).items()
        for key, value in rows.items()
    }


def set_value(paths: Paths, key: str, text: str) -> Any:
    """Set a dotted key in the user's config.toml, keeping the rest, and return the value. Raises
    ConfigError, StorageError.
    """
    if key not in flat(NodeConfig()):
        close = _close_key(key)
        raise ConfigError(
            f"there is no setting {key!r}",
            key=f"$.{key}",
            why="",
            hint=f"Did you mean `{close}`?" if close else "All of them: atoll config show",
        )
    kept = read_settings(paths.config_file)
    table = parse_toml(kept, str(paths.config_file)) if kept is not None else {}
    value = _typed(key, text)
    _merge(table, _nested(key, value), "", {})
    config = convert(table, NodeConfig, f"{key} = {text}")
    _check(config.node, key)
    command = config.notify_command
    if key == "notify.command":
        _check_command(command)
    paths.ensure()
    write_atomic(paths.config_file, _toml(table).encode())
    return value


def _check(node: NodeTable, key: str) -> None:
    """Raise ConfigError where a node would not start with what ``key`` says."""
    from ..net.transport import dnsaddr
    from ..net.transport.addresses import check_announce, check_listen, split_peer

    match key:
        case "node.max_up" | "node.max_down":
            bytes_per_s(getattr(node, key.removeprefix("node.")), key)
        case "node.hours":
            hours_of(node.hours, key)
        case "node.metrics":
            endpoint_of(node.metrics, key)
        case "node.listen":
            for address in node.listen:
                check_listen(address)
        case "node.bootstrap":
            for address in node.bootstrap:
                (dnsaddr.split if address.startswith(dnsaddr.PREFIX) else split_peer)(address)
        case "node.announce":
            for address in node.announce:
                check_announce(address)
        case _:
            pass


def _check_command(command: tuple[str, ...]) -> None:
    """Raise ConfigError where the node, in a folder of its own, could not run it."""
    program = command[0] if command else ""
    if not program or (
        (os.path.isabs(program) or os.sep not in program) and shutil.which(program) is not None
    ):
        return
    here = Path(program).expanduser().absolute()
    if not here.exists():
        hint = "Give the whole path of a program, or the name of one that is installed."
    elif not os.access(here, os.X_OK) or here.is_dir():
        hint = f"chmod +x {shlex.quote(str(here))}"
    else:
        whole = shlex.join([str(here), *command[1:]])
        hint = f"atoll config set notify.command {shlex.quote(whole)}"
    raise ConfigError(
        f"notify.command names {program!r}, which the node cannot run",
        key="$.notify.command",
        code="E413",
        why="Else nobody would hear of a verdict. The node runs it without a shell, in another "
        "folder.",
        hint=hint,
    )


def _close_key(key: str) -> str:
    """The known dotted key most like ``key``, or an empty string."""
    import difflib

    known = list(flat(NodeConfig()))
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5) or [
        k for k in known if k.endswith(f".{key}")
    ]
    return close[0] if close else ""


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """``ATOLL_NODE__PORT=4160`` as ``node.port``; other ``ATOLL_…`` names have no ``__``."""
    found = dict[str, Any]()
    for name, text in environ.items():
        if name.startswith(ENV_PREFIX) and "__" in name:
            key = name.removeprefix(ENV_PREFIX).replace("__", ".").lower()
            if key not in flat(NodeConfig()):
                close = _close_key(key)
                meant = (
                    f"Did you mean {ENV_PREFIX}{close.replace('.', '__').upper()}?"
                    if close
                    else "See the settings: atoll config show"
                )
                raise ConfigError(
                    f"the environment variable {name} sets no setting", key=f"$.{key}", hint=meant
                )
            found[key] = _typed(key, text)
    return found


def _typed(key: str, text: str) -> Any:
    """Text from the environment or the command line as the type of the setting; lists are separated
    by commas.
    """
    default = flat(NodeConfig())[key]
    if isinstance(default, (list, tuple)):
        return [part.strip() for part in text.split(",") if part.strip()]
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise ConfigError(
                f"{key} is {text!r}, neither true nor false",
                key=f"$.{key}",
                hint=f"{key} = false turns it off",
            )
        return text == "true"
    if isinstance(default, int | float):
        try:
            number = type(default)(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(
                f"{key} is {text!r}, not a {'whole ' if isinstance(default, int) else ''}number",
                key=f"$.{key}",
                hint=f"For example {key} = {default}",
            )
        return number
    return text


def _nested(key: str, value: Any) -> dict[str, Any]:
    table, _, name = key.partition(".")
    return {table: {name: list(value) if isinstance(value, tuple) else value}}


def _merge(into: dict[str, Any], new: dict[str, Any], origin: str, origins: dict[str, str]) -> None:
    for table, rows in new.items():
        for key, value in rows.items():
            into.setdefault(table, {})[key] = value
            origins[f"{table}.{key}"] = origin


def _toml(table: dict[str, Any]) -> str:
    """TOML text of tables of strings, numbers, truths and lists of strings. JSON's notation of
    these is TOML's, too.
    """
    import json

    blocks = [
        f"[{name}]\n"
        + "".join(
            f"{key} = {json.dumps(value, ensure_ascii=True)}\n" for key, value in rows.items()
        )
        for name, rows in table.items()
    ]
    return "\n".join(blocks)
