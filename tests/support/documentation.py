"""The examples of the README and of public docstrings."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

import kerasps

CHECKOUT = next(path for path in Path(__file__).parents if (path / "docs").is_dir())
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Documented as records, which one gets and does not make.
RECORDS = {
    *("Evaluation", "LookedUp", "PSRunStatus", "ProcessUsage", "TableStatus", "TaskLoad"),
    *("TaskPlacement", "WorkerRunStatus", "WorkerStaleness"),
}


def code_blocks(text: str, language: str = "python") -> list[str]:
    """The fenced blocks of a text in one language."""
    return [code for found, code in FENCED.findall(text) if found == language]


def public_classes() -> dict[str, type]:
    """What the package offers, but for its version; its metrics too."""
    offered = {name: getattr(kerasps, name) for name in kerasps.__all__}
    offered |= {name: getattr(kerasps.metrics, name) for name in kerasps.metrics.__all__}
    return {name: value for name, value in offered.items() if inspect.isclass(value)}


def examples() -> dict[str, list[str]]:
    """The examples of each public class, by its name, and those of the README."""
    found = {"README": code_blocks((CHECKOUT / "README.md").read_text())}
    for name, cls in public_classes().items():
        found[name] = code_blocks(textwrap.dedent(inspect.cleandoc(cls.__doc__)))
    return {name: blocks for name, blocks in found.items() if blocks}
