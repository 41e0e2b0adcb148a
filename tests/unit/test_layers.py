"""The house: which module may import which, what a wing offers, and how long things are."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import kerasps

PACKAGE = Path(kerasps.__file__).parent

# From the ground up: a module may import from those before it, and from its own wing.
ORDER = [
    *("errors", "_private_names", "_private_attributes", "_compat", "checks", "_doors"),
    *("cluster", "variables", "inputs", "step", "training", "saving"),
    *("hooks", "strategy_arguments", "strategy", "central_storage"),
    *("callbacks", "evaluator", "worker_driven"),
    *("__init__", "cli"),
]
WINGS = [
    "cluster",
    "variables",
    "inputs",
    "step",
    "training",
    "saving",
    "hooks",
    "evaluator",
    "worker_driven",
    "cli",
]

# Imports within a function, with what they put off. Everything else is imported where it is seen.
LATE = {
    ("_compat", "importlib.metadata"): "a task's server asks for no version",
    ("cli.main", "kerasps.cli.env"): "the command line starts without what its command needs not",
    ("cli.main", "kerasps.cli.launch"): "as above",
    ("cli.main", "kerasps.cluster"): "as above",
    ("cluster.local", "kerasps.cluster.resolver"): "a cluster is started without TensorFlow",
}

MAX_FUNCTION_LINES = 75
MAX_FILE_LINES = 600

# For users as types, through `kerasps`; no module needs them at run time.
PUBLIC = set(kerasps.__all__)


@dataclass(frozen=True)
class Import:
    """One name that a module imports from another one of the package."""

    module: str
    source: str
    name: str
    line: int
    late: bool
    for_types: bool


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts)


TREES = {module_name(path): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"


def visit(node: ast.AST, late: bool = False, for_types: bool = False) -> Iterator[tuple]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, late, for_types
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from visit(child, late or is_function, for_types or is_type_checking(child))


def imports_of(module: str, tree: ast.AST) -> Iterator[Import]:
    """What a module imports from the package; `from kerasps.wing import module` too."""
    for node, late, for_types in visit(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "kerasps":
                    yield Import(module, alias.name, "", node.lineno, late, for_types)
        elif node.module is not None and node.module.partition(".")[0] == "kerasps":
            for alias in node.names:
                yield Import(module, node.module, alias.name, node.lineno, late, for_types)


def all_imports() -> list[Import]:
    return [found for module, tree in TREES.items() for found in imports_of(module, tree)]


def place(module: str) -> str:
    """The floor of a module: its wing, or itself."""
    return "cli" if module == "__main__" else module.partition(".")[0]


def target(found: Import) -> str:
    """The module of the package that an import statement ends in, without "kerasps."."""
    path = found.source.removeprefix("kerasps").removeprefix(".")
    below = f"{path}.{found.name}" if path else found.name
    if below in TREES or f"{below}.__init__" in TREES:
        return below
    return path or "__init__"


def upward(imports: list[Import]) -> list[Import]:
    wrong = []
    for found in imports:
        own, other = place(found.module), place(target(found))
        is_within = own == other or (found.for_types and found.module == "__init__")
        if not is_within and ORDER.index(other) >= ORDER.index(own):
            wrong.append(found)
    return wrong


def through_walls(imports: list[Import]) -> list[Import]:
    """Imports of another wing's module, past its door. Types of public names come through too."""
    return [
        found
        for found in imports
        if place(target(found)) in WINGS
        and place(found.module) != place(target(found))
        and "." in target(found)
    ]


def circles(imports: list[Import]) -> list[list[str]]:
    """Modules of one wing that import each other in a circle, when they are loaded."""
    edges: dict[str, set[str]] = {}
    for found in imports:
        end = target(found)
        if place(found.module) == place(end) and not found.late and not found.for_types:
            edges.setdefault(found.module, set()).add(end)
    found_circles = []

    def walk(module: str, path: list[str]) -> None:
        if module in path:
            found_circles.append([*path[path.index(module) :], module])
            return
        for other in edges.get(module, ()):
            walk(other, [*path, module])

    for module in edges:
        walk(module, [])
    return [circle for circle in found_circles if circle[0] == min(circle)]


def late_imports(trees: dict[str, ast.AST]) -> set[tuple[str, str]]:
    """Every import in a function, of the package and of other packages."""
    found = set()
    for module, tree in trees.items():
        for node, late, _ in visit(tree):
            if late:
                names = (
                    [node.module]
                    if isinstance(node, ast.ImportFrom)
                    else [alias.name for alias in node.names]
                )
                found |= {(module, name) for name in names}
    return found


