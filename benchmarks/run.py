"""Measures kerasps, tf_keras's parameter servers, and plain Keras 3, side by side.

    python benchmarks/run.py --quick
    python benchmarks/run.py --models mlp2 movielens --workers 1 2 \\
        --steps-per-execution 1 10 50 --rounds 5
    python benchmarks/run.py --models embedding_adagrad embedding_adam --rows 1000000 \\
        --workers 2 --num-ps 2 --shards 2

Every measurement has a new process and a new cluster. The peers take turns (A B C A B C ...), so
that a machine that gets slower or faster meanwhile affects all of them. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kerasps
from models import MODELS, MODELS_WITH_ROWS
from proxies import delaying

HERE = Path(__file__).resolve().parent
PEERS = ("plain", "tf_keras", "kerasps")


@dataclass(frozen=True)
class Configuration:
    """One cell of the table. `workers` is 0 for plain Keras, which has none."""

    model: str
    steps_per_execution: int
    workers: int
    peer: str

    def __str__(self) -> str:
        workers = f", {self.workers} workers" if self.workers else ""
        return f"{self.peer}, {self.model}, {self.steps_per_execution} steps per execution{workers}"


@dataclass
class Outcome:
    """The results of all rounds of one configuration."""

    milliseconds: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.milliseconds:
            return "failed"
        median = statistics.median(self.milliseconds)
        text = f"{median:.2f} ({min(self.milliseconds):.2f} to {max(self.milliseconds):.2f})"
        return f"{text} [{len(self.problems)} problems]" if self.problems else text


def configurations(options: argparse.Namespace) -> Iterator[Configuration]:
    """Yield one round: the peers in turn, plain Keras once for all numbers of workers."""
    for model in options.models:
        for steps in options.steps_per_execution:
            if "plain" in options.peers:
                yield Configuration(model, steps, 0, "plain")
            for workers in options.workers:
                for peer in PEERS[1:]:
                    if peer in options.peers:
                        yield Configuration(model, steps, workers, peer)


def measure(
    configuration: Configuration,
    *extra: str,
    epochs: int,
    limit: float,
    num_ps: int = 1,
    reached_by: Callable[[dict[str, Any]], dict[str, Any]] = lambda tf_config: tf_config,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run one peer, with a cluster if it needs one, and return its output.

    Args:
        extra: further arguments of `peer.py`.
        epochs: the epochs that are timed.
        limit: the time limit in seconds.
        num_ps: the number of ps tasks.
        reached_by: takes the tasks' TF_CONFIG, and returns the one by which the peer reaches them.
        variables: environment variables of the peer's process.

    Raises:
        CalledProcessError: the peer failed.
        TimeoutExpired: it did not end in time.
    """
    arguments = [
        sys.executable,
        str(HERE / "peer.py"),
        configuration.peer,
        configuration.model,
        "--epochs",
        str(epochs),
    ]
    arguments += ["--steps-per-execution", str(configuration.steps_per_execution), *extra]
    environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    environment |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", **(variables or {})}

    def run() -> dict[str, Any]:
        done = subprocess.run(
            arguments, env=environment, capture_output=True, text=True, timeout=limit, check=True
        )
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    if not configuration.workers:
        return run()
    with kerasps.LocalCluster(num_workers=configuration.workers, num_ps=num_ps) as cluster:
        environment["TF_CONFIG"] = json.dumps(reached_by(cluster.tf_config))
        return run()


def measure_all(options: argparse.Namespace) -> dict[Configuration, Outcome]:
    """Run all rounds. A peer that fails is reported and does not stop the others."""
    outcomes: dict[Configuration, Outcome] = {}
    extra = ["--rows", str(options.rows), "--shards", str(options.shards)]
    extra += ["--sparse-updates", options.sparse_updates] if options.sparse_updates else []
    for round_number in range(1, options.rounds + 1):
        for configuration in configurations(options):
            outcome = outcomes.setdefault(configuration, Outcome())
            start = time.monotonic()
            try:
                with reach(options.latency) as reached_by:
                    result = measure(
                        configuration,
                        *extra,
                        epochs=options.epochs,
                        limit=options.limit,
                        num_ps=options.num_ps,
                        reached_by=reached_by,
                    )
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as exc:
                problem = f"{type(exc).__name__}: {last_lines(exc.stderr)}"
                outcome.problems.append(problem)
            else:
                problem = f"{statistics.median(result['milliseconds_per_step']):.2f} ms per step"
                outcome.milliseconds += result["milliseconds_per_step"]
                outcome.versions = {
                    "tensorflow": result["tensorflow"],
                    configuration.peer: result["keras"],
                }
                if result["counted_steps"] != result["steps"]:
                    outcome.problems.append(
                        f"the optimizer counted {result['counted_steps']} of {result['steps']} "
                        "steps"
                    )
            print(
                f"round {round_number}/{options.rounds}: {configuration}: {problem} "
                f"({time.monotonic() - start:.0f} s)",
                file=sys.stderr,
                flush=True,
            )
    return outcomes


def reach(latency: float) -> contextlib.AbstractContextManager[Callable[[Any], Any]]:
    """Return a context of the argument `reached_by` of `measure`."""
    return delaying(latency) if latency else contextlib.nullcontext(lambda tf_config: tf_config)


