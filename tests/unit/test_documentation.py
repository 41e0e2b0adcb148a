"""Public docstrings say all that API pages need; the README names what there is."""

from __future__ import annotations

import builtins
import collections.abc
import inspect
import re
import tomllib
import types
import typing

import keras
import pytest

import kerasps
from support.documentation import CHECKOUT, RECORDS, commands_in, examples, public_classes

CLASSES = public_classes()
DOCUMENTED = {name: cls for name, cls in CLASSES.items() if not issubclass(cls, BaseException)}
SECTION = re.compile(r"^(Args|Returns|Raises|Warns):$")
ENTRY = re.compile(r"^    (\w+): (\S.*)$")
TYPES_FROM = {
    *("builtins", "collections", "datetime", "keras", "numpy", "os", "pathlib"),
    *("tensorflow", "types", "typing"),
}


def sections(text):
    """The sections of a docstring: from their names to their entries, each a name and a text."""
    found, current = {}, None
    for line in inspect.cleandoc(text or "").splitlines():
        if SECTION.match(line):
            current = found.setdefault(line[:-1], {})
        elif line and not line.startswith(" "):
            current = None
        elif current is not None and ENTRY.match(line):
            name, described = ENTRY.match(line).groups()
            current[name] = described
    return found


def own_members(cls):
    """Public methods and properties that the class and its bases here define, none of Keras's."""
    defined = [vars(base) for base in cls.__mro__ if base.__module__.startswith("kerasps")]
    for name, member in dict(collections.ChainMap(*defined)).items():
        if name.startswith("_") and name != "__call__":
            continue
        if isinstance(member, (classmethod, staticmethod)):
            member = member.__func__
        if isinstance(member, property) or inspect.isfunction(member):
            yield name, member


MEMBERS = [
    pytest.param(cls, member, id=f"{class_name}.{name}")
    for class_name, cls in CLASSES.items()
    for name, member in own_members(cls)
]
METHODS = [case for case in MEMBERS if inspect.isfunction(case.values[1])]


def parameters_of(function, skipped=1):
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = list(inspect.signature(function).parameters.values())[skipped:]
    return [p.name for p in parameters if p.kind not in kinds]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_parameter_of_a_class_is_described(name):
    described = sections(DOCUMENTED[name].__doc__).get("Args", {})
    assert list(described) == parameters_of(DOCUMENTED[name].__init__)


@pytest.mark.parametrize(("cls", "method"), METHODS)
def test_every_parameter_of_a_method_is_described(cls, method):
    if getattr(keras.callbacks.Callback, method.__name__, None) is not None:
        return  # as Keras's
    if issubclass(cls, keras.Layer) and hasattr(keras.Layer, method.__name__):
        return  # as Keras's; the class describes the arguments of `call`
    text = method.__doc__
    described = sections(text).get("Args", {})
    missing = [
        p for p in parameters_of(method) if p not in described and f"`{p}`" not in (text or "")
    ]
    assert missing == []


@pytest.mark.parametrize(("cls", "member"), MEMBERS)
def test_every_member_says_what_it_does(cls, member):
    text = inspect.getdoc(member)
    summary = text.splitlines()[0]
    assert summary[0].isupper() or summary[0] == "`"
    assert summary.endswith(".")
    if inspect.isfunction(member):
        returns = typing.get_type_hints(member).get("return")
        says = "Returns" in sections(text) or summary.startswith("Return ")
        assert says == (returns is not type(None))


@pytest.mark.parametrize("name", CLASSES)
def test_docstrings_have_one_style(name):
    """`name: lower-case text`, one entry after the other, each a known exception or parameter."""
    cls = CLASSES[name]
    texts = [cls.__doc__, *(inspect.getdoc(member) for _, member in own_members(cls))]
    for text in texts:
        for section, entries in sections(text).items():
            if section in ("Raises", "Warns"):
                kinds = [getattr(kerasps, e, None) or getattr(builtins, e) for e in entries]
                assert all(issubclass(kind, BaseException) for kind in kinds)
            for described in entries.values():
                assert re.match(r"[a-z`\"]", described), described
        assert not re.search(r"^ *(Args|Returns|Raises): \S", text, re.MULTILINE), text


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_class_has_an_example(name):
    assert (name in examples()) == (name not in RECORDS)


def types_in(hint):
    """The classes that a type hint names."""
    if typing.get_origin(hint) is not None:
        yield typing.get_origin(hint)
        for argument in typing.get_args(hint):
            yield from types_in(argument)
    elif isinstance(hint, list):
        for argument in hint:
            yield from types_in(argument)
    elif isinstance(hint, type):
        yield hint


def hints_of(member):
    function = member.fget if isinstance(member, property) else member
    return typing.get_type_hints(function)


def private_types(hints):
    known = set(CLASSES.values()) | {types.UnionType, typing.Union, collections.abc.Callable}
    return {
        kind
        for hint in hints.values()
        for kind in types_in(hint)
        if kind not in known and kind.__module__.partition(".")[0] not in TYPES_FROM
    }


@pytest.mark.parametrize(("cls", "member"), MEMBERS)
def test_what_the_public_gets_and_gives_is_public(cls, member):
    assert private_types(hints_of(member)) == set()


@pytest.mark.parametrize("name", DOCUMENTED)
def test_what_a_constructor_takes_is_public(name):
    assert private_types(hints_of(DOCUMENTED[name].__init__)) == set()


# The README


def test_examples_import_public_names_alone():
    wrong = []
    for path in sorted((CHECKOUT / "examples").glob("*.py")):
        wrong += [
            (path.name, line)
            for line in path.read_text().splitlines()
            if re.match(r"\s*(from kerasps|import kerasps\.)", line)
        ]
    assert wrong == []


def test_the_readme_names_environments_that_there_are():
    readme = (CHECKOUT / "README.md").read_text()
    tox = (CHECKOUT / "tox.ini").read_text()
    named = {
        environment
        for names in re.findall(r"tox -e ([\w,-]+)", readme)
        for environment in names.split(",")
    }
    assert named
    for environment in named:
        assert f"[testenv:{environment}]" in tox or environment == "py"


def test_the_readme_shows_three_commands():
    readme = (CHECKOUT / "README.md").read_text()
    commands = [words for words in commands_in(readme) if words[0] == "kerasps"]
    assert [command[1] for command in commands] == ["plan", "launch", "run"]


def test_python_versions_in_the_readme_are_those_of_the_package():
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    versions = re.findall(r"Python :: (3\.\d+)", str(project["classifiers"]))
    text = f"Python {', '.join(versions[:-1])} or {versions[-1]}"
    assert text in " ".join((CHECKOUT / "README.md").read_text().split())
