"""The names of kerasps in texts: which there are, and which the source defines.

Everything is read from files, and nothing of kerasps is imported.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Set
from pathlib import Path

CHECKOUT = next(path for path in Path(__file__).parents if (path / "docs").is_dir())

FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
BACKTICKS = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
# `inputs/source.py`, also `step/`.
FILE = re.compile(r"(?:[\w.-]+/)+(?:[\w.-]+\.(?:py|md|yaml|toml|svg))?|[a-z]\w*\.py")
# Names of objects in texts, and the classes that they are of.
INSTANCES = {"strategy": ("ParameterServerStrategy", "WorkerDrivenStrategy")}
# `Session`, `Host.begin_fit`, `step.phases.pull`, `as_input`, `MAX_PARTS`, perhaps called.
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\((?:[^()]|\(\))*\))?")


@functools.cache
def definitions() -> dict[str, set[str]]:
    """Every name that a module of kerasps defines, with the members of those that have some.

    Members are methods, fields and attributes of a class, and the names in a module. Arguments of
    functions are names without members.
    """
    found: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for path in (CHECKOUT / "kerasps").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        module = path.parent.name if path.stem == "__init__" else path.stem
        found.setdefault(module, set()).update(_names_in(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).update(_names_in(node), _attributes(node))
                names = {name.split("[")[0].split(".")[-1] for name in map(ast.unparse, node.bases)}
                bases.setdefault(node.name, set()).update(names)
            for name in _names_of(node):
                found.setdefault(name, set())
    for name in bases:
        found[name] |= _inherited(name, found, bases)
    for name, classes in INSTANCES.items():
        found[name] = set().union(*(found[cls] for cls in classes))
    return found


def _names_in(node: ast.Module | ast.ClassDef) -> set[str]:
    """The names that the body of a module or class defines or imports."""
    names = {name for child in node.body for name in _names_of(child)}
    for child in ast.walk(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in child.names}
    return names


def _names_of(node: ast.AST) -> list[str]:
    """The names that one statement defines, arguments of a function included."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        return [node.name, *(argument.arg for argument in arguments)]
    if isinstance(node, ast.ClassDef):
        return [node.name]
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _attributes(node: ast.ClassDef) -> set[str]:
    """What the methods of a class assign to `self`."""
    return {
        child.attr
        for child in ast.walk(node)
        if isinstance(child, ast.Attribute)
        and isinstance(child.ctx, ast.Store)
        and isinstance(child.value, ast.Name)
        and child.value.id == "self"
    }


def _inherited(name: str, found: dict[str, set[str]], bases: dict[str, set[str]]) -> set[str]:
    members: set[str] = set()
    pending, seen = [name], {name}
    while pending:
        for base in bases.get(pending.pop(), ()):
            members |= found.get(base, set())
            if base not in seen:
                seen.add(base)
                pending.append(base)
    return members


def quoted(text: str) -> list[str]:
    """The texts in backticks of a page, those in fenced blocks aside."""
    return [" ".join(name.split()) for name in BACKTICKS.findall(FENCED.sub("", text))]


def missing_file(name: str) -> bool:
    """Return whether `name` looks like a file or folder of the repository and is not there."""
    # `train.py` is the user's script, and `tox -e docs` makes `site/`.
    theirs = name.startswith(("tmp/", "logs/", "site/")) or name == "train.py"
    if not FILE.fullmatch(name) or theirs:
        return False
    folders = ("kerasps", ".", "docs", "tests/processes", "tests/cluster")
    if "/" in name:
        return not any((CHECKOUT / folder / name).exists() for folder in folders)
    searched = ("kerasps", "tests", "benchmarks", "examples")
    return not any(next((CHECKOUT / f).rglob(name), None) for f in searched)


def missing_name(name: str, foreign: Set[str]) -> bool:
    """Return whether `name` looks like one of kerasps's and the source does not define it.

    Such a name has capitals within, or an underscore, or begins with a module or class of kerasps.
    A dotted name must lead from each part to the next.

    Args:
        name: a text in backticks.
        foreign: names that look so and are others'.
    """
    if not DOTTED.fullmatch(name) or name.endswith(".py"):
        return False
    first, *rest = name.partition("(")[0].split(".")
    known = definitions()
    if name in foreign or first in foreign or (rest and first not in known):
        return False
    if not rest:
        looks_so = "_" in first.strip("_") or re.fullmatch(r"_?[A-Z][a-z]+[A-Z]\w*", first)
        return bool(looks_so) and first not in known and not _is_member(first)
    for member in rest:
        if first == "kerasps" and _is_module(member):
            first = member
            continue
        if known.get(first) and member not in known[first]:
            return f"{first}.{member}" not in foreign
        first = member
    return False


def _is_module(name: str) -> bool:
    package = CHECKOUT / "kerasps"
    return (package / name).is_dir() or (package / f"{name}.py").is_file()


@functools.cache
def _members() -> set[str]:
    return set().union(*definitions().values())


def _is_member(name: str) -> bool:
    return name in _members()


@functools.cache
def variables_in_source() -> set[str]:
    """The environment variables of kerasps that its source names, or has for an option."""
    paths = (CHECKOUT / "kerasps").rglob("*.py")
    source = "".join(path.read_text(encoding="utf-8") for path in paths)
    options = re.findall(r'add_setting\(\s*(?:\*\()?"--([\w-]+)"', source)
    of_options = {f"KERASPS_{option.upper().replace('-', '_')}" for option in options}
    return set(re.findall(r"KERASPS_[A-Z_]+", source)) | of_options
