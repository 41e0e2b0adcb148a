"""Measures the time from a command to its first step, by phase.

    python benchmarks/startup.py
    python benchmarks/startup.py --models mlp2 --peers kerasps --rounds 7
    python benchmarks/startup.py --models mlp2 --peers kerasps --rounds 1 --profiles /tmp/profiles
    PYTHONPATH=<another checkout> python benchmarks/startup.py --peers kerasps

Plain Keras 3 is one process. tf_keras with its ParameterServerStrategy and kerasps run under
`kerasps launch`, so both have the same workers and ps. The peers take turns (A B C A B C ...).
A first run of each peer, which compiles the bytecode of all modules, does not count.
A step is an epoch of one step, with its metrics.
Prints medians, as tables in Markdown; ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from startup_script import MODELS

SCRIPT = Path(__file__).resolve().parent / "startup_script.py"
PEERS = ("plain", "tf_keras", "kerasps")

# Each phase ends at the time that the script records under this name.
PHASES = {
    "processes": "process",
    "imports": "imports",
    "connect": "connect",
    "model": "model",
    "first step": "fit, epoch 0",
}
# The seconds between two recorded times.
AGAIN = {
    "second fit": ("second fit is called", "second fit, epoch 0"),
    "its second epoch": ("second fit, epoch 1 begins", "second fit, epoch 1"),
    "evaluate": ("evaluate is called", "evaluate, epoch 0"),
    "second evaluate": ("second evaluate is called", "second evaluate, epoch 0"),
    "third fit": ("third fit is called", "third fit, epoch 0"),
}


def measure(peer: str, model: str, options: argparse.Namespace, bytecode: str) -> dict[str, float]:
    """Run a peer once; return the seconds of each phase, and of each later start.

    Args:
        peer: one of `PEERS`.
        model: one of `MODELS`.
        options: the command line.
        bytecode: the directory for compiled modules.
    """
    command = [str(SCRIPT), peer, model]
    if options.profiles:
        directory = options.profiles.absolute() / f"{peer}-{model}"
        directory.mkdir(parents=True, exist_ok=True)
        command += ["--profiles", str(directory)]
    if peer != "plain":
        counts = ["--num-workers", str(options.workers), "--num-ps", str(options.num_ps)]
        command = ["-m", "kerasps", "launch", *counts, *command]
    environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    environment |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    # Where Python writes none, each process of each run would compile its modules.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = bytecode
    began = time.time()
    done = subprocess.run(
        [sys.executable, *command],
        cwd=SCRIPT.parent,  # where there is no kerasps: `PYTHONPATH` says which one it is
        env=environment,
        capture_output=True,
        text=True,
        timeout=options.limit,
        check=True,
    )
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    seconds, before = {}, began
    for phase, note in PHASES.items():
        seconds[phase] = times[note] - before
        before = times[note]
        if phase == "connect":  # to make the data is no part of the start
            before = times["data"]
    seconds["all"] = sum(seconds.values())
    return seconds | {name: times[end] - times[start] for name, (start, end) in AGAIN.items()}


Results = dict[tuple[str, str], list[dict[str, float]]]


def measure_all(options: argparse.Namespace) -> Results:
    """Run all rounds, the peers in turn."""
    results: Results = defaultdict(list)
    first = [(0, options.models[0], peer) for peer in options.peers]
    counted = itertools.product(range(1, options.rounds + 1), options.models, options.peers)
    with contextlib.ExitStack() as stack:
        bytecode = options.bytecode or stack.enter_context(tempfile.TemporaryDirectory())
        for number, model, peer in [*first, *counted]:
            try:
                seconds = measure(peer, model, options, bytecode)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as exc:
                raise SystemExit(f"{peer}, {model}: {exc}\n{exc.stderr}") from exc
            if number:
                results[model, peer].append(seconds)
            line = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
            print(f"round {number}: {model}, {peer}: {line}", file=sys.stderr, flush=True)
    return results


def table(columns: list[str], results: Results, options: argparse.Namespace) -> str:
    """Return the medians of the columns, a row for each model and peer."""
    header = ["model", "peer", *columns, "of plain Keras"]
    rows = [f"| {' | '.join(header)} |", f"| --- | --- {'| ---: ' * (len(header) - 2)}|"]
    for model in options.models:
        for peer in options.peers:
            runs, plain = results[model, peer], results.get((model, "plain"))
            cells = [f"{statistics.median(run[name] for run in runs):.2f}" for name in columns]
            ratio = ""
            if plain and "all" in columns:
                pairs = zip(runs, plain, strict=True)
                ratio = f"{statistics.median(run['all'] / base['all'] for run, base in pairs):.2f}"
            rows.append(f"| {' | '.join([f'`{model}`', peer, *cells, ratio])} |")
    if "all" not in columns:
        rows = [f"{row.rpartition(' | ')[0]} |" for row in rows]
    return "\n".join(rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--num-ps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that a run may take")
    parser.add_argument("--json", type=Path, help="also write the seconds of every run to a file")
    parser.add_argument(
        "--profiles", type=Path, help="directory for profiles of `fit` and `evaluate` (cProfile)"
    )
    parser.add_argument(
        "--bytecode", help="directory for compiled modules, to keep it; default: a temporary one"
    )
    options = parser.parse_args()
    results = measure_all(options)
    print("Seconds to the first step:\n")
    print(table([*PHASES, "all"], results, options))
    print("\nSeconds from a call, or the beginning of an epoch, to the end of its first step:\n")
    print(table(list(AGAIN), results, options))
    print(f"\nMedians of {options.rounds} rounds.")
    if options.json:
        runs = [
            {"model": model, "peer": peer, "runs": seconds}
            for (model, peer), seconds in results.items()
        ]
        options.json.write_text(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
