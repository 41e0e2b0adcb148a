"""Texts in a step graph that nothing but messages of errors is made of.

They name what is numbered from model to model: the tables of a model, and in the assertions of
layers the layers and their operations. A step graph that serves another model than it was built for
fails in the words of the first, which are put into those of the second here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import tensorflow as tf

_Error = TypeVar("_Error", bound=BaseException)

# By operation, the attribute that may be a text.
TEXT_ATTRIBUTES = {"Const": "value", "CheckNumerics": "message", "CheckNumericsV2": "message"}
# Hand on the text that is their first input.
_HANDED_ON_BY = {"Identity", "GatherV2"}
# Of an assertion, the condition, which comes before what is said.
_CONDITION = 0
_ESCAPED = {"\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "'": "\\'", "\\": "\\\\"}


def texts_in(
    nodes: Sequence[tf.compat.v1.NodeDef], returned: Iterable[str]
) -> dict[str, list[str]]:
    """Return the texts in a graph or function, by the name of the node that has them.

    Args:
        nodes: its `NodeDef`s.
        returned: the names of the tensors that it returns.
    """
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
    """The texts of step graphs that were built for another model, and what they are in this one.

    Every text stands for one other, also where a model has several step graphs: an error does not
    say which of them it is from.
    """

    def __init__(self) -> None:
        self._words: Mapping[str, str] = {}

    def take(self, theirs: Sequence[str], ours: Sequence[str]) -> bool:
        """Note the texts of a graph that is about to be used, and what each is in this model.

        Returns:
            Whether a text still stands for one other. Where it would not, nothing is noted.
        """
        words = dict(self._words)
        for text, meant in zip(theirs, ours, strict=True):
            if words.setdefault(text, meant) != meant:
                return False
        self._words = words
        return True

    def say(self, error: _Error) -> _Error:
        """Return an error of a step in the words of this model; the error itself where they are."""
        words = {text: meant for text, meant in self._words.items() if text != meant}
        if not words or not isinstance(error, tf.errors.OpError):
            return error
        # `[text]`, escaped, is said by an assertion, the other form by a check of numbers.
        by_form = {
            form.format(escape(text)): form.format(escape(meant))
            for text, meant in words.items()
            for form, escape in (("[{}]", _escaped), ("{} : Tensor had ", str))
        }
        # Of two texts that begin alike, the longer one.
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
