"""The canary: all that kerasps needs of the private parts of Keras and TensorFlow is there.

And it is asked for in one place, and patched from one table.
"""

from __future__ import annotations

import ast
import dataclasses
import gc
import importlib.metadata
import inspect
import re
import sys
import warnings
from pathlib import Path

import keras
import pytest
import tensorflow as tf

import kerasps
from kerasps import _compat, _private_names, base_strategy, central_storage, variables
from kerasps._private_names import (
    FIT,
    PRIVATE_ATTRIBUTES,
    PRIVATE_NAMES,
    PRIVATE_TEXTS,
    Feature,
    Row,
)
from kerasps.hooks import patch as patching
from kerasps.hooks.functions import leave_remote_functions
from kerasps.hooks.patch import Patch, as_markdown, check_patched
from kerasps.hooks.table import PATCHES
from kerasps.saving.checkpoints import CheckpointSaver
from kerasps.training.calls.scheduled import ScheduledCall
from kerasps.variables.placing.placing import Extended

CHECKOUT = next(path for path in Path(__file__).parents if (path / "docs").is_dir())
PACKAGE = CHECKOUT / "kerasps"
MODULES = sorted(PACKAGE.rglob("*.py"))
LISTS = ("_compat.py", "_private_names.py")
OTHERS = [path for path in MODULES if path.name not in LISTS]
A_TEST = Feature("a test")
PRIVATE_ROOTS = (
    "keras.src",
    "tensorflow.python",
    "tf.python",
)


def test_every_private_name_takes_the_parameters_that_it_is_called_with():
    lacking = {name: _compat.missing_parameters(name) for name in _compat.PRIVATE_NAMES}
    assert {name: missing for name, missing in lacking.items() if missing} == {}


@pytest.mark.parametrize("name", _compat.PRIVATE_NAMES)
def test_every_private_name_is_used(name):
    uses = (f"_compat.{name}", f'Patch("{name}"', f'base_class("{name}")')
    assert any(use in path.read_text() for path in OTHERS for use in uses)


OVERRIDING = {
    "keras:Variable": [variables.ParameterServerVariable],
    "tensorflow:distribute.ParameterServerStrategy": [base_strategy.BaseStrategy],
    "tensorflow.python.distribute.parameter_server_strategy_v2:ParameterServerStrategyV2Extended": [
        Extended
    ],
    "tensorflow.python.ops.resource_variable_ops:ResourceVariable": [variables.NamedVariable],
    "tensorflow.python.distribute.mirrored_strategy:MirroredExtended": [
        central_storage.CentralStorageExtended
    ],
    "tensorflow.python.distribute.values:MirroredVariable": [central_storage.CentralVariable],
    "tensorflow.python.distribute.coordinator.cluster_coordinator:Closure": [ScheduledCall],
    "tensorflow.python.checkpoint.functional_saver:MultiDeviceSaver": [CheckpointSaver],
}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.parametrize("owner", OVERRIDING)
def test_every_private_method_that_is_overridden_is_listed_as_such(owner):
    base = _compat.find(owner)
    listed = {row.name for row in PRIVATE_ATTRIBUTES if row.where == owner and row.is_overridden}
    overridden = {
        name
        for cls in OVERRIDING[owner]
        for name in vars(cls).keys() & {name for c in base.__mro__ for name in vars(c)}
        if inspect.isfunction(vars(cls)[name]) or isinstance(vars(cls)[name], property)
    }
    assert {name for name in overridden if is_private(name)} <= listed <= overridden
    assert listed


def test_what_is_overridden_is_looked_for_wherever_it_is_listed():
    assert {row.where for row in PRIVATE_ATTRIBUTES if row.is_overridden} == set(OVERRIDING)


