"""Runs Keras's own tests, those that its wheel ships, under plain Keras and under a kerasps
strategy, and compares.

    python tests/keras_suite/run.py                         # all of it
    python tests/keras_suite/run.py models losses/loss_test  # files whose path holds one of these

Each process runs a few test files of one directory, once plain and once with a cluster and its
strategy as the global default (`tf.distribute.experimental_set_strategy`). Where one ends early,
what it did not get to runs again, a file at a time. A test counts if it passes under plain Keras.
The exit status is 1 where fewer than `--threshold` of these pass under kerasps, where one that
fails is not listed with its reason in `docs/compatibility.md`, and where one that is listed there
passes.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
LISTED_IN = HERE.parent.parent / "docs" / "compatibility.md"
# The file that takes longest goes first, so that the others run beside it.
SUITE = (
    "trainers/trainer_test.py",
    "trainers/compile_utils_test.py",
    "trainers/epoch_iterator_test.py",
    "trainers/data_adapters",
    "models",
    "callbacks",
    "optimizers",
    "metrics",
    "losses",
    "layers",
    "saving",
    "export",
    "initializers",
    "random",
    "distillation",
    "utils",
)
# To import TensorFlow and to start a cluster takes longer than most files do. With more, processes
# would grow too large.
FILES_PER_PROCESS = 10
# A first cell of a table that names tests: `keras/src/models/model_test.py::ModelTest::test_*`
LISTED_TEST = re.compile(r"`(keras/src/[^`]+::[^`]+)`")


@dataclass(frozen=True)
class Outcome:
    """What a test came to:

    `passed`, `failed`, `skipped`, or `lost` with the process that was to run it.
    """

    outcome: str
    error: str = ""

    @property
    def reason(self) -> str:
        """The first line of the error."""
        return (self.error.strip().splitlines() or [""])[0]


@dataclass(frozen=True)
class Comparison:
    """The tests that pass under plain Keras: which of them pass here, and what the others came to.

    `unlisted` are those that fail and are not listed; `stale` are listed patterns that name one
    that passes, or no test. One that fails under plain Keras too is neither.
    """

    passed: tuple[str, ...]
    failed: Mapping[str, Outcome]
    unlisted: tuple[str, ...]
    stale: tuple[str, ...]

    @property
    def share(self) -> float:
        """The part that passes; 1.0 where there is nothing."""
        total = len(self.passed) + len(self.failed)
        return len(self.passed) / total if total else 1.0


def suite_files(keras: Path, wanted: Sequence[str]) -> list[Path]:
    """The test files of the suite whose path holds one of `wanted`; all where that is empty."""
    files: list[Path] = []
    for entry in SUITE:
        path = keras / "src" / entry
        found = [path] if path.is_file() else sorted(path.rglob("*_test.py"))
        if not found:
            raise SystemExit(
                f"Keras has no tests in {path}. Expected: a wheel with its test files, such as "
                "keras 3.15.1."
            )
        files += found
    files = [
        path for path in files if not wanted or any(word in path.as_posix() for word in wanted)
    ]
    if not files:
        raise SystemExit(f"No test file of the suite has a path with one of: {', '.join(wanted)}.")
    return files


def read_outcomes(path: Path) -> dict[str, Outcome]:
    """The outcomes that `suite_plugin` wrote; where a test has several (its tear-down failed too),
    a failure stands.
    """
    outcomes: dict[str, Outcome] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        entry = json.loads(line)
        if entry["test"] not in outcomes or entry["outcome"] == "failed":
            outcomes[entry["test"]] = Outcome(entry["outcome"], entry["error"])
    return outcomes


def in_groups(files: Sequence[Path]) -> list[list[Path]]:
    """The files that run in one process each: neighbours of one directory, or one that ends its
    process's connection.
    """
    groups: list[list[Path]] = []
    alone: list[list[Path]] = []
    for path in files:
        if "_reset_context" in path.read_text(encoding="utf-8"):
            alone.append([path])
        elif groups and groups[-1][0].parent == path.parent and len(groups[-1]) < FILES_PER_PROCESS:
            groups[-1].append(path)
        else:
            groups.append([path])
    return groups + alone


def run_files(
    paths: Sequence[Path], root: Path, output: Path, arguments: argparse.Namespace, num_workers: int
) -> dict[str, Outcome]:
    """Runs test files in a process of their own; its log and outcomes go to `output`."""
    output.mkdir(parents=True, exist_ok=True)
    name = paths[0].relative_to(root).with_suffix("").as_posix().replace("/", ".")
    name += f".and_{len(paths) - 1}_more" if len(paths) > 1 else ""
    outcomes, log = output / f"{name}.jsonl", output / f"{name}.log"
    outcomes.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(HERE / "pytest.ini"),
        "--rootdir",
        str(root),
        "-p",
        "suite_plugin",
        # To quote the source of a failed test, pytest parses it, which may raise in Python 3.11.
        "--tb=native",
    ]
    # Where one file cannot be imported, for want of a package, the others run.
    command += ["--continue-on-collection-errors"]
    command += [
        "--outcomes",
        str(outcomes),
        "--num-workers",
        str(num_workers),
        "--num-ps",
        str(arguments.num_ps),
    ]
    search_path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "KERAS_BACKEND": "tensorflow",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join(search_path),
    }
    timeout = arguments.file_timeout * len(paths)
    with log.open("w", encoding="utf-8") as stream, tempfile.TemporaryDirectory() as directory:
        try:
            status: int | str = subprocess.run(
                [*command, *map(str, paths)],
                cwd=directory,  # some of the tests write to the current directory
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=timeout,
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"no end within {timeout:g} s"
    found = read_outcomes(outcomes)
    if status in (0, 1):  # pytest's own: all passed, some failed
        return found
    print(f"{name}: ended with {status} after {len(found)} tests; see {log}", file=sys.stderr)
    if len(paths) > 1:
        reached = [test.partition("::")[0] for test in found]
        done = set(reached) - set(reached[-1:])
        for path in paths:
            if path.relative_to(root).as_posix() not in done:
                found |= run_files([path], root, output, arguments, num_workers)
    return found


def run_suite(
    files: Sequence[Path], root: Path, output: Path, arguments: argparse.Namespace, num_workers: int
) -> dict[str, Outcome]:
    """Runs the files, `--jobs` processes at a time, and returns the outcomes of all their tests."""
    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = pool.map(
            lambda paths: run_files(paths, root, output, arguments, num_workers), in_groups(files)
        )
        return {test: outcome for result in results for test, outcome in result.items()}


def listed_tests(page: str) -> list[str]:
    """Return the patterns of tests in the first column of the tables of `docs/compatibility.md`."""
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("|")]
    return [pattern for row in rows for pattern in LISTED_TEST.findall(row)]


def compare(
    plain: Mapping[str, Outcome], ours: Mapping[str, Outcome], listed: Iterable[str]
) -> Comparison:
    """Compares the outcomes of the tests that pass under plain Keras;

    `listed` are patterns of those that may fail.
    """
    lost = Outcome("lost", "The process of the test file ended before the test was done.")
    counted = [test for test, outcome in plain.items() if outcome.outcome == "passed"]
    outcomes = {test: ours.get(test, lost) for test in counted}
    failed = {test: outcome for test, outcome in outcomes.items() if outcome.outcome != "passed"}
    files = {test.partition("::")[0] for test in counted}
    listed = [pattern for pattern in listed if pattern.partition("::")[0] in files]
    return Comparison(
        passed=tuple(test for test in counted if test not in failed),
        failed=failed,
        unlisted=tuple(
            test
            for test in failed
            if not any(fnmatch.fnmatchcase(test, pattern) for pattern in listed)
        ),
        stale=tuple(
            p
            for p in listed
            if set(fnmatch.filter(counted, p)) - set(failed) or not fnmatch.filter(plain, p)
        ),
    )


def print_report(comparison: Comparison) -> None:
    """Prints a line per file, then a line per test that fails."""
    by_file: dict[str, list[int]] = {}
    for column, tests in enumerate((comparison.passed, comparison.failed)):
        for test in tests:
            by_file.setdefault(test.partition("::")[0], [0, 0])[column] += 1
    print("| file | pass under plain Keras | of these under kerasps |\n| --- | ---: | ---: |")
    for file, (passed, failed) in sorted(by_file.items()):
        print(f"| {file.removeprefix('keras/src/')} | {passed + failed} | {passed} |")
    total = len(comparison.passed) + len(comparison.failed)
    print(f"| all | {total} | {len(comparison.passed)} |\n")
    for test, outcome in comparison.failed.items():
        mark = " (not listed)" if test in comparison.unlisted else ""
        print(f"{outcome.outcome}{mark}: {test}: {outcome.reason[:300]}")
    for pattern in comparison.stale:
        print(f"listed in {LISTED_IN.name}, and not all that it names fail: {pattern}")
    print(
        f"{len(comparison.passed)} of {total} tests that pass under plain Keras pass under "
        f"kerasps: {comparison.share:.1%}."
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", nargs="*", help="parts of the paths of the test files to run; default: all of them"
    )
    parser.add_argument(
        "--num-workers", type=int, default=1, help="of the cluster; default: %(default)s"
    )
    parser.add_argument(
        "--num-ps", type=int, default=2, help="of the cluster; default: %(default)s"
    )
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.985,
        help="the part that must pass; default: %(default)s",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count(),
        help="processes at a time; default: the number of CPUs",
    )
    parser.add_argument(
        "--file-timeout",
        type=float,
        default=7200,
        help="seconds for one file; default: %(default)s",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("build/keras_suite"),
        help="for logs and outcomes; default: %(default)s",
    )
    parser.add_argument(
        "--reuse-plain",
        action="store_true",
        help="take plain Keras's outcomes from the last run in --output",
    )
    arguments = parser.parse_args()

    spec = importlib.util.find_spec("keras")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("Keras is not installed.")
    keras = Path(spec.submodule_search_locations[0])
    files = suite_files(keras, arguments.files)
    output = arguments.output.absolute()
    outcomes = {}
    for name, num_workers in (("plain", 0), ("kerasps", arguments.num_workers)):
        whole = output / f"{name}.json"
        if name == "plain" and arguments.reuse_plain:
            wanted = {path.relative_to(keras.parent).as_posix() for path in files}
            saved = json.loads(whole.read_text(encoding="utf-8"))
            outcomes[name] = {
                t: Outcome(**entry) for t, entry in saved.items() if t.partition("::")[0] in wanted
            }
            continue
        start = time.monotonic()
        outcomes[name] = run_suite(files, keras.parent, output / name, arguments, num_workers)
        print(
            f"{name}: {len(outcomes[name])} tests in {len(files)} files, "
            f"{time.monotonic() - start:.0f} s",
            file=sys.stderr,
        )
        whole.write_text(
            json.dumps({t: vars(outcome) for t, outcome in outcomes[name].items()}, indent=1),
            encoding="utf-8",
        )
    comparison = compare(
        outcomes["plain"], outcomes["kerasps"], listed_tests(LISTED_IN.read_text(encoding="utf-8"))
    )
    print_report(comparison)
    return int(
        comparison.share < arguments.threshold
        or bool(comparison.unlisted)
        or bool(comparison.stale)
    )


if __name__ == "__main__":
    sys.exit(main())
