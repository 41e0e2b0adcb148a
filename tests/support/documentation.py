"""The examples of the README and of public docstrings."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

import kerasps
from kerasps.tools.cli.main import _parser

CHECKOUT = next(path for path in Path(__file__).parents if (path / "docs").is_dir())
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Documented as records, which one gets and does not make.
RECORDS = {
    *(
        "ChangedRows",
        "Evaluation",
        "EvictedIds",
        "LookedUp",
        "PSRunStatus",
        "ProcessUsage",
        "StrategyOptions",
        "TableStatus",
        "TakenTable",
        "TaskLoad",
    ),
    *("TaskPlacement", "WarmStart", "WorkerRunStatus", "WorkerStaleness"),
}


def code_blocks(text: str, language: str = "python") -> list[str]:
    """The fenced blocks of a text in one language."""
    return [code for found, code in FENCED.findall(text) if found == language]


def page_text(page: str) -> str:
    """The text of a page of `docs/`, by its name."""
    return (CHECKOUT / "docs" / f"{page}.md").read_text("utf-8")


def run_example(page: str) -> dict[str, object]:
    """The names that the last example of a page makes."""
    namespace: dict[str, object] = {}
    exec(compile(code_blocks(page_text(page))[-1], f"docs/{page}.md", "exec"), namespace)
    return namespace


def command_parsers() -> dict[str, argparse.ArgumentParser]:
    """The parsers of all commands, by name."""
    (actions,) = (a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(actions.choices)


def commands_in(text: str) -> Iterator[list[str]]:
    """The words of each command in a text, without the variables before it."""
    for block in code_blocks(text, "bash"):
        command = ""
        for line in block.splitlines():
            command += f"{line}\n"
            with contextlib.suppress(ValueError):  # within quotes, a line is no end
                words = shlex.split(command, comments=True)
                command = ""
                while words and re.match(r"[A-Z_]+=", words[0]):
                    words.pop(0)
                if words:
                    yield words


def columns(page: str, language: str = "python") -> dict[str, list[str]]:
    """The blocks of a page on moving, those of the left column and those of the right one.

    A paragraph that begins with "Before: " or "After: " says whose the blocks below it are.
    """
    found: dict[str, list[str]] = {"before": [], "after": []}
    for column, part in re.findall(
        r"^(Before|After): (.*?)(?=^Before: |^After: |\Z)",
        page_text(page),
        re.MULTILINE | re.DOTALL,
    ):
        found[column.lower()] += code_blocks(part, language)
    return found


def errors_of_page(page: str) -> list[str]:
    """The messages in the table of errors at the end of a page on moving."""
    text = page_text(page).partition("## Errors")[2]
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def public_classes() -> dict[str, type]:
    """What the package offers, but for its version; its layers and metrics too."""
    offered = {name: getattr(kerasps, name) for name in kerasps.__all__}
    for module in (kerasps.layers, kerasps.metrics):
        offered |= {name: getattr(module, name) for name in module.__all__}
    return {name: value for name, value in offered.items() if inspect.isclass(value)}


def examples() -> dict[str, list[str]]:
    """The examples of each public class, by its name, and those of the README."""
    found = {"README": code_blocks((CHECKOUT / "README.md").read_text())}
    for name, cls in public_classes().items():
        found[name] = code_blocks(textwrap.dedent(inspect.cleandoc(cls.__doc__)))
    return {name: blocks for name, blocks in found.items() if blocks}
