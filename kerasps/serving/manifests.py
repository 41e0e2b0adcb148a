"""Manifests of deltas: their names, checksums, and the chain that they form.

A *chain* is a base, number 0, and the deltas that follow it. Each has a manifest, a JSON file that
is written last, and files of tensors beside it. `docs/delta_files.md` describes the format.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from kerasps.errors import DeltaError

# The content of a JSON file.
Record = dict[str, Any]

FORMAT = "kerasps-deltas/1"
_NAME = re.compile(r"(\d{6,})-(\d{6,})\.json")
# The names of all files that belong to a chain, also of those that are not complete.
_OF_CHAIN = re.compile(r"(\d{6,})-(\d{6,})(?:-\d{3,})?\.(?:json|safetensors)(?:\.partial)?")
# What stands for the digest in the text that it is the digest of.
_NO_DIGEST = "0" * 64
# The entries of a manifest, and their types.
_ENTRIES: dict[str, type | tuple[type, ...]] = {
    "format": str,
    "chain": str,
    "number": int,
    "version": int,
    "previous": (str, type(None)),
    "read_at": float,
    "step": int,
    "files": dict,
    "tables": dict,
    "weights": dict,
    "since": dict,
    "sha256": str,
}


def manifest_name(chain: int, number: int) -> str:
    """Return the name of a manifest."""
    return f"{chain:06d}-{number:06d}.json"


def file_name(chain: int, number: int, part: int) -> str:
    """Return the name of a file of tensors."""
    return f"{chain:06d}-{number:06d}-{part:03d}.safetensors"


def digest(content: bytes) -> str:
    """Return the SHA-256 digest of bytes, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def numbers_in(directory: Path) -> dict[int, list[int]]:
    """Return the numbers of the manifests of each chain, both ascending."""
    found: dict[int, list[int]] = {}
    for name in _names_in(directory):
        match = _NAME.fullmatch(name)
        # A copy under another number of digits is the user's.
        if match and name == manifest_name(int(match[1]), int(match[2])):
            found.setdefault(int(match[1]), []).append(int(match[2]))
    return {chain: sorted(found[chain]) for chain in sorted(found)}


def files_of_chains(directory: Path) -> dict[str, tuple[int, int]]:
    """Return the chain and the number of each file of deltas, complete or not."""
    matches = {name: _OF_CHAIN.fullmatch(name) for name in _names_in(directory)}
    return {name: (int(m[1]), int(m[2])) for name, m in matches.items() if m}


def _names_in(directory: Path) -> list[str]:
    return sorted(os.listdir(directory)) if directory.is_dir() else []


def sealed(content: Record) -> tuple[bytes, str]:
    """Return the text of a manifest with its digest, and the digest."""
    text = json.dumps({**content, "sha256": _NO_DIGEST}, indent=1).encode()
    found = digest(text)
    return text.replace(_NO_DIGEST.encode(), found.encode()), found


def read_manifest(directory: Path, chain: int, number: int) -> Record:
    """Return a manifest whose digest, name and entries are right.

    Raises:
        DeltaError: it is missing, damaged, or another one.
    """
    path = directory / manifest_name(chain, number)
    text = read_bytes(path)
    try:
        content = json.loads(text)
        written = content["sha256"]
        is_right = digest(text.replace(written.encode(), _NO_DIGEST.encode())) == written
    except (ValueError, KeyError, TypeError, AttributeError):
        is_right = False
    if not is_right:
        raise damaged(path, "a manifest with its checksum", "another text", "Restore the file")
    if content.get("format") != FORMAT:
        raise damaged(path, f"the format {FORMAT!r}", repr(content.get("format")), "Update kerasps")
    wrong = [name for name, kind in _ENTRIES.items() if not isinstance(content.get(name), kind)]
    if wrong:
        raise damaged(path, f"the entries {', '.join(wrong)}", "others", "Restore the file")
    if content["number"] != number or (content["previous"] is None) != (number == 0):
        raise damaged(
            path, f"number {number} of its chain", f"number {content['number']}", "Restore the file"
        )
    return dict(content)


def check_follows(directory: Path, chain: int, content: Record, before: Record) -> None:
    """Raise `DeltaError` if a manifest does not follow another one in its chain."""
    path = directory / manifest_name(chain, content["number"])
    if content["chain"] != before["chain"]:
        raise damaged(
            path,
            f"a delta of the chain {before['chain']}",
            f"one of the chain {content['chain']}",
            "Restore the file, or export to an empty directory",
        )
    if content["previous"] != before["sha256"]:
        raise damaged(
            path,
            f"a delta that follows {manifest_name(chain, before['number'])} as it is",
            "one that follows another file",
            "Restore both files",
        )


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a file.

    Raises:
        DeltaError: it is missing, or cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise damaged(path, "the file", "none of this name", "Restore the file") from None
    except OSError as exc:
        raise damaged(path, "a file that can be read", str(exc), "Restore the file") from exc


def damaged(path: Path, expected: str, received: str, advice: str) -> DeltaError:
    """Return the error about a file of a chain."""
    return DeltaError(
        f"The file {path} of a chain of deltas cannot be used. Expected: {expected}. Received: "
        f"{received}. {advice}, or let the training begin a new chain."
    )
