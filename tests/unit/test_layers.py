"""The house: which module may import which, what a wing offers, and how long things are."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import kerasps

REPOSITORY = Path(__file__).parents[2]
# Not the installed one: setuptools leaves modules that are gone in a wheel that it builds anew.
PACKAGE = REPOSITORY / "kerasps"

# From the ground up: a module may import from those before it, and from its own wing.
ORDER = [
    *("errors", "_private_names", "_compat", "checks", "words"),
    *("strategy_arguments", "serving"),
    *("runtime", "cluster", "variables", "dynamic", "inputs", "step", "training"),
    "saving",
    "monitoring",
    *(
        "hooks",
        "base_host",
        "base_strategy",
        "coordinator",
        "coordinator_host",
        "strategy",
        "central_storage",
    ),
    *(
        "layers",
        "metrics",
        "tracing",
        "delta_export",
        "callbacks",
        "evaluator",
        "worker_driven",
        "plan",
    ),
    *("__init__", "cli", "tools"),
]
# The wings in `kerasps/tools/`. Their modules are named without it below.
TOOLS = ("monitoring", "tracing", "plan", "cli")
WINGS = [
    "serving",
    "runtime",
    "cluster",
    "variables",
    "dynamic",
    "inputs",
    "step",
    "training",
    "saving",
    "monitoring",
    "hooks",
    "layers",
    "metrics",
    "tracing",
    "evaluator",
    "worker_driven",
    "plan",
    "cli",
]

# The rooms of a wing, from the ground up: a module may import from rooms before its own, for types
# too. What belongs to no room is above all of them.
ROOMS = {
    "cluster": ["description", "serving", "connection", "processes", "members", "local"],
    "step": [
        *("records", "updates", "contract", "changes", "draws", "rows"),
        *("compute", "phases", "tracing", "running"),
    ],
    "variables": ["storage", "rows", "lanes", "placing", "keras"],
    "dynamic": ["ids", "policies", "parts", "tables", "local"],
    "cli": ["scripts", "nodes", "live", "commands"],
    "training": ["epoch", "contract", "calls", "sessions", "loop", "backup", "methods"],
}
# A task's server has its module at the door: `python -m kerasps.cluster.server` starts it. The
# processes of tasks are started with its arguments.
WITHOUT_ROOM = {"cluster": ["server"], "cli": ["main"]}
MAX_MODULES_IN_ROOM = 10
# A door is a contract. What few others need they import from the module that has it.
MAX_NAMES_AT_DOOR = 15

# Imports within a function, with what they put off. Everything else is imported where it is seen.
LATE = {
    ("callbacks", "kerasps.tools.monitoring.prometheus"): "its package is an extra",
    ("cli.main", "kerasps.tools.cli.commands.env"): "a command starts without what others need",
    ("cli.main", "kerasps.tools.cli.commands.launch"): "as above",
    ("cli.commands.serve", "kerasps.tools.cli.nodes.served_task"): "as above",
    ("cli.commands.run", "kerasps.tools.cli.nodes"): "as above",
    ("cli.commands.plan", "kerasps.tools.plan"): "as above",
    ("cli.commands.backups", "kerasps.saving.backup_files"): "as above",
    ("cli.commands.top", "kerasps.tools.cli.live.top_live"): "as above",
    ("cli.commands.trace", "kerasps.tools.cli.live.trace_running"): "as above",
    ("serving.tensor_files", "safetensors.numpy"): "its package is an extra",
    ("tracing.recording", "grpc"): "a trace alone takes so long to begin",
    ("cluster.local.local_cluster", "kerasps.cluster.local.resolver"): "a cluster is started "
    "without TensorFlow",
}

# The lines of each wing, with all lines of its files. Whoever needs more raises the number in the
# same commit, and says why in its message; whoever deletes lowers it. `root` is what is in no wing.
LINES = {
    "serving": 960,
    "runtime": 1970,
    "cluster": 6360,
    "variables": 5420,
    "dynamic": 6090,
    "layers": 2150,
    "inputs": 2460,
    "step": 12020,
    "training": 7130,
    "saving": 3570,
    "hooks": 1450,
    "metrics": 530,
    "evaluator": 1020,
    "worker_driven": 1910,
    "tools": 7670,
    "root": 3410,
    "tests": 52770,
}
# A budget that is larger than this above its wing is lowered.
SPARE_LINES = 100
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 530
MAX_METHODS = 25
# What these two are to their users is that large.
LARGE_CLASSES = {"ParameterServerVariable", "LocalCluster"}

# For users as types, through `kerasps`; no module needs them at run time.
PUBLIC = {
    *kerasps.__all__,
    *kerasps.layers.__all__,
    *kerasps.metrics.__all__,
    *kerasps.serving.__all__,
}


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
    return without_tools(".".join(path.relative_to(PACKAGE).with_suffix("").parts))


def without_tools(module: str) -> str:
    """The name of a module of a tool without "tools."; other names unchanged."""
    below = module.removeprefix("tools.")
    return below if below.partition(".")[0] in TOOLS else module


PATHS = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {module: ast.parse(path.read_text()) for module, path in PATHS.items()}


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


@functools.cache
def all_imports() -> list[Import]:
    return [found for module, tree in TREES.items() for found in imports_of(module, tree)]


def place(module: str) -> str:
    """The floor of a module: its wing, or itself."""
    return "cli" if module == "__main__" else module.partition(".")[0]


def target(found: Import) -> str:
    """The module of the package that an import statement ends in, without "kerasps."."""
    path = without_tools(found.source.removeprefix("kerasps").removeprefix("."))
    below = f"{path}.{found.name}" if path else found.name
    if below in TREES or f"{below}.__init__" in TREES:
        return below
    return path or "__init__"


def upward(imports: list[Import]) -> list[Import]:
    wrong = []
    for found in imports:
        importer, other = place(found.module), place(target(found))
        is_within = importer == other or (found.for_types and found.module == "__init__")
        if not is_within and ORDER.index(other) >= ORDER.index(importer):
            wrong.append(found)
    return wrong


def room(module: str) -> str:
    """The room of a module in a wing that has rooms; empty for what is in none."""
    wing, *below = module.split(".")
    return below[0] if wing in ROOMS and len(below) > 1 else ""


def against_rooms(imports: list[Import]) -> list[Import]:
    """Imports of a module from a room above its own, within a wing."""
    wrong = []
    for found in imports:
        end = target(found)
        wing = place(found.module)
        if wing not in ROOMS or place(end) != wing or not room(found.module):
            continue
        order = ROOMS[wing]
        if not room(end):  # the wing's own door is above all rooms
            is_wrong = end.partition(".")[2] not in WITHOUT_ROOM.get(wing, ())
        else:
            is_wrong = order.index(room(end)) > order.index(room(found.module))
        if is_wrong:
            wrong.append(found)
    return wrong


def circle(imports: list[Import]) -> list[str]:
    """The modules of a circle of imports, also for types and in functions; empty without one."""
    edges: dict[str, set[str]] = {}
    for found in imports:
        door = f"{without_tools(found.source.removeprefix('kerasps.'))}.__init__"
        # `from kerasps.wing import module` runs the door of the wing too.
        ends = {target(found), *([door] if door in TREES else [])} - {found.module}
        edges.setdefault(found.module, set()).update(ends)
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as exc:
        return list(exc.args[1])
    return []


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


def test_rooms_are_entered_from_above():
    assert against_rooms(all_imports()) == []


@pytest.mark.parametrize("wing", ROOMS)
def test_every_module_of_a_wing_has_its_room(wing):
    modules = [module for module in TREES if module.startswith(f"{wing}.")]
    inside = [module.split(".")[1:] for module in modules if module != f"{wing}.__init__"]
    assert {path[0] for path in inside if len(path) > 1} == set(ROOMS[wing])
    assert [path[0] for path in inside if len(path) == 1] == WITHOUT_ROOM.get(wing, [])
    for name in ROOMS[wing]:
        files = [path for path in inside if path[0] == name and path[-1] != "__init__"]
        assert len(files) <= MAX_MODULES_IN_ROOM


def test_no_modules_import_each_other():
    assert circle(all_imports()) == []


def test_only_what_keeps_a_start_fast_is_imported_late():
    assert late_imports(TREES) == set(LATE)


def door(wing: str) -> ast.Module:
    return TREES[f"{wing}.__init__"]


def package(wing: str) -> str:
    return f"kerasps.tools.{wing}" if wing in TOOLS else f"kerasps.{wing}"


def offered(wing: str) -> list[str]:
    return getattr(importlib.import_module(package(wing)), "__all__", [])


@pytest.mark.parametrize("wing", WINGS)
def test_a_door_is_sorted_and_offers_what_it_imports(wing):
    names = offered(wing)
    assert names == sorted(names, key=lambda n: (not n.isupper(), n[:1].islower(), n))
    imported = {
        (alias.asname or alias.name): node.module
        for node, *_ in visit(door(wing))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package(wing)}.")
        for alias in node.names
    }
    assert set(imported) == set(names) - {"main"}
    assert len(names) <= MAX_NAMES_AT_DOOR


def test_what_a_server_imports_has_a_door_that_imports_nothing():
    # A task's server starts without Keras, and without most of TensorFlow.
    assert [wing for wing in WINGS if not offered(wing)] == [
        *("runtime", "cluster", "monitoring", "hooks", "evaluator")
    ]


@pytest.mark.parametrize("wing", WINGS)
def test_a_door_offers_what_somebody_needs(wing):
    used = {
        found.name
        for found in all_imports()
        if found.source == package(wing) and place(found.module) != wing
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


@pytest.mark.parametrize("place", [*WINGS, *(f"{w}.{r}" for w in ROOMS for r in ROOMS[w])])
def test_a_wing_and_a_room_say_what_their_contract_is(place):
    text = ast.get_docstring(door(place)) or ""
    assert any(paragraph.startswith("Contract: ") for paragraph in text.split("\n\n")), text


@pytest.mark.parametrize("module", TREES)
def test_no_file_and_no_function_is_too_long(module):
    assert len(PATHS[module].read_text().splitlines()) <= MAX_FILE_LINES
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    lengths = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(TREES[module])
        if isinstance(node, functions)
    }
    assert {name: size for name, size in lengths.items() if size > MAX_FUNCTION_LINES} == {}


def lines_of(wing: str) -> int:
    paths = {
        "root": PACKAGE.glob("*.py"),
        "tests": (REPOSITORY / "tests").rglob("*.py"),
    }.get(wing, (PACKAGE / wing).rglob("*.py"))
    return sum(len(path.read_text().splitlines()) for path in paths)


@pytest.mark.parametrize("wing", LINES)
def test_a_wing_stays_within_its_lines(wing):
    assert LINES[wing] - SPARE_LINES <= lines_of(wing) <= LINES[wing]


def test_each_wing_has_a_budget():
    wings = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert wings == {*LINES} - {"root", "tests"}


@pytest.mark.parametrize("module", TREES)
def test_no_class_has_too_many_methods(module):
    numbers = {
        node.name: sum(isinstance(child, ast.FunctionDef) for child in node.body)
        for node in ast.walk(TREES[module])
        if isinstance(node, ast.ClassDef) and node.name not in LARGE_CLASSES
    }
    assert {name: number for name, number in numbers.items() if number > MAX_METHODS} == {}


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


# Each is the beginning of a clause, not of a sentence with an actor and a verb.
CLAUSE = re.compile(r"(What|Whether|How|Where|Who|When|Nor|So)\b")


def test_a_docstring_begins_with_a_plain_sentence():
    assert [f"{name}: {text}" for name, text in summaries() if CLAUSE.match(text)] == []


# Names that say nothing of the thing.
VAGUE = {"own"}


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name in a module, with its line: of variables, attributes, parameters, definitions."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname", "rest"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield name, getattr(node, "lineno", 0)
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            yield from ((name, node.lineno) for name in node.names)


def vague_names(tree: ast.AST) -> list[int]:
    """The lines with an identifier that says nothing of the thing."""
    return sorted(line for name, line in identifiers(tree) if name in VAGUE)


def test_a_name_says_what_the_thing_is():
    found = {module: vague_names(tree) for module, tree in TREES.items()}
    assert {module: lines for module, lines in found.items() if lines} == {}


@pytest.mark.parametrize("directory", ["tests", "benchmarks", "examples"])
def test_a_name_beside_the_package_says_what_the_thing_is(directory):
    paths = sorted((REPOSITORY / directory).rglob("*.py"))
    assert paths
    found = {str(path): vague_names(ast.parse(path.read_text())) for path in paths}
    assert {path: lines for path, lines in found.items() if lines} == {}


def any_parameters(tree: ast.AST) -> list[str]:
    """Parameters whose annotation has `Any` in it, as `function(parameter)`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = node.args
            parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs]
            parameters += [
                parameter for parameter in (given.vararg, given.kwarg) if parameter is not None
            ]
            found += [
                f"{node.name}({parameter.arg})"
                for parameter in parameters
                if parameter.annotation is not None
                and any(getattr(part, "id", "") == "Any" for part in ast.walk(parameter.annotation))
            ]
    return found


# Private objects of Keras and TensorFlow, the content of records, and what is taken apart by rules
# that no type says. Lower it when there are fewer.
MAX_ANY_PARAMETERS = 157


def test_few_parameters_are_any():
    found = [f"{module}: {name}" for module, tree in TREES.items() for name in any_parameters(tree)]
    assert len(found) <= MAX_ANY_PARAMETERS, found


def test_strategies_hosts_and_models_have_types():
    found = [name for tree in TREES.values() for name in any_parameters(tree)]
    named = ("(strategy)", "(host)", "(model)", "(inputs)", "(optimizer)", "(graph)")
    assert [name for name in found if name.endswith(named)] == []


@pytest.mark.parametrize(
    "example", sorted(path.name for path in (REPOSITORY / "examples").glob("*.py"))
)
def test_example_is_short(example: str) -> None:
    text = (REPOSITORY / "examples" / example).read_text()
    told = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    code = [
        line
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.strip().startswith("#") and number not in told
    ]
    assert len(code) < 80
