"""Names of free-standing operations: what a member must know to take part in one without having
called it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec
from blake3 import blake3

from ....collectives.codec_names import DEFAULT_CHUNK_ELEMENTS, chunk_elements, unknown_codec
from ....collectives.errors import ConfigError
from ....collectives.foreign import quoted
from ....collectives.group import MAX_STAR, Config, Member, TopologyKind
from ....collectives.groups import group_fault, group_of
from ....collectives.reducers import REDUCERS, codec_fault, operation_codec, words_each
from ....collectives.round import Shape
from ....collectives.script_swarm import MAX_TAG, TAG, Call
from ....collectives.swarm import MOST_OPERATION_ELEMENTS
from ....security.rules.reducers import find_reducer
from ...session.other_logs import PREFIX, is_operation
from ...session.shapes import shape_of

_TAG = re.compile(TAG)
MAX_NUMEL = MOST_OPERATION_ELEMENTS

MASKED_SUMS = {32: "wrap32", 64: "wrap64"}  # the reducers of secure rounds' sums, by bits


def operation_key(run: str, op_id: str) -> str:
    """What tells operations apart, whatever else their callers say of them."""
    return blake3(f"{run}/{op_id}".encode()).hexdigest(12)


def config_key(config: Config) -> str:
    """Short name of a configuration."""
    return _named(config)


def _named(what: object) -> str:
    return blake3(msgspec.msgpack.encode(what)).hexdigest(8)


class Spec(NamedTuple):
    """What all callers of an operation must agree in. ``numel``: what each of them gives, in
    float32 values or words of 32 bits.
    """

    numel: int
    codec: str
    reducer: str
    everyone: bool
    tag: str
    group: str = ""

    def acceptors(self, key: str, config: Config, me: Member) -> Config:
        """Who decides: all of a configuration, or ``me``'s group of it."""
        return group_of(self.group, config, me, key) if self.group else config

    def log_name(self, key: str, config: Config, acceptors: Config) -> str:
        """Name of the operation's log under a configuration: at most 208 characters. A group's
        holds the whole configuration, too: the same group of another chunking is another."""
        kind = (
            f"{'all' if self.everyone else 'any'}{self.tag}{f'@{self.group}' if self.group else ''}"
        )
        members = _named((config, acceptors)) if self.group else config_key(config)
        return f"{PREFIX}/{self.numel}/{self.codec}/{self.reducer}/{kind}/{key}/{members}"

    def shape(self, config: Config, topology: TopologyKind = "butterfly") -> Shape:
        """The vector that is reduced, on the run's ways where it has partial sums. A gather's has a
        slot for each member, of whole chunks.
        """
        if self.reducer != "gather":
            chunk = chunk_elements(self.codec, self.numel)
            return shape_of(self.numel, chunk, self.codec, self.reducer, topology, find_reducer)
        chunk = DEFAULT_CHUNK_ELEMENTS[self.codec]
        chunks = -(-self.numel // chunk)
        chunk = -(-self.numel // chunks)
        return Shape(len(config) * chunks * chunk, chunk, self.codec, self.reducer)

    def __str__(self) -> str:
        what = (
            f"{self.numel} {'words' if self.codec == 'bits' else 'elements'}, "
            f"{self.reducer}, {self.codec}"
        )
        kind = (", everyone" if self.everyone else "") + (
            f", of kind {quoted(self.tag, MAX_TAG)}" if self.tag else ""
        )
        return what + kind + (f", in groups {self.group}" if self.group else "")


def spec_of(call: Call, numel: int) -> Spec:
    """The spec of a call. Raises ConfigError, naming what is wrong."""
    if find_reducer(call.reducer) is None:
        raise ConfigError(
            f"unknown reduction {call.reducer!r}",
            key="op",
            hint=f"one of {', '.join(REDUCERS)}, or a robust rule",
        )
    codec = operation_codec(call.reducer, call.codec)
    spec = Spec(numel, codec, call.reducer, call.everyone, call.tag, call.group)
    fault = _fault(spec)
    if fault:
        raise ConfigError(
            f"operation {call.op_id!r}: {fault}", key="codec" if "codec" in fault else "op"
        )
    return spec


def parse(log: str) -> tuple[Spec, str, str] | None:
    """(spec, key, name of configuration and group) of an operation's log; None for anything else.
    Bytes of a peer: hostile.
    """
    fields = log.split("/")
    if (
        len(fields) != 7
        or not is_operation(log)
        or not fields[1].isascii()
        or not fields[1].isdigit()
        or fields[4][:3] not in ("all", "any")
    ):
        return None
    tag, grouped, group = fields[4][3:].partition("@")
    spec = Spec(int(fields[1]), fields[2], fields[3], fields[4][:3] == "all", tag, group)
    return None if _fault(spec) or (grouped and not group) else (spec, fields[5], fields[6])


def _fault(spec: Spec) -> str | None:
    """Why nobody can carry this out."""
    if spec.codec not in DEFAULT_CHUNK_ELEMENTS:
        return unknown_codec(spec.codec).message
    if find_reducer(spec.reducer) is None or len(spec.tag) > MAX_TAG or not _TAG.match(spec.tag):
        return "unknown reduction"
    if fault := codec_fault(spec.reducer, spec.codec):
        return fault
    limit = MAX_NUMEL // MAX_STAR if spec.reducer == "gather" else MAX_NUMEL
    if not 0 < spec.numel <= limit or spec.numel % words_each(spec.reducer):
        return f"{spec.numel} elements"
    return group_fault(spec.group) or None if spec.group else None


def describe(log: str) -> str:
    """An operation's log, for people."""
    found = parse(log)
    return f"{found[0]}, configuration {found[2]}" if found else "something else"
