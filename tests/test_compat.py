"""The canary: what kerasps needs of the private parts of Keras and TensorFlow is there, and is asked for in one place."""

from __future__ import annotations

import ast
import importlib.metadata
from pathlib import Path

import pytest
import tensorflow as tf

import kerasps
from kerasps import _compat

MODULES = sorted(Path(kerasps.__file__).parent.glob("*.py"))
OTHERS = [path for path in MODULES if path.name != "_compat.py"]
PRIVATE_ROOTS = ("keras.src", "tensorflow.python", "tf.python", "tf.__internal__", "tensorflow.__internal__")


@pytest.mark.parametrize("name", _compat.PRIVATE_NAMES)
def test_every_private_name_exists_with_the_parameters_that_it_is_called_with(name):
    assert getattr(_compat, name) is _compat.resolve(name)
    assert _compat.missing_parameters(name) == []


@pytest.mark.parametrize("owner", _compat.PRIVATE_ATTRIBUTES)
def test_every_private_attribute_exists_with_the_parameters_that_it_is_called_with(owner):
    assert _compat.missing_attributes(owner) == []


@pytest.mark.parametrize("name", _compat.PRIVATE_NAMES)
def test_every_private_name_is_used(name):
    assert any(f"_compat.{name}" in path.read_text() for path in OTHERS)


@pytest.mark.parametrize(
    ("module", "attribute"),
    [
        ("keras.src.no_such_module", "anything"),
        ("no_such_package", "anything"),
        ("keras.src.optimizers.base_optimizer", "NoSuchOptimizer"),
    ],
)
def test_a_name_that_has_moved_is_an_error_with_the_supported_and_the_installed_versions(monkeypatch, module, attribute):
    monkeypatch.setitem(_compat.PRIVATE_NAMES, "moved", _compat.PrivateName(module, attribute, "it is wanted for a test"))
    with pytest.raises(ImportError) as caught:
        _ = _compat.moved
    message = str(caught.value)
    assert f"`{module}.{attribute}` (it is wanted for a test)" in message
    assert f"Expected: {_compat.SUPPORTED_VERSIONS}." in message
    keras, tensorflow = importlib.metadata.version("keras"), importlib.metadata.version("tensorflow")
    assert f"Received: keras {keras}, tensorflow {tensorflow}." in message


def test_a_package_that_is_not_installed_is_said_to_be_missing(monkeypatch):
    def version(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(_compat.PRIVATE_NAMES, "moved", _compat.PrivateName("no_such_package", "anything", "a test"))
    with pytest.raises(ImportError, match=r"Received: no keras, no tensorflow\."):
        _compat.resolve("moved")


def test_a_name_that_is_not_listed_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = _compat.no_such_name


def test_parameters_that_are_gone_are_found(monkeypatch):
    listed = _compat.PRIVATE_NAMES["get_stateless_scope"]
    changed = _compat.PrivateName(listed.module, listed.attribute, listed.why, ("gone",))
    monkeypatch.setitem(_compat.PRIVATE_NAMES, "get_stateless_scope", changed)
    assert _compat.missing_parameters("get_stateless_scope") == ["gone"]


def test_attributes_that_are_gone_are_found(monkeypatch):
    owner = "keras.src.optimizers.base_optimizer:BaseOptimizer"
    attributes = (
        _compat.PrivateAttribute("_gone", "neither on the class nor assigned in it"),
        _compat.PrivateAttribute("_trainable_variables", "assigned in `__init__`"),
        _compat.PrivateAttribute("_clip_gradients", "a method", ("grads", "gone")),
    )
    monkeypatch.setitem(_compat.PRIVATE_ATTRIBUTES, owner, attributes)
    assert _compat.missing_attributes(owner) == ["_gone", "_clip_gradients(gone)"]


def docstrings(tree):
    """The string nodes that are documentation."""
    found = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            found.add(body[0].value)
    return found


def dotted(node):
    """`a.b.c` for a chain of attributes of a name, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) and dotted(node.value) else ""


def private_references(source):
    """What a module refers to in the private parts of Keras and TensorFlow: by import, by attribute or by string."""
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
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documentation:
            texts.append(node.value)
    return sorted({text for text in texts if any(root in text for root in PRIVATE_ROOTS)})


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.name)
def test_no_other_module_reaches_into_private_modules(path):
    assert private_references(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import keras.src.backend",
        "from keras import src",
        "from keras.src import backend",
        "def f():\n    from tensorflow.python.eager import context",
        "import keras\nkeras.src.backend",
        "tf.__internal__.dispatch",
        "name = 'tensorflow.python.eager'",
        "importlib.import_module(f'keras.src.{name}')",
    ],
)
def test_every_way_to_reach_into_private_modules_is_seen(source):
    assert private_references(source)


def defined_names(tree):
    """Names of functions, classes and attributes that a module defines itself."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def private_attributes(tree):
    """Attributes with a leading underscore that a module asks an object for, and those that it hooks by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_wraps":
            yield from (argument.value for argument in node.args if isinstance(argument, ast.Constant))


def test_every_private_attribute_that_kerasps_touches_is_listed():
    trees = {path.name: ast.parse(path.read_text()) for path in OTHERS}
    own = {name for tree in trees.values() for name in defined_names(tree)} | {"_exit"}  # of `os`
    listed = {attribute.name for attributes in _compat.PRIVATE_ATTRIBUTES.values() for attribute in attributes}
    touched = {
        (file, name)
        for file, tree in trees.items()
        for name in private_attributes(tree)
        if name.startswith("_") and not name.startswith("__") and name not in own
    }
    assert {(file, name) for file, name in touched if name not in listed} == set()
    assert ("dispatcher.py", "_cluster") in touched, "the search finds nothing"
    assert ("hooks.py", "_var_key") in touched, "the search finds no hooks"
    unused = {name for name in listed if name.startswith("_")} - {name for _, name in touched} - own
    assert unused == set()


def test_a_lookup_table_is_known_by_its_handle():
    initializer = tf.lookup.KeyValueTensorInitializer(["a"], [1])
    table = tf.lookup.StaticHashTable(initializer, 0)
    assert _compat.owner_of(table.resource_handle) is table
    assert _compat.owner_of(tf.constant(0)) is None