def test_a_release_with_which_the_tests_run_is_one_that_was_tested():
    """Else `TESTED_VERSIONS` gets it. A nightly build is of a version to come."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _compat.warn_of_untested_versions()
    warned = {str(each.message).split()[3] for each in caught}
    assert warned <= {each.__name__ for each in (keras, tf) if "dev" in each.__version__}


@pytest.mark.parametrize(
    ("package", "version"),
    [("keras", "3.99.0"), ("tensorflow", "2.99.0-rc1"), ("keras", "3.11.3"), ("keras", "4.0.0")],
)
def test_another_version_draws_a_warning_that_names_those_that_were_tested(
    monkeypatch, package, version
):
    monkeypatch.setattr(importlib.import_module(package), "__version__", version)
    with pytest.warns(UserWarning, match=f"This version of {package} was not tested") as caught:
        _compat.warn_of_untested_versions()
    # Under a version of the other package that is new, there is a warning of it too.
    texts = [str(each.message) for each in caught]
    [text] = [text for text in texts if text.startswith(f"This version of {package} ")]
    assert f"Expected: {_compat.SUPPORTED_VERSIONS}. Received: keras " in text


def test_the_versions_that_were_tested_are_the_same_wherever_they_stand():
    (first_keras, last_keras), (first_tf, last_tf) = (
        ["{}.{}".format(*version) for version in _compat.TESTED_VERSIONS[package]]
        for package in ("keras", "tensorflow")
    )
    expected = f"Keras {first_keras} to {last_keras} with TensorFlow {first_tf} to {last_tf}"
    assert expected == _compat.SUPPORTED_VERSIONS
    page = " ".join((CHECKOUT / "docs" / "compatibility.md").read_text().split())
    assert f"kerasps is tested with {expected}." in page
    assert f"The tables are for Keras {last_keras}." in page
    assert f"and TensorFlow {last_tf}." in page
    project = (CHECKOUT / "pyproject.toml").read_text()
    assert f'dependencies = ["keras>={first_keras}", "tensorflow>={first_tf}", ' in project
    tox = (CHECKOUT / "tox.ini").read_text()
    assert f"keras=={first_keras}.0" in tox
    assert f"tensorflow=={first_tf}.0" in tox


@pytest.mark.parametrize("words", PRIVATE_TEXTS, ids=lambda words: words.text)
def test_the_words_that_something_is_known_by_are_there(words):
    assert words.text in inspect.getsource(importlib.import_module(words.module)), words.why


# Patches


def test_nothing_is_patched_twice():
    keys = [(id(patch.owner), patch.name) for patch in PATCHES]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.label)
def test_a_patch_takes_what_its_original_takes(patch):
    """Names that a patch knows come first in the original, in the same order."""
    assert parameters_that_differ(patch) == []


def parameters_that_differ(patch):
    original = patch.original()
    known = list(inspect.signature(getattr(original, "fget", original)).parameters.values())
    wanted = list(inspect.signature(patch.function).parameters.values())[1:]
    if inspect.isclass(patch.owner):  # `self` goes by other names in some
        known, wanted = known[1:], wanted[1:]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if any(parameter.kind in variable for parameter in known) and len(known) <= 2:
        return []  # takes anything
    names = [p.name for p in wanted if p.kind not in variable and not p.name.startswith("_")]
    passes_on = any(parameter.kind in variable for parameter in wanted)
    others = [p.name for p in known[len(names) :] if p.kind not in variable]
    differ = [
        name for name, other in zip(names, [p.name for p in known], strict=False) if name != other
    ]
    return differ + names[len(known) :] + ([] if passes_on else others)


# Missing names


def removed(row):
    """The row, of a version that no longer has the name."""
    if row.name in PRIVATE_NAMES:
        return dataclasses.replace(row, where="keras.src.moved:moved", later="")
    return dataclasses.replace(row, name="_moved")


@pytest.fixture
def lacking(monkeypatch):
    """Remove rows and patches from the installed versions; return the table of patches."""

    def lack(*gone):
        names = {r.name: removed(r) if r in gone else r for r in PRIVATE_NAMES.values()}
        attributes = tuple(removed(r) if r in gone else r for r in PRIVATE_ATTRIBUTES)
        monkeypatch.setattr(_compat, "PRIVATE_NAMES", names)
        monkeypatch.setattr(_compat, "PRIVATE_ATTRIBUTES", attributes)
        for name in PRIVATE_NAMES:
            monkeypatch.delitem(vars(_compat), name, raising=False)
        return [dataclasses.replace(p, name="_moved") if p in gone else p for p in PATCHES]

    return lack


EVERYTHING = [*PRIVATE_NAMES.values(), *PRIVATE_ATTRIBUTES, *PATCHES]


def identity(row):
    return row.label if isinstance(row, Patch) else f"{row.where}-{row.name}"


@pytest.mark.parametrize("row", EVERYTHING, ids=identity)
def test_a_name_that_has_moved_ends_the_start_if_fit_needs_it_and_else_is_warned_of(lacking, row):
    patches = lacking(row)
    assert row.feature in patching.missing_of(patches)
    if FIT in patching.missing_of(patches):
        needs_fit = [row.feature, *(p.feature for p in PATCHES if p.where == row.name)]
        assert FIT in needs_fit
        with pytest.raises(kerasps.MissingNameError, match="`fit` cannot work") as caught:
            check_patched(patches)
        text = str(caught.value)
    else:
        with pytest.warns(UserWarning, match="works without these features") as warned:
            check_patched(patches)
        [text] = [str(each.message) for each in warned]
        assert f"{row.feature.name}: `" in text
    assert row.why in text
    assert f"Expected: {_compat.SUPPORTED_VERSIONS}. Received: keras {keras.__version__}" in text


def test_each_row_says_by_itself_what_it_is_for():
    """An error has one of them, without the rows before it."""
    assert all(row.why and "above" not in row.why for row in EVERYTHING)


def test_nothing_is_missing_of_the_installed_versions():
    assert patching.missing_of(PATCHES) == {}
    check_patched(PATCHES)  # warnings are errors


FEATURES = list({row.feature.name: row.feature for row in EVERYTHING}.values())


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_a_feature_is_refused_where_it_is_used(feature):
    """By its entries, or by each of its names, which have no other use; or it is dispensable."""
    rows = [row for row in EVERYTHING if row.feature is feature]
    others = [row for row in rows if isinstance(row, Patch) or row.name not in PRIVATE_NAMES]
    checked = any(f"check_offered({constant_of(feature)})" in p.read_text() for p in OTHERS)
    assert feature is FIT or feature.entries or feature.is_dispensable or checked or not others
    for entry in feature.entries:
        where, name = patching.entry_of(entry)
        assert callable(getattr(_compat.definer(where, name), name))


def constant_of(feature):
    return next(name for name, value in vars(_private_names).items() if value is feature)


def test_what_users_call_for_a_feature_raises_an_error_that_names_what_is_missing(
    lacking, library, monkeypatch
):
    """The functions are those of a library, since a hook stays for the rest of the process."""
    monkeypatch.setattr(patching, "_installed", set())
    feature = Feature("loading", ("some_library:Model.load", "some_library:load"))
    patch = Patch("some_library:Model", "_gone", print, feature, "it is wanted", patching.KERAS)
    other = Patch("some_library:Model", "save", lambda original, self: 2, feature, "", "")
    with pytest.warns(UserWarning, match=r"loading: `some_library\.Model\._gone` \(it is wanted\)"):
        missing = check_patched([patch])
    patching.install([patch, other], missing)
    for load in (library.Model().load, library.load):
        with pytest.raises(kerasps.MissingNameError) as caught:
            load()
        message = str(caught.value)
        assert message.startswith(
            "loading cannot work: kerasps needs `some_library.Model._gone` (it is wanted) "
        )
        assert f"Expected: {_compat.SUPPORTED_VERSIONS}. Received: keras " in message
        assert "Install a supported pair of versions" in message
    assert library.Model().save() == 1  # the rest of the feature is not patched
    assert library.load(keras.Sequential()) == 1  # a model of plain Keras


@pytest.fixture
def library(tmp_path, monkeypatch):
    (tmp_path / "some_library.py").write_text(
        "class Model:\n"
        "    def load(self):\n        return 1\n\n"
        "    def save(self):\n        return 1\n\n\n"
        "def load(model=None):\n    return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("some_library")
    del sys.modules["some_library"]


def test_a_class_whose_base_is_missing_is_refused_when_it_is_made(lacking):
    lacking(PRIVATE_NAMES["CheckpointCallable"])

    class Derived(_compat.base_class("CheckpointCallable")):
        def __init__(self, value):
            super().__init__(value)

    with pytest.raises(kerasps.MissingNameError, match=r"`tf\.train\.Checkpoint` cannot work"):
        Derived(1)


def test_a_strategy_that_has_no_entries_checks_its_names_itself(lacking):
    lacking(PRIVATE_NAMES["MirroredVariable"])
    with pytest.raises(kerasps.MissingNameError, match="`CentralStorageStrategy` cannot work"):
        kerasps.CentralStorageStrategy()


def test_the_docs_hold_the_table_of_patches():
    page = (CHECKOUT / "kerasps" / "hooks" / "README.md").read_text()
    table = as_markdown(PATCHES)
    assert table in page, f"Replace the table in kerasps/hooks/README.md by:\n\n{table}"


def test_the_page_of_hooks_that_would_replace_patches_has_every_patch():
    page = (CHECKOUT / "docs" / "upstream.md").read_text()
    assert [p.label for p in PATCHES if not re.search(rf"[`.]{p.name}`", page)] == []


def test_nothing_is_patched_but_from_the_table():
    """No assignment to an attribute of Keras, TensorFlow or a private name, and no `setattr`."""
    wrong = []
    for path in OTHERS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                wrong += [
                    (path.name, dotted(target))
                    for target in targets
                    if dotted(target).partition(".")[0] in ("keras", "tf", "_compat")
                ]
            if isinstance(node, ast.Call) and dotted(node.func) == "setattr":
                wrong.append((path.name, ast.unparse(node.args[0])))
    assert sorted(wrong) == sorted(OWN_ATTRIBUTES)


# What is set by name on objects that are ours, or the user's to set.
OWN_ATTRIBUTES = [
    ("callback_states.py", "callback"),
    ("eager.py", "model"),
    ("make_step.py", "model"),
    ("named.py", "NamedVariable"),
    ("options.py", "args"),
    ("patch.py", "owner"),
    ("phase.py", "_STATE"),
    ("phase.py", "_STATE"),
    ("tensor_like.py", "TensorLike"),
    ("errors.py", "error"),
    ("errors.py", "told"),
    ("errors.py", "told"),
    ("thread_state.py", "eager"),
]


def test_functions_are_left_on_tasks_once_the_process_leaves(monkeypatch):
    leaving = {}
    monkeypatch.setattr("kerasps.hooks.functions._LEAVING", leaving)
    (patch,) = [patch for patch in PATCHES if patch.name == "remove_function"]
    removed = []

    def remove(name):
        patch.function(lambda self, name: removed.append(name), None, name, _leaving=leaving)

    remove("before")
    leave_remote_functions()
    remove("after")
    assert removed == ["before"]


def test_an_anonymous_resource_is_another_one_each_time():
    handles = [variables.anonymous_handle(tf.TensorShape([]), tf.float32) for _ in range(2)]
    values = [tf.raw_ops.VarIsInitializedOp(resource=handle) for handle in handles]
    assert not any(bool(value) for value in values)
    tf.raw_ops.AssignVariableOp(resource=handles[0], value=1.0)
    assert bool(tf.raw_ops.VarIsInitializedOp(resource=handles[0]))
    assert not bool(tf.raw_ops.VarIsInitializedOp(resource=handles[1]))

    @tf.function
    def both():
        one, other = (variables.anonymous_handle(tf.TensorShape([]), tf.float32) for _ in range(2))
        tf.raw_ops.AssignVariableOp(resource=one, value=1.0)
        tf.raw_ops.AssignVariableOp(resource=other, value=2.0)
        return [tf.raw_ops.ReadVariableOp(resource=h, dtype=tf.float32) for h in (one, other)]

    assert [float(value) for value in both()] == [1.0, 2.0]
    gc.collect()


def test_versions_are_those_of_the_packages_whatever_they_are_called_on_pypi(monkeypatch):
    """As with `keras-nightly` and `tf-nightly`, which install `keras` and `tensorflow`."""

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(keras, "__version__", "3.16.0.dev2026102704")
    received = rf"Received: keras 3\.16\.0\.dev2026102704, tensorflow {re.escape(tf.__version__)}\."
    assert re.search(received, str(_compat.moved(A_TEST, ["a name"])))


def test_a_package_that_is_not_installed_is_said_to_be_missing(monkeypatch):
    for package in ("keras", "tensorflow"):
        monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    monkeypatch.setitem(
        _compat.PRIVATE_NAMES, "gone", Row("gone", "no_such_package:anything", A_TEST, "")
    )
    with pytest.raises(ImportError, match=r"Received: no keras, no tensorflow\."):
        _compat.resolve("gone")


def test_a_name_that_is_not_listed_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = _compat.no_such_name


def test_parameters_that_are_gone_are_found(monkeypatch):
    changed = dataclasses.replace(PRIVATE_NAMES["get_stateless_scope"], parameters=("gone",))
    monkeypatch.setitem(_compat.PRIVATE_NAMES, "get_stateless_scope", changed)
    assert _compat.missing_parameters("get_stateless_scope") == ["gone"]


@pytest.mark.parametrize(
    ("name", "parameters", "missing"),
    [
        ("_gone", (), ["_gone"]),
        ("_trainable_variables", (), []),  # assigned in `__init__`
        ("_clip_gradients", ("grads", "gone"), ["_clip_gradients(gone)"]),
    ],
)
def test_attributes_that_are_gone_are_found(name, parameters, missing):
    row = Row(name, "keras:optimizers.Optimizer", A_TEST, "", parameters)
    assert _compat.missing_attribute(row) == missing


def test_an_attribute_counts_as_there_if_a_user_has_replaced_what_assigns_it(monkeypatch):
    monkeypatch.setattr(tf.distribute.ParameterServerStrategy, "__init__", lambda *args: None)
    assert _compat.missing() == []


def docstrings(tree):
    """The string nodes that are documentation."""
    found = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            found.add(body[0].value)
    return found


def dotted(node):
    """`a.b.c` for a chain of attributes of a name, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    return (
        f"{dotted(node.value)}.{node.attr}"
        if isinstance(node, ast.Attribute) and dotted(node.value)
        else ""
    )


