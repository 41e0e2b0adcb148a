"""Each promise stands on its page and has a test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from promises import PROMISES

CHECKOUT = Path(__file__).resolve().parents[2]


def words(text):
    """The text without marks of a quote or a comment, with one space between words."""
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.sentence[:40])
def test_a_promise_stands_on_its_page_and_has_a_test(promise):
    assert words(promise.sentence) in words((CHECKOUT / promise.page).read_text("utf-8"))
    for test in promise.tests:
        path, _, name = test.partition("[")[0].partition("::")
        functions = ast.walk(ast.parse((CHECKOUT / path).read_text("utf-8")))
        names = {node.name for node in functions if isinstance(node, ast.FunctionDef)}
        assert not name or name in names, test
