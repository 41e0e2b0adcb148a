"""What `import kerasps` offers, and that it does nothing else."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import pickle
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

import kerasps

ROOT = Path(kerasps.__file__).parents[1]

PROBE = """
import atexit, json, logging, os, pathlib, signal, socket, subprocess, sys, threading, warnings
def state():
    root = logging.getLogger()
    return {
        "environment": sorted(os.environ.items()),
        "path": sys.path[:],
        "finders": [id(found) for found in (*sys.meta_path, *sys.path_hooks)],
        "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "warnings": [str(found) for found in warnings.filters],
        "logs": [root.level, logging.root.manager.disable, len(root.handlers)],
        "exit": atexit._ncallbacks(),
        "hooks": [id(sys.excepthook), id(threading.excepthook), id(sys.displayhook)],
        "files": sorted(os.listdir()),
    }
before, packages = state(), {name.partition(".")[0] for name in sys.modules}
import kerasps
tasks = list(pathlib.Path("/proc/self/task").iterdir())
after = state()
print(json.dumps({
    "changed": sorted(name for name in after if after[name] != before[name]),
    "packages": sorted(
        {name.partition(".")[0] for name in sys.modules}
        - packages - set(sys.stdlib_module_names) - {"kerasps"}
    ),
    "threads": len(tasks),
    "children": [child for task in tasks for child in (task / "children").read_text().split()],
    "sockets": [
        link
        for fd in pathlib.Path("/proc/self/fd").iterdir()
        if "socket" in (link := os.path.realpath(fd))
    ],
}))
"""
NOTHING = {"changed": [], "packages": [], "threads": 1, "children": [], "sockets": []}


def test_tests_import_the_wheel_where_it_is_installed():
    """`tox -e py` installs it; in a development environment the checkout is installed."""
    packages = sysconfig.get_path("purelib")
    # Looked for there alone: a checkout may hold the metadata of an earlier build.
    origins = [
        json.loads(found.read_text("direct_url.json") or "{}")
        for found in importlib.metadata.distributions(name="kerasps", path=[packages])
    ]
    if [origin for origin in origins if not origin.get("dir_info", {}).get("editable")] == []:
        pytest.skip("the checkout is installed")
    assert Path(kerasps.__file__).is_relative_to(packages)


def in_fresh_process(code, folder):
    """What code prints, as JSON, in a process that has imported nothing yet."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_the_package_does_nothing_else(tmp_path):
    assert in_fresh_process(PROBE, tmp_path) == NOTHING


AFTER_KERAS = """
import json, sys
import keras
functions = keras.Variable.__init__, keras.Model.fit
codes = [function.__code__ for function in functions]
without = sorted(sys.modules)
import kerasps.strategy
from kerasps import _compat
assert _compat.eager_context()._context_handle is None
assert (keras.Variable.__init__, keras.Model.fit) == functions
assert [function.__code__ for function in functions] == codes
print(json.dumps([without, sorted(sys.modules)]))
"""
BEFORE_KERAS = "import json, sys, kerasps, keras; print(json.dumps(sorted(sys.modules)))"


def test_importing_the_strategy_neither_starts_tensorflow_nor_patches_keras(tmp_path):
    """Nor does an import of kerasps cost time beside that of TensorFlow: it loads modules of
    kerasps alone; the strategy loads grpc too.
    """
    without, with_strategy = map(set, in_fresh_process(AFTER_KERAS, tmp_path))
    assert {"keras", "tensorflow", "numpy"} <= without
    with_kerasps = set(in_fresh_process(BEFORE_KERAS, tmp_path))
    assert foreign(with_kerasps - without) == set()
    lazy = {"tensorflow.compat", "tensorflow.compat.v1"}
    assert {name.partition(".")[0] for name in foreign(with_strategy - without - lazy)} == {"grpc"}


def foreign(modules):
    """Those that are neither Python's nor kerasps's, nor helpers of Cython's."""
    known = {*sys.stdlib_module_names, "kerasps"}
    return {
        name
        for name in modules
        if name.partition(".")[0] not in known and not name.startswith("_cython")
    }


def test_all_is_sorted_and_is_what_the_package_offers():
    assert kerasps.__all__ == sorted(kerasps.__all__)
    assert len(set(kerasps.__all__)) == len(kerasps.__all__)
    assert dir(kerasps) == kerasps.__all__
    assert [name for name in kerasps.__all__ if not hasattr(kerasps, name)] == []


def test_type_checkers_see_the_names_in_all():
    tree = ast.parse(Path(kerasps.__file__).read_text())
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    ]
    imported = {alias.name for node in block.body for alias in node.names}
    assert imported | {"__version__"} == set(kerasps.__all__)
    # Where they see a `__getattr__`, every name is a valid one.
    assert "__getattr__" not in {getattr(node, "name", "") for node in tree.body}


def test_a_name_that_is_not_offered_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'kerasps' has no attribute 'KerasPS'"):
        _ = kerasps.KerasPS


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("Estimator", "`kerasps.train_and_evaluate`"),
        ("DNNLinearCombinedClassifier", "`kerasps.train_and_evaluate`"),
        ("BestExporter", "`kerasps.SidecarEvaluatorModelExport`"),
        ("StopAtStepHook", "`keras.callbacks.Callback`"),
    ],
)
def test_a_name_of_estimators_says_what_to_use(name, use):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'. .*{use}") as caught:
        getattr(kerasps, name)
    assert "docs/worker_driven.md" in str(caught.value)
    assert (caught.value.name, caught.value.obj) == (name, kerasps)
    assert not hasattr(kerasps, name)


NEITHER_CLASS_NOR_FUNCTION = {"__version__", "callbacks", "layers", "metrics", "serving"}


@pytest.mark.parametrize(
    "name", [name for name in kerasps.__all__ if name not in NEITHER_CLASS_NOR_FUNCTION]
)
def test_a_public_name_is_named_after_the_package(name):
    value = getattr(kerasps, name)
    assert (value.__module__, value.__qualname__) == ("kerasps", name)
    assert pickle.loads(pickle.dumps(value)) is value
    assert value.__doc__.strip().partition("\n")[0].endswith("."), (
        "the first line of a docstring is a sentence"
    )


@pytest.mark.parametrize("place", ["layers", "metrics"])
def test_layers_and_metrics_are_in_modules_of_the_package(place):
    module = getattr(kerasps, place)
    assert module is sys.modules[f"kerasps.{place}"]
    for name in module.__all__:
        value = getattr(module, name)
        assert (value.__module__, value.__qualname__) == (f"kerasps.{place}", name)
        assert pickle.loads(pickle.dumps(value)) is value


def test_the_version_is_in_one_place():
    assert importlib.metadata.version("kerasps") == kerasps.__version__
    checkout = Path(__file__).parents[2]  # what is tested may be an installed package
    project = tomllib.loads((checkout / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "kerasps.__version__"}
    holders = [
        path.name
        for path in (checkout / "kerasps").rglob("*.py")
        if f'"{kerasps.__version__}"' in path.read_text()
    ]
    assert holders == ["__init__.py"]


def test_callbacks_are_in_a_module_as_in_keras():
    for name in ("BackupAndRestore", "ClusterMonitor", "DeltaExport", "StalenessLogger"):
        assert getattr(kerasps.callbacks, name) is getattr(kerasps, name)
