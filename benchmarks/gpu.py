"""Measures plain Keras, tf_keras's parameter servers and kerasps on one GPU, in turn.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --models gpu_cnn --workers 1 --peers plain kerasps --rounds 3

Prints a table in Markdown: milliseconds a step, the load of the GPU, and the traffic on the bus
between GPU and host, from `nvidia-smi`. It prints a row as soon as it is measured. It also runs
without a GPU, and says so.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import run
from gpu_models import GPU_BENCHMARKS
from kerasps.cluster.processes.gpus import visible_gpus

HEADER = ["model", "workers", "peer", "ms a step", "of plain", "GPU busy", "to GPU", "from GPU"]


class Sampling:
    """Asks `nvidia-smi` once a second for the load of the GPU and the traffic on the bus.

    Attributes:
        busy: percent of the time, of each second.
        received, sent: megabytes a second, of each second.
    """

    def __init__(self) -> None:
        self.busy: list[float] = []
        self.received: list[float] = []
        self.sent: list[float] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Sampling:
        command = ["nvidia-smi", "dmon", "-s", "ut", "-d", "1", "-i", "0"]
        with contextlib.suppress(FileNotFoundError):
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def _read(self) -> None:
        # "# gpu sm mem enc dec jpg ofa rxpci txpci", and the same in numbers.
        columns: list[str] = []
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("#"):
                columns = line.lstrip("# ").split() if "rxpci" in line else columns
                continue
            seen = dict(zip(columns, line.split(), strict=False))
            for name, values in (
                ("sm", self.busy),
                ("rxpci", self.received),
                ("txpci", self.sent),
            ):
                with contextlib.suppress(KeyError, ValueError):
                    values.append(float(seen[name]))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


def upper_half(values: list[float]) -> float | None:
    """Return the median of the higher half, which excludes the start of a process."""
    return statistics.median(sorted(values)[len(values) // 2 :]) if values else None


def configurations(options: argparse.Namespace) -> Iterator[run.Configuration]:
    """Yield the configurations to measure, plain Keras first."""
    for model in options.models:
        for peer in options.peers:
            for workers in [0] if peer == "plain" else options.workers:
                yield run.Configuration(model, options.steps_per_execution, workers, peer)


def measured(configuration: run.Configuration, options: argparse.Namespace) -> dict[str, Any]:
    """Measure once; return the peer's output, and the samples of the GPU meanwhile."""
    variables = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    if configuration.peer == "tf_keras":  # whose coordinator would compute on it
        variables["CUDA_VISIBLE_DEVICES"] = "-1"
    with Sampling() as sampling:
        result = run.measure(
            configuration,
            epochs=options.epochs,
            limit=options.limit,
            num_ps=options.num_ps,
            variables=variables,
        )
    return {
        "ms": statistics.median(result["milliseconds_per_step"]),
        "busy": upper_half(sampling.busy),
        "received": upper_half(sampling.received),
        "sent": upper_half(sampling.sent),
    }


def row(configuration: run.Configuration, found: list[dict[str, Any]], plain: float | None) -> str:
    """Return a row of the table."""

    def median(name: str) -> float | None:
        values = [one[name] for one in found if one[name] is not None]
        return statistics.median(values) if values else None

    ms = median("ms")

    def shown(value: float | None, unit: str) -> str:
        return "" if value is None else f"{value:.0f} {unit}"

    cells = [
        configuration.model,
        str(configuration.workers or ""),
        configuration.peer,
        "failed" if ms is None else f"{ms:.2f}",
        "" if ms is None or not plain else f"{ms / plain:.2f}",
        shown(median("busy"), "%"),
        shown(median("received"), "MB/s"),
        shown(median("sent"), "MB/s"),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure, and print a row for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=GPU_BENCHMARKS, default=list(GPU_BENCHMARKS))
    parser.add_argument("--peers", nargs="+", choices=run.PEERS, default=list(run.PEERS))
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--steps-per-execution", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3, help="epochs timed, after one that is not")
    parser.add_argument("--num-ps", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one measurement")
    options = parser.parse_args()
    print(f"{card()}; {options.steps_per_execution} steps per execution, {options.num_ps} ps.\n")
    print(
        f"| {' | '.join(HEADER)} |\n| --- | --- | --- {'| ---: ' * (len(HEADER) - 3)}|", flush=True
    )
    plain: dict[str, float] = {}
    for configuration in configurations(options):
        found = []
        for _ in range(options.rounds):
            try:
                found.append(measured(configuration, options))
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as exc:
                print(run.last_lines(exc.stderr), file=sys.stderr, flush=True)
        if configuration.peer == "plain" and found:
            plain[configuration.model] = statistics.median(one["ms"] for one in found)
        print(row(configuration, found, plain.get(configuration.model)), flush=True)


def card() -> str:
    """Return the name of the GPU, and the number of cores."""
    cores = f"{len(os.sched_getaffinity(0))} cores"
    if not visible_gpus(os.environ):
        return f"No GPU: these are times of the CPU; {cores}"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "-i", "0"]
    name = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return f"{name or 'a GPU'}; {cores}"


if __name__ == "__main__":
    main()