def private_references(source):
    """What a module refers to in the private parts of Keras and TensorFlow: by import, by attribute
    or by string.
    """
    tree = ast.parse(source)
    documentation = docstrings(tree)
    texts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            texts += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            texts += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            texts.append(dotted(node))
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node not in documentation
        ):
            texts.append(node.value)
    return sorted({text for text in texts if any(root in text for root in PRIVATE_ROOTS)})


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.name)
def test_no_other_module_reaches_into_private_modules(path):
    assert private_references(path.read_text()) == []


def is_own(node):
    """Whether an attribute is one of an object of the module's own."""
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def defined_names(tree):
    """Names of functions, classes and attributes that a module defines itself."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
            yield node.attr


def private_attributes(tree):
    """Attributes that a module asks an object for, or gives one that is not its own.

    By name too: `getattr(optimizer, "_distribution_strategy", None)`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (isinstance(node.ctx, ast.Load) or not is_own(node)):
            yield node.attr
        elif isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr", "setattr"):
            yield from (argument.value for argument in node.args[1:2] if is_text(argument))


def is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_every_private_attribute_that_kerasps_touches_is_listed():
    trees = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in OTHERS}
    defined = {name for tree in trees.values() for name in defined_names(tree)}
    # Of `os`, of named tuples, and of gRPC's channels, whose absence changes nothing.
    defined |= {"_current_frames", "_exit", "_replace", "_connectivity_state"}
    listed = {row.name for row in PRIVATE_ATTRIBUTES}
    touched = {
        (file, name)
        for file, tree in trees.items()
        for name in private_attributes(tree)
        if name.startswith("_") and not name.startswith("__") and name not in defined
    }
    assert {(file, name) for file, name in touched if name not in listed} == set()
    assert "_clip_gradients" in {name for _, name in touched}, "the search finds nothing"
    assert ("hooks/optimizers.py", "_distribution_strategy") in touched, "the search finds no names"
    unused = (
        {name for name in listed if name.startswith("_")} - {name for _, name in touched} - defined
    )
    assert unused == set()


def test_a_lookup_table_is_known_by_its_handle():
    initializer = tf.lookup.KeyValueTensorInitializer(["a"], [1])
    table = tf.lookup.StaticHashTable(initializer, 0)
    assert _compat.owner_of(table.resource_handle) is table
    assert _compat.owner_of(tf.constant(0)) is None