def last_lines(output: str | bytes | None, count: int = 8) -> str:
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    return "\n".join(text.strip().splitlines()[-count:])


def ratio(numerator: Outcome, denominator: Outcome) -> str:
    """Return the ratio of two medians; empty if one of them was not measured."""
    if not numerator.milliseconds or not denominator.milliseconds:
        return ""
    quotient = statistics.median(numerator.milliseconds) / statistics.median(
        denominator.milliseconds
    )
    return f"{quotient:.2f}"


def table(options: argparse.Namespace, outcomes: dict[Configuration, Outcome]) -> str:
    """Return the medians, in milliseconds per step, and their ratios, as a Markdown table."""
    header = ["model", "steps per execution", "workers", "plain Keras", "tf_keras + ps", "kerasps"]
    header += ["kerasps / plain", "kerasps / tf_keras"]
    rows = [f"| {' | '.join(header)} |", f"| --- {'| ---: ' * (len(header) - 1)}|"]
    nothing = Outcome()
    for model in options.models:
        for steps in options.steps_per_execution:
            for workers in options.workers:
                plain = outcomes.get(Configuration(model, steps, 0, "plain"), nothing)
                tf_keras = outcomes.get(Configuration(model, steps, workers, "tf_keras"), nothing)
                ours = outcomes.get(Configuration(model, steps, workers, "kerasps"), nothing)
                shown = [
                    "not run" if outcome is nothing else str(outcome)
                    for outcome in (plain, tf_keras, ours)
                ]
                cells = [
                    model,
                    str(steps),
                    str(workers),
                    *shown,
                    ratio(ours, plain),
                    ratio(ours, tf_keras),
                ]
                rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def machine(outcomes: Iterable[Outcome]) -> str:
    """Return the cores, the processor and the versions."""
    versions: dict[str, str] = {"kerasps": kerasps.__version__}
    for outcome in outcomes:
        versions.update(
            {
                "keras" if name in ("plain", "kerasps") else name: v
                for name, v in outcome.versions.items()
            }
        )
    processor = "unknown processor"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.partition(":")[2].strip()
            for line in cpuinfo.read_text().splitlines()
            if line.startswith("model name")
        ]
        processor = names[0] if names else processor
    numbers = ", ".join(f"{name} {number}" for name, number in sorted(versions.items()))
    num_cores = len(os.sched_getaffinity(0))
    return f"{num_cores} cores, {processor}; Python {sys.version.split()[0]}, {numbers}."


def conditions(options: argparse.Namespace, outcomes: dict[Configuration, Outcome]) -> str:
    """Return the conditions of the measurements, for comparisons with others."""
    table_rows = ""
    if any(model in MODELS_WITH_ROWS for model in options.models):
        updates = (
            f", sparse_updates={options.sparse_updates!r} in kerasps"
            if options.sparse_updates
            else ""
        )
        table_rows = f" Tables of {options.rows:,} rows, shards: {options.shards}{updates}."
    latency = f", {options.latency:g} ms each way between tasks" if options.latency else ""
    return (
        f"Milliseconds per step: median (least to greatest) of {options.rounds} rounds x "
        f"{options.epochs} epochs, {options.num_ps} ps{latency}.{table_rows} "
        f"{machine(outcomes.values())}"
    )


def main() -> int:
    """Measure and print; return 1 if a peer failed or lost steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument(
        "--steps-per-execution", nargs="+", type=int, choices=(1, 10, 20, 50), default=[1, 10, 50]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--epochs", type=int, default=3, help="epochs timed per round, after one that is not timed"
    )
    parser.add_argument(
        "--rows", type=int, default=1_000_000, help="rows of the (largest) table of a model"
    )
    parser.add_argument("--num-ps", type=int, default=1)
    parser.add_argument(
        "--latency", type=float, default=0.0, help="ms each way that a network takes; default: none"
    )
    parser.add_argument(
        "--shards", type=int, default=1, help="shards per variable, of kerasps and of tf_keras"
    )
    parser.add_argument(
        "--sparse-updates",
        choices=("lazy", "dense"),
        help="kerasps's argument; default: its default",
    )
    parser.add_argument(
        "--limit", type=float, default=600.0, help="seconds that one measurement may take"
    )
    parser.add_argument("--json", type=Path, help="also write every single time to this file")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two to three minutes: mlp2, 1 worker, 1 and 10 steps, 1 round",
    )
    options = parser.parse_args()
    if options.quick:
        options.models, options.workers, options.steps_per_execution = ["mlp2"], [1], [1, 10]
        options.rounds, options.epochs = 1, 2

    outcomes = measure_all(options)
    print(table(options, outcomes))
    print()
    print(conditions(options, outcomes))
    problems = [
        f"{configuration}: {problem}"
        for configuration, outcome in outcomes.items()
        for problem in outcome.problems
    ]
    if problems:
        print("\nProblems:\n")
        print("\n".join(f"- {problem}" for problem in problems))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        lines = [vars(configuration) | vars(outcome) for configuration, outcome in outcomes.items()]
        options.json.write_text(json.dumps(lines, indent=1))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
