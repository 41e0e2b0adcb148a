"""A hook is called by whoever holds the function, and calls what the function was."""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import itertools
import sys
from unittest import mock

import pytest

from kerasps._private_names import FIT
from kerasps.hooks import in_place
from kerasps.hooks import patch as patching
from kerasps.hooks.patch import Patch
from kerasps.hooks.table import PATCHES

# A package as Keras and TensorFlow are: its functions are hooked. What wraps them is elsewhere.
LIBRARY = '''
import functools

def decorated(function):
    @functools.wraps(function)
    def handler(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise error from None
    return handler

class Base:
    def method(self, one, two=2, *, three=3):
        """A method."""
        return [one, two, three]

    @property
    def value(self):
        """A value."""
        return 1

    @decorated
    def fit(self, x=None):
        return ["fit", x]

class Model(Base):
    def __init__(self, size=1):
        self.size = size

    def method(self, one, two=2, *, three=3):
        return ["super", *super().method(one, two, three=three)]

class Sub(Model):
    def fit(self, x=None):
        return ["sub", *super().fit(x)]

def function(x):
    return [x]
'''


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library that has just been imported, and of which nothing is hooked."""
    folder = tmp_path / "some_library"
    folder.mkdir()
    (folder / "__init__.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(patching, "_installed", set())
    yield importlib.import_module("some_library")
    del sys.modules["some_library"]


def hooked(original, *args, **kwargs):
    return ["hook", *original(*args, **kwargs)]


def where_of(owner):
    return f"{owner.__module__}:{owner.__name__}" if inspect.isclass(owner) else owner.__name__


def install(owner, *names, hook=hooked):
    patching.install([Patch(where_of(owner), name, hook, FIT, "a test", "") for name in names])


def test_whoever_holds_a_function_calls_the_hook(library):
    method, fit, function = library.Model.method, library.Base.fit, library.function
    bound, wrapped = library.Model().method, library.Base.fit.__wrapped__
    install(library.Model, "method")
    install(library.Base, "fit")
    install(library, "function")
    assert method(library.Model(), 1) == bound(1) == ["hook", "super", 1, 2, 3]
    assert fit(library.Base(), 7) == library.Model().fit(x=7) == ["hook", "fit", 7]
    assert library.Sub().fit(7) == ["sub", "hook", "fit", 7]
    assert wrapped(library.Base(), 7) == ["hook", "fit", 7]
    assert function(7) == library.function(7) == ["hook", 7]


def test_an_inherited_function_and_a_property_are_hooked_where_they_are_defined(library):
    before, getter = library.Base.value, library.Base.value.fget
    install(library.Sub, "value", hook=lambda original, self: original(self) + 1)
    install(library.Sub, "__init__", hook=lambda original, self: original(self, 5))
    assert library.Base.value is before
    assert getter(library.Base()) == library.Sub().value == 2
    assert library.Model().size == library.Sub().size == 5


def test_a_hooked_function_looks_as_it_did(library):
    before = {
        name: (str(inspect.signature(getattr(library.Base, name))), getattr(library.Base, name))
        for name in ("method", "fit")
    }
    install(library.Base, *before)
    for name, (signature, function) in before.items():
        assert getattr(library.Base, name) is function
        assert str(inspect.signature(function)) == signature
        assert function.__name__ == name
    assert library.Base.method.__doc__ == "A method."
    assert library.Base().method(1, three=4) == ["hook", 1, 2, 4]
    with pytest.raises(TypeError, match=r"Base\.method\(\) got an unexpected keyword argument"):
        library.Base().method(1, four=4)


def test_a_hook_is_installed_once(library):
    for _ in range(2):
        install(library.Base, "method", "fit")
    assert library.Base().method(1) == ["hook", 1, 2, 3]
    assert library.Base().fit(1) == ["hook", "fit", 1]


def test_the_frames_of_a_hooked_function_can_be_looked_at(library):
    seen = []

    def hook(original, self, *args, **kwargs):
        frame = inspect.currentframe()
        while frame is not None:
            seen.append((frame.f_code.co_name, dict(frame.f_locals)))
            frame = frame.f_back
        return original(self, *args, **kwargs)

    model = library.Model()
    install(library.Model, "method", hook=hook)
    install(library.Base, "fit", hook=hook)
    assert model.method(1) == ["super", 1, 2, 3]
    assert model.fit(1) == ["fit", 1]
    assert {name for name, _ in seen} >= {"method", "fit"}
    assert [values["args"] for name, values in seen if name == "method"] == [(model, 1)]


def test_an_error_of_the_hook_keeps_its_cause(library):
    def hook(original, self, x=None):
        raise ValueError("ours") from KeyError("theirs")

    install(library.Base, "fit", hook=hook)
    with pytest.raises(ValueError, match="ours") as caught:
        library.Base().fit()
    assert isinstance(caught.value.__cause__, KeyError)


# Wrappers


def with_wraps(original):
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        return ["wrapper", *original(*args, **kwargs)]

    return wrapper


def without_wraps(original):
    return lambda *args, **kwargs: ["wrapper", *original(*args, **kwargs)]


def as_an_object(original):
    class Wrapper:
        def __call__(self, *args, **kwargs):
            return ["wrapper", *original(*args, **kwargs)]

        def __get__(self, instance, owner=None):
            return self if instance is None else functools.partial(self, instance)

    return Wrapper()


def as_a_partial_method(original):
    def wrapper(self, *args, _original=original, **kwargs):
        return ["wrapper", *_original(self, *args, **kwargs)]

    return functools.partialmethod(wrapper, _original=original)


WRAPPERS = [with_wraps, without_wraps, as_an_object, as_a_partial_method]


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize(
    ("owner", "name"), [("Base", "fit"), ("Model", "fit"), ("Model", "method")]
)
def test_a_wrapper_that_was_there_before_is_called_and_calls_the_hook(library, wrap, owner, name):
    owner = getattr(library, owner)
    defined_by = library.Model if name == "method" and owner is library.Model else library.Base
    original = getattr(owner, name)
    plain = original(owner(), 1)
    setattr(owner, name, wrap(original))
    install(defined_by, name)
    assert getattr(owner(), name)(1) == ["wrapper", "hook", *plain]
    # A second wrapper, behind the hook.
    setattr(owner, name, with_wraps(getattr(owner, name)))
    assert getattr(owner(), name)(1) == ["wrapper", "wrapper", "hook", *plain]
    # The user takes all of them away.
    setattr(owner, name, original)
    assert getattr(owner(), name)(1) == ["hook", *plain]
    install(defined_by, name)
    assert getattr(owner(), name)(1) == ["hook", *plain]


def test_a_mock_that_ends_after_the_installation_leaves_the_hook(library):
    with (
        mock.patch.object(library.Base, "fit", autospec=True) as on_base,
        mock.patch.object(library.Model, "method", autospec=True),
        mock.patch.object(library.Sub, "value", new_callable=mock.PropertyMock),
    ):
        install(library.Base, "fit", "method", "value", hook=lambda original, *args: "hook")
        install(library.Model, "method", hook=lambda original, *args: "hook")
        library.Base().fit(1)
        on_base.assert_called_once()
    assert library.Base().fit(1) == library.Model().method(1) == library.Sub().value == "hook"
    with mock.patch.object(library.Base, "fit"):
        library.Base().fit(1)
    assert library.Base().fit(1) == "hook"


def test_a_function_that_was_frozen_calls_the_hook(library):
    before = library.Base.value
    library.Base.value = property(lambda self: [before.fget(self)])
    gc.freeze()
    try:
        install(library.Base, "value", hook=lambda original, self: original(self) + 1)
    finally:
        gc.unfreeze()
    assert library.Base().value == [2]


def test_a_wrapper_around_a_getter_calls_the_hook(library):
    before = library.Base.value
    library.Base.value = property(lambda self: [before.fget(self)])
    install(library.Base, "value", hook=lambda original, self: original(self) + 1)
    assert library.Base().value == [2]
    library.Base.value = before
    assert library.Base().value == 2


def test_what_replaces_a_function_that_nobody_holds_is_hooked(library):
    library.Base.method = lambda self, one: ["replaced", one]
    library.Base.value = property(lambda self: ["replaced"])
    install(library.Base, "method", "value")
    assert library.Base().method(1) == ["hook", "replaced", 1]
    assert library.Base().value == ["hook", "replaced"]


def test_a_function_with_more_free_variables_is_replaced(library):
    namespace: dict = {}
    source = (
        "def make(a, b):\n    def fit(self, x):\n        return [a, b, x]\n    return fit\n"
        "fit = make(1, 2)"
    )
    exec(compile(source, library.__file__, "exec"), namespace)
    namespace["fit"].__code__ = namespace["fit"].__code__.replace(co_qualname="Base.fit")
    library.Base.fit = namespace["fit"]
    assert in_place.defined_function(library.Base, "fit") is namespace["fit"]
    install(library.Base, "fit")
    assert library.Base().fit(3) == ["hook", 1, 2, 3]


# The table


@pytest.fixture(scope="module")
def all_objects():
    """What the collector knows of: asked once for all of the table, since that takes a while."""
    return gc.get_objects()


def test_each_function_of_the_table_is_defined_once_and_can_be_hooked():
    functions = {p.label: in_place.defined_function(p.owner, p.name) for p in PATCHES}
    assert [label for label, function in functions.items() if function is None] == []
    assert len({id(function) for function in functions.values()}) == len(PATCHES)
    for function in functions.values():
        assert in_place.can_be_hooked(function)
        chain = list(in_place.chain_of(function))
        for outer, inner in itertools.pairwise(chain):
            assert inner in [cell.cell_contents for cell in outer.__closure__]
        flags = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
        assert not any(each.__code__.co_flags & flags for each in chain)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.label)
def test_who_holds_a_function_of_the_table_calls_its_hook(patch, monkeypatch, all_objects):
    """It is held by what a user has put in its place."""
    function = in_place.defined_function(patch.owner, patch.name)
    chain = list(in_place.chain_of(function))
    signature = inspect.signature(function)
    states = [(each.__code__, each.__kwdefaults__, dict(vars(each))) for each in chain]
    is_property = isinstance(inspect.getattr_static(patch.owner, patch.name), property)
    monkeypatch.setattr(in_place, "live_objects", lambda: all_objects)
    monkeypatch.setattr(patch.owner, patch.name, property(repr) if is_property else repr)
    found = in_place.defined_function(patch.owner, patch.name)
    assert found is function
    monkeypatch.undo()
    try:
        in_place.hook_function(found, lambda original, *args: (original, args))
        calls = [each("self", "argument") for each in chain]
        assert inspect.signature(found) == signature
    finally:
        for each, (code, defaults, attributes) in zip(chain, states, strict=True):
            each.__code__, each.__kwdefaults__ = code, defaults
            vars(each).clear()
            vars(each).update(attributes)
    for (original, args), (code, *_) in zip(calls, states, strict=True):
        assert args == ("self", "argument")
        assert original.__code__ is code
