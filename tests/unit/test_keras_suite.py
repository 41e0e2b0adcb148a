"""The runner of Keras's own tests: what it counts."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

KERAS = Path(importlib.util.find_spec("keras").submodule_search_locations[0])

needs_keras_tests = pytest.mark.skipif(
    not any((KERAS / "src").rglob("*_test.py")),
    reason="the wheel of this version of Keras holds no tests",
)


# A script, as a module.
SPEC = importlib.util.spec_from_file_location(
    "keras_suite_run", Path(__file__).parents[1] / "keras_suite" / "run.py"
)
run = sys.modules["keras_suite_run"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(run)


def test_only_tests_that_pass_under_plain_keras_count():
    passed, failed = run.Outcome("passed"), run.Outcome("failed", "ValueError: a\nb")
    plain = {
        "f::a": passed,
        "f::b": passed,
        "f::c": failed,
        "f::d": run.Outcome("skipped"),
        "f::e": passed,
    }
    comparison = run.compare(
        plain, {"f::a": passed, "f::b": failed, "f::c": passed, "f::d": passed}, ["f::b"]
    )
    assert comparison.passed == ("f::a",)
    assert {test: outcome.outcome for test, outcome in comparison.failed.items()} == {
        "f::b": "failed",
        "f::e": "lost",
    }
    assert comparison.failed["f::b"].reason == "ValueError: a"
    assert comparison.unlisted == ("f::e",)
    assert comparison.stale == ()
    assert comparison.share == pytest.approx(1 / 3)


@needs_keras_tests
def test_every_listed_test_is_one_of_keras():
    listed = run.listed_tests(run.LISTED_IN.read_text())
    assert listed
    for pattern in listed:
        file, test_class, name = pattern.split("::")
        source = (KERAS.parent / file).read_text()
        beginning = name.partition("*")[0]
        assert f"class {test_class}(" in source, pattern
        # The names of the cases of a parameterized test begin with the method's.
        methods = re.findall(r"def (test_\w+)", source)
        assert any(
            method.startswith(beginning) or beginning.startswith(method) for method in methods
        ), pattern
