"""Writes a bill of materials of atoll and its locked dependencies: CycloneDX 1.6, JSON, the same
bytes for the same inputs.

    python scripts/sbom.py [FILE]          default: standard output

What is in it: scripts/requirements.lock (versions and hashes of all files), and the torch of
scripts/constraints.txt, whose builds differ.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def components(lock: str) -> list[dict[str, Any]]:
    """A component for each package of a lock, by name; files have their hashes as distributions."""
    found: list[dict[str, Any]] = []
    for entry in re.split(r"\n(?=[A-Za-z0-9])", lock):
        head = re.match(r"([A-Za-z0-9._-]+)==([^\s;\\]+)", entry)
        if head is None:
            continue
        hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})", entry)
        files = [
            {
                "type": "distribution",
                "url": f"pkg:pypi/{head[1]}@{head[2]}#{number}",
                "hashes": [{"alg": "SHA-256", "content": each}],
            }
            for number, each in enumerate(sorted(hashes))
        ]
        found.append(_component(head[1], head[2]) | {"externalReferences": files})
    return sorted(found, key=lambda each: str(each["name"]))


def _component(name: str, version: str) -> dict[str, Any]:
    purl = f"pkg:pypi/{name.lower().replace('_', '-')}@{version}"
    return {"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl}


def sbom(root: Path = ROOT) -> dict[str, Any]:
    """The document."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    parts = components((root / "scripts" / "requirements.lock").read_text())
    pinned = re.search(r"(?m)^torch==(\S+)", (root / "scripts" / "constraints.txt").read_text())
    if pinned is not None:
        parts.append(_component("torch", pinned[1]))
    me = _component(project["name"], project["version"]) | {
        "type": "application",
        "licenses": [{"license": {"id": project["license"]}}],
    }
    content = json.dumps([me, parts], sort_keys=True)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}",
        "version": 1,
        "metadata": {"component": me},
        "components": parts,
        "dependencies": [{"ref": me["bom-ref"], "dependsOn": [each["purl"] for each in parts]}],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, help="where to write it; default: here")
    file = parser.parse_args().file
    text = json.dumps(sbom(), indent=1) + "\n"
    if file is not None:
        file.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
