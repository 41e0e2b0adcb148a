"""Expands Slurm's short forms of lists: `node[01-03,7],other` and `2(x3),1`."""

from __future__ import annotations

import itertools
import re

_PARTS = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")


def expand_hostlist(text: str) -> list[str]:
    """Return the names that `scontrol show hostnames` would print.

    Raises:
        ValueError: the text is not a list of hosts.
    """
    names = []
    for entry in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        choices = [
            _expand_ranges(ranges) if ranges else [plain] for ranges, plain in _PARTS.findall(entry)
        ]
        names += ["".join(parts) for parts in itertools.product(*choices)]
    if not all(names) or not names or text.count("[") != text.count("]"):
        raise ValueError(f"no list of hosts: {text!r}")
    return names


def _expand_ranges(text: str) -> list[str]:
    numbers = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"no range of numbers: {part!r}")
        numbers += [
            f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)
        ]
    return numbers


def expand_repeated(text: str) -> list[int]:
    """Return the numbers of `2(x3),1`: 2, 2, 2, 1.

    Raises:
        ValueError: the text is not such a list.
    """
    numbers = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise ValueError(f"no list of numbers: {text!r}")
        numbers += [int(found[1])] * int(found[2] or 1)
    return numbers