def test_every_module_has_its_floor():
    assert {place(module) for module in TREES} == set(ORDER)


def test_imports_go_down():
    assert upward(all_imports()) == []


def test_wings_are_entered_by_their_doors():
    assert through_walls(all_imports()) == []


def test_no_modules_of_a_wing_import_each_other():
    assert circles(all_imports()) == []


def test_only_what_keeps_a_start_fast_is_imported_late():
    assert late_imports(TREES) == set(LATE)


@pytest.mark.parametrize(
    ("module", "source", "finds"),
    [
        ("cluster.local", "from kerasps.variables import Placement", upward),
        ("errors", "import kerasps.strategy", upward),
        ("step.push", "def f():\n    from kerasps import training", upward),
        ("training.loop", "from kerasps.step.push import build", through_walls),
        ("strategy", "import kerasps.step.push", through_walls),
        ("cli.main", "from kerasps.cluster import local", through_walls),
    ],
)
def test_a_wrong_import_is_found(module, source, finds):
    assert finds(list(imports_of(module, ast.parse(source))))


def test_a_circle_is_found():
    sources = {
        "step.push": "from kerasps.step.pull import a",
        "step.pull": "import kerasps.step.push",
    }
    found = [i for module, text in sources.items() for i in imports_of(module, ast.parse(text))]
    assert circles(found) == [["step.pull", "step.push", "step.pull"]]


def door(wing: str) -> ast.Module:
    return TREES[f"{wing}.__init__"]


def offered(wing: str) -> list[str]:
    return importlib.import_module(f"kerasps.{wing}").__all__


@pytest.mark.parametrize("wing", WINGS)
def test_a_door_is_sorted_and_offers_what_it_imports(wing):
    names = offered(wing)
    assert names == sorted(names, key=lambda n: (not n.isupper(), n[:1].islower(), n))
    imported = {
        (alias.asname or alias.name): node.module
        for node, *_ in visit(door(wing))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"kerasps.{wing}.")
        for alias in node.names
    }
    if imported:  # a lazy door imports for type checkers only, and opens by its map
        assert set(imported) == set(names)
    else:
        assert names == ["main"]
        assert wing == "cli"
    assert lazy_map(wing) in (
        {},
        {name: module.removeprefix(f"kerasps.{wing}.") for name, module in imported.items()},
    )


def lazy_map(wing: str) -> dict[str, str]:
    for node in ast.walk(door(wing)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "opened_when_used":
            return ast.literal_eval(node.args[1])
    return {}


def test_the_wings_that_a_server_starts_with_open_when_they_are_used():
    assert [wing for wing in WINGS if lazy_map(wing)] == ["cluster", "evaluator"]


@pytest.mark.parametrize("wing", WINGS)
def test_a_door_offers_what_somebody_needs(wing):
    used = {
        found.name
        for found in all_imports()
        if found.source == f"kerasps.{wing}" and place(found.module) != wing
    }
    # `from kerasps import saving` and then `saving.save_model`.
    for module, tree in TREES.items():
        if place(module) != wing:
            used |= {
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == wing
            }
    known = used | PUBLIC | {"main"}
    assert set(offered(wing)) - known == set()


@pytest.mark.parametrize("wing", WINGS)
def test_a_wing_says_what_its_contract_is(wing):
    text = ast.get_docstring(door(wing)) or ""
    assert any(paragraph.startswith("Contract: ") for paragraph in text.split("\n\n")), text


@pytest.mark.parametrize("module", TREES)
def test_no_file_and_no_function_is_too_long(module):
    path = PACKAGE / (module.replace(".", "/") + ".py")
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    lengths = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(TREES[module])
        if isinstance(node, functions)
    }
    assert {name: size for name, size in lengths.items() if size > MAX_FUNCTION_LINES} == {}


def summaries() -> Iterator[tuple[str, str]]:
    """Every docstring of the package, with the name of what it describes."""
    described = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, described) and ast.get_docstring(node) is not None:
                yield f"{module}.{getattr(node, 'name', '')}", ast.get_docstring(node)


def test_a_docstring_begins_with_one_line():
    wrong = [
        name
        for name, text in summaries()
        if len(text.splitlines()) > 1 and text.splitlines()[1].strip()
    ]
    assert wrong == []
