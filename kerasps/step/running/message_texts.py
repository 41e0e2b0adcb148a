"""Texts in a step graph that appear only in error messages.

They contain names that Keras numbers from model to model: those of tables, and in assertions those
of layers and operations. A step graph that serves another model than it was built for fails with
the first model's texts. `OtherWords` replaces them by those of the second.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import tensorflow as tf

_Error = TypeVar("_Error", bound=BaseException)

# For each operation, the attribute that may be a text.
TEXT_ATTRIBUTES = {"Const": "value", "CheckNumerics": "message", "CheckNumericsV2": "message"}
# Operations that pass on the text of their first input.
_HANDED_ON_BY = {"Identity", "GatherV2"}
# The index of an assertion's condition, which comes before its texts.
_CONDITION = 0
_ESCAPED = {"\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "'": "\\'", "\\": "\\\\"}


def texts_in(
    nodes: Sequence[tf.compat.v1.NodeDef], returned: Iterable[str]
) -> dict[str, list[str]]:
    """Return the message texts of a graph or function, by the name of the node that has them."""
    uses: dict[str, list[tuple[Any, int]]] = {}
    for node in nodes:
        for index, source in enumerate(node.input):
            if not source.startswith("^"):
                uses.setdefault(_node_of(source), []).append((node, index))
    results = {_node_of(name) for name in returned}

    def is_said_only(name: str) -> bool:
        return name not in results and all(
            index > _CONDITION
            if user.op == "Assert"
            else user.op in _HANDED_ON_BY and index == 0 and is_said_only(user.name)
            for user, index in uses.get(name, [])
        )

    found = {}
    for node in nodes:
        if node.op == "Const":
            value = node.attr["value"].tensor
            is_string = value.dtype == tf.string.as_datatype_enum
            if is_string and len(value.tensor_shape.dim) < 2 and is_said_only(node.name):
                texts = tf.make_ndarray(value).reshape(-1)
                found[node.name] = [_decoded(text) for text in texts]
        elif node.op in TEXT_ATTRIBUTES:
            found[node.name] = [_decoded(node.attr[TEXT_ATTRIBUTES[node.op]].s)]
    return found


class OtherWords:
    """Translates the texts of step graphs that were built for another model into this model's.

    Each text has one translation, even if the model has several step graphs: an error does not say
    which graph it is from.
    """

    def __init__(self) -> None:
        self._words: Mapping[str, str] = {}

    def add(self, theirs: Sequence[str], ours: Sequence[str]) -> bool:
        """Add the texts of a graph that is about to be used, and their translations.

        Returns True if every text still has one translation. Otherwise, nothing is added.
        """
        words = dict(self._words)
        for text, meant in zip(theirs, ours, strict=True):
            if words.setdefault(text, meant) != meant:
                return False
        self._words = words
        return True

    def say(self, error: _Error) -> _Error:
        """Return an error of a step with the texts of this model; the same error if none differ."""
        words = {text: meant for text, meant in self._words.items() if text != meant}
        if not words or not isinstance(error, tf.errors.OpError):
            return error
        # An assertion prints `[text]`, escaped; a check of numbers prints the other form.
        by_form = {
            form.format(escape(text)): form.format(escape(meant))
            for text, meant in words.items()
            for form, escape in (("[{}]", _escaped), ("{} : Tensor had ", str))
        }
        # The longer of two texts with the same beginning goes first.
        forms = sorted(by_form, key=len, reverse=True)
        pattern = "|".join(re.escape(form) for form in forms)
        message = re.sub(pattern, lambda found: by_form[found[0]], error.message)
        if message == error.message:
            return error
        try:
            said = type(error)(error.node_def, error.op, message)
        except TypeError:  # a class that takes other arguments
            return error
        return cast("_Error", said.with_traceback(error.__traceback__))


def _node_of(name: str) -> str:
    return name.partition(":")[0]


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "backslashreplace")


def _escaped(text: str) -> str:
    """Return a text as TensorFlow's assertions print it."""
    return "".join(
        _ESCAPED.get(c) or (f"\\{ord(c):03o}" if ord(c) < 32 or ord(c) == 127 else c) for c in text
    )
