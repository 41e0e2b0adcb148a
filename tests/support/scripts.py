"""Runs a plain Keras script, and the same script with three lines more."""

from __future__ import annotations

import ast
import contextlib
import difflib
import warnings
from pathlib import Path

import kerasps
from support.process_checks import IS_NIGHTLY, UNTESTED

PLAIN = Path(__file__).resolve().parents[1] / "cluster" / "scripts" / "plain"

# The paragraph below such a comment is what goes under the scope.
MARK = "# Under the scope:"
IMPORT = "import kerasps"
STRATEGY = (
    "strategy = kerasps.ParameterServerStrategy(cluster.cluster_resolver, variable_partitioner)"
)
SCOPE = "with strategy.scope():"


class Partitioner:
    """Splits as the partitioner does that is chosen at the moment; none leaves variables whole."""

    chosen = None

    def __call__(self, shape, dtype):
        return [1] * len(shape) if self.chosen is None else self.chosen(shape, dtype)


PARTITIONER = Partitioner()


def with_strategy(source):
    """Returns the script with kerasps imported, a strategy made, and the marked paragraph under its
    scope.
    """
    imports = [
        node for node in ast.parse(source).body if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    last_import = max(node.end_lineno for node in imports)
    lines = source.splitlines()
    (mark,) = (number for number, line in enumerate(lines) if line.strip() == MARK)
    end = next(
        number
        for number in range(mark, len(lines) + 1)
        if number == len(lines) or not lines[number]
    )
    margin = lines[mark][: -len(MARK)]
    paragraph = [f"    {line}" for line in lines[mark:end]]
    return "\n".join(
        [
            *lines[:last_import],
            IMPORT,
            STRATEGY,
            *lines[last_import:mark],
            margin + SCOPE,
            *paragraph,
            *lines[end:],
            "",
        ]
    )


def changed_lines(before, after):
    """The lines that differ, whatever their indentation:

    `+` is one that came, `-` one that went.
    """
    stripped = [[line.strip() for line in text.splitlines()] for text in (before, after)]
    return [line for line in difflib.ndiff(*stripped) if line[0] in "+-"]


def run(source, folder, **names):
    """Runs a script in the empty folder `folder`; returns its names, and the beginnings of the
    warnings that it gave.

    It is written to a file first: AutoGraph reads the source of functions.
    """
    folder.mkdir()
    path = folder / "script.py"
    path.write_text(source)
    names = {"__name__": "__main__", "__file__": str(path), **names}
    with contextlib.chdir(folder), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if IS_NIGHTLY:
            warnings.filterwarnings("ignore", UNTESTED)
        warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy keyword")
        exec(compile(source, str(path), "exec"), names)
    return {**names, "warnings": {str(warning.message)[:40] for warning in caught}}


def run_on_cluster(source, folder, cluster, num_shards):
    PARTITIONER.chosen = (
        kerasps.FixedShardsPartitioner(num_shards, min_bytes=256) if num_shards > 1 else None
    )
    return run(with_strategy(source), folder, cluster=cluster, variable_partitioner=PARTITIONER)
