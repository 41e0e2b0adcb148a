"""Measures how the cost of a step grows with the rows of an embedding table.

    python benchmarks/flatness.py --quick
    python benchmarks/flatness.py --rows 10000 100000 1000000 4000000 --used-rows 10000
    python benchmarks/flatness.py --rows 10000 100000 1000000 4000000 \\
        --json benchmarks/results/flatness.json

It measures kerasps and plain Keras. With ids of a power law, a batch has more distinct rows the
larger the vocabulary is, so a step has more to do. With `--used-rows` all tables serve the same
batches, and only the cost of the table's height remains.

The model is that of `embedding_adagrad` and `embedding_adam` in `run.py`. Every measurement has a
new process and a new cluster. Bytes per step are those of the machine's loopback interface, so run
nothing else that uses it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from models import EMBEDDING_BATCH_SIZE, EMBEDDING_OPTIMIZERS, find
from run import Configuration, Outcome, last_lines, machine, measure

# (model, peer, rows); the bytes per step of every epoch.
Key = tuple[str, str, int]
Figures = dict[Key, list[float]]


def measure_all(options: argparse.Namespace) -> tuple[dict[Key, Outcome], Figures]:
    """Measure every number of rows in turn, once a round.

    A measurement that fails is reported and does not stop the others.
    """
    outcomes: dict[Key, Outcome] = {}
    bytes_per_step: Figures = {}
    for round_number in range(1, options.rounds + 1):
        for model in options.models:
            for rows in options.rows:
                for peer in options.peers:
                    key = model, peer, rows
                    outcome = outcomes.setdefault(key, Outcome())
                    workers = 0 if peer == "plain" else 1
                    # Dense updates of millions of rows take up to a second each.
                    steps = options.plain_steps if peer == "plain" else options.steps
                    extra = ["--rows", str(rows), "--steps-per-epoch", str(steps)]
                    extra += ["--used-rows", str(options.used_rows)] if options.used_rows else []
                    extra += (
                        ["--sparse-updates", options.sparse_updates]
                        if options.sparse_updates
                        else []
                    )
                    start = time.monotonic()
                    try:
                        result = measure(
                            Configuration(model, 10, workers, peer),
                            *extra,
                            epochs=options.epochs,
                            limit=options.limit,
                        )
                    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as exc:
                        text = f"{type(exc).__name__}: {last_lines(exc.stderr)}"
                        outcome.problems.append(text)
                    else:
                        text = (
                            f"{statistics.median(result['milliseconds_per_step']):.2f} ms per step"
                        )
                        outcome.milliseconds += result["milliseconds_per_step"]
                        outcome.versions = {
                            "tensorflow": result["tensorflow"],
                            "keras": result["keras"],
                        }
                        bytes_per_step.setdefault(key, []).extend(result["bytes_per_step"])
                        if result["counted_steps"] != result["steps"]:
                            outcome.problems.append(
                                f"the optimizer counted {result['counted_steps']} of "
                                f"{result['steps']}"
                            )
                    seconds = time.monotonic() - start
                    print(
                        f"round {round_number}: {peer}, {model}, {rows:,} rows: {text} "
                        f"({seconds:.0f} s)",
                        file=sys.stderr,
                    )
    return outcomes, bytes_per_step


def distinct_rows(model: str, rows: int, used_rows: int | None) -> float:
    """Return the mean number of distinct rows of a batch, the fewest that a step touches."""
    ids, _ = find(model, rows, used_rows).data()
    return statistics.mean(
        len(np.unique(batch)) for batch in ids.reshape(-1, EMBEDDING_BATCH_SIZE * ids.shape[1])[:64]
    )


def median(values: Sequence[float]) -> float | None:
    """Return the median; None without values."""
    return statistics.median(values) if values else None


def table(
    model: str, options: argparse.Namespace, outcomes: dict[Key, Outcome], bytes_per_step: Figures
) -> str:
    """Return a line for each number of rows, in Markdown.

    The last line has each column's largest number over its smallest.
    """
    nothing = Outcome()
    columns: dict[str, tuple[list[float | None], Callable[[float], str]]] = {
        "distinct rows per batch": (
            [distinct_rows(model, rows, options.used_rows) for rows in options.rows],
            "{:,.0f}".format,
        ),
        "kerasps, ms per step": (
            [
                median(outcomes.get((model, "kerasps", rows), nothing).milliseconds)
                for rows in options.rows
            ],
            "{:.2f}".format,
        ),
        "kerasps, loopback bytes per step": (
            [median(bytes_per_step.get((model, "kerasps", rows), [])) for rows in options.rows],
            "{:,.0f}".format,
        ),
        "plain Keras, ms per step": (
            [
                median(outcomes.get((model, "plain", rows), nothing).milliseconds)
                for rows in options.rows
            ],
            "{:.2f}".format,
        ),
    }
    lines = [f"| {model}: rows | {' | '.join(columns)} |", "| ---: " * (len(columns) + 1) + "|"]
    for index, rows in enumerate(options.rows):
        cells = [
            "" if values[index] is None else show(values[index])
            for values, show in columns.values()
        ]
        lines.append(f"| {rows:,} | {' | '.join(cells)} |")
    cells = []
    for values, _ in columns.values():
        present = [value for value in values if value]
        cells.append(f"{max(present) / min(present):.2f}" if present else "")
    lines.append(f"| largest / smallest | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Measure and print; return 1 if a measurement failed or steps were lost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", nargs="+", type=int, default=[10_000, 100_000, 1_000_000, 4_000_000]
    )
    parser.add_argument(
        "--used-rows", type=int, help="how many rows, evenly spread, the data look up; default: all"
    )
    parser.add_argument(
        "--models", nargs="+", choices=EMBEDDING_OPTIMIZERS, default=list(EMBEDDING_OPTIMIZERS)
    )
    parser.add_argument(
        "--peers", nargs="+", choices=("kerasps", "plain"), default=["kerasps", "plain"]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--epochs", type=int, default=3, help="epochs timed per round, after one that is not timed"
    )
    parser.add_argument("--steps", type=int, default=200, help="steps per epoch of kerasps")
    parser.add_argument(
        "--plain-steps", type=int, default=20, help="steps per epoch of plain Keras"
    )
    parser.add_argument(
        "--sparse-updates",
        choices=("lazy", "dense"),
        help="kerasps's argument; default: its default",
    )
    parser.add_argument(
        "--limit", type=float, default=600.0, help="seconds that one measurement may take"
    )
    parser.add_argument("--json", type=Path, help="also write every single figure to this file")
    parser.add_argument(
        "--quick", action="store_true", help="a few minutes: one round of 10,000 and 1,000,000 rows"
    )
    options = parser.parse_args()
    if options.quick:
        options.rows, options.rounds, options.epochs = [10_000, 1_000_000], 1, 2

    outcomes, bytes_per_step = measure_all(options)
    for model in options.models:
        print(table(model, options, outcomes, bytes_per_step))
        print()
    print(
        f"Medians of {options.rounds} rounds x {options.epochs} epochs; 1 worker, 1 ps; 10 steps "
        "per execution.",
        end=" ",
    )
    print(f"Bytes: the whole machine's loopback, TCP's own included. {machine(outcomes.values())}")
    problems = [
        f"{key}: {problem}" for key, outcome in outcomes.items() for problem in outcome.problems
    ]
    if problems:
        print("\nProblems:\n")
        print("\n".join(f"- {problem}" for problem in problems))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            {
                "model": key[0],
                "peer": key[1],
                "rows": key[2],
                "bytes_per_step": bytes_per_step.get(key, []),
            }
            | vars(outcome)
            for key, outcome in outcomes.items()
        ]
        options.json.write_text(json.dumps(lines, indent=1))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
