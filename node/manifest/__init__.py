"""A run's manifest: what it trains, signed. TOML for people, canonical msgpack for machines; the
run id is the hash of those bytes. Lowest first:

tables           the tables of every run: names, bounds, defaults
optional_tables  those that few runs have: federated, secure, privacy, btard
limits           what free-standing operations may take of a member
form             which bytes stand for a manifest
gpt              what `[model]` says of the model that ships with atoll
manifest         Manifest: the run's settings as one value, and what follows for machines
refusals         rows of settings that cannot be as they are, and their errors
hints            hints as sentences that a machine can follow, too
removed          settings that manifests once had, each with what to use instead
kinds            which settings there are: by kind of run, and by choices inside
pretrained       rows: a pretrained model, its adapters, what is trained on
join, quorum, robust, btard   rows: who may enter; what decides a round; robust rules; BTARD
methods, federated   rows: federated methods and runs; who can see what, in plain words
checks           rows: training, exchange, fragments, what a run evaluates; the table of all rows
presets          outer values by name
defaults         the codec of a text that names none
mending          hints that hold together: a file in which all were followed is valid
registered       settings that ask for a mode which is not registered
reading          manifests as text and as bytes: read strictly, and all faults named at once
signed           SignedManifest: the organiser's signature; manifests on disk
"""

from __future__ import annotations

from .gpt import gpt_config
from .manifest import Manifest, run_id_of
from .pretrained import adapters_of, why_not_sharded
from .reading import decode_manifest, load_manifest, parse_manifest
from .signed import SignedManifest, decode_signed, list_runs, load_run, save_run, sign_manifest

__all__ = [
    "Manifest",
    "SignedManifest",
    "adapters_of",
    "decode_manifest",
    "decode_signed",
    "gpt_config",
    "list_runs",
    "load_manifest",
    "load_run",
    "parse_manifest",
    "run_id_of",
    "save_run",
    "sign_manifest",
    "why_not_sharded",
]
