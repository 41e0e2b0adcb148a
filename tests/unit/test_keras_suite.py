"""The runner of Keras's own tests: what it counts, and that a crash of a file loses no more than it
must.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from support.keras_suite import load_runner

KERAS = Path(importlib.util.find_spec("keras").submodule_search_locations[0])

needs_keras_tests = pytest.mark.skipif(
    not any((KERAS / "src").rglob("*_test.py")),
    reason="the wheel of this version of Keras holds no tests",
)


run = load_runner()


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


def test_a_listed_test_that_passes_is_stale():
    plain = {"f::a1": run.Outcome("passed"), "f::a2": run.Outcome("passed")}
    ours = {"f::a1": run.Outcome("failed"), "f::a2": run.Outcome("passed")}
    listed = ["f::a*", "f::a1", "f::b", "a file that did not run::a"]
    assert run.compare(plain, ours, listed).stale == ("f::a*", "f::b")


def test_a_listed_test_that_fails_under_plain_keras_is_not_stale():
    """A nightly build may have broken it, or a package that it needs is missing."""
    plain = {"f::a": run.Outcome("passed"), "f::b": run.Outcome("failed")}
    comparison = run.compare(plain, dict.fromkeys(plain, run.Outcome("passed")), ["f::b"])
    assert comparison.stale == comparison.unlisted == ()


def test_a_file_whose_tests_end_the_connection_of_their_process_runs_alone(tmp_path):
    files = [tmp_path / f"{name}_test.py" for name in "abc"]
    for path, text in zip(files, ("", "context._reset_context()", ""), strict=True):
        path.write_text(text)
    assert run.in_groups(files) == [[files[0], files[2]], [files[1]]]


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


@needs_keras_tests
def test_words_that_name_no_file_are_an_error():
    assert {path.name for path in run.suite_files(KERAS, ["models/model", "losses/loss_"])} == {
        "model_test.py",
        "loss_test.py",
    }
    with pytest.raises(
        SystemExit, match="No test file of the suite has a path with one of: nothing_like_it"
    ):
        run.suite_files(KERAS, ["nothing_like_it"])
