"""Measures the cost of losses: steps per second in a run that loses a task of each kind.

    python benchmarks/losses.py --plot losses.svg

A training runs under `kerasps launch` with two workers and one ps. The script kills a worker, stops
a worker, kills a ps, and kills the coordinator. Prints the times, as a row of Markdown, and draws
steps per second over time.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

TRAINING = Path(__file__).with_name("losses_training.py")
# From one loss to the next, and from the last to the end.
APART_S = 25.0
_POLL_S = 0.005
_BIN_S = 0.5


def children_of(pid):
    """Return the pids of a process's children, by name."""
    found = {}
    for entry in Path(f"/proc/{pid}/task").iterdir():
        for child in (entry / "children").read_text().split():
            with contextlib.suppress(OSError):
                found[Path(f"/proc/{child}/comm").read_text().strip()] = int(child)
    return found


class Run:
    """The training, with its log and the losses so far."""

    def __init__(self, folder, log):
        self.folder = folder
        command = [sys.executable, "-m", "kerasps", "launch", "--num-workers=2", "--num-ps=1"]
        command += ["--max-restarts=10", str(TRAINING), str(folder)]
        self.launcher = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        self.losses = []

    def events(self, what=None):
        path = self.folder / "events"
        text = path.read_text() if path.exists() else ""
        records = [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
        return [record for record in records if what in (None, record["what"])]

    def wait_for(self, condition, limit_s=120.0):
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline or self.launcher.poll() is not None:
                raise RuntimeError("The training did not go on: see the log.")
            time.sleep(_POLL_S)
        return time.monotonic()

    def signal(self, name, number, label):
        """Send a signal to the task with this name, or to the script."""
        tasks = children_of(self.launcher.pid)
        script = next(pid for n, pid in tasks.items() if not n.startswith(("worker-", "ps-")))
        pid = script if name == "chief" else tasks[name]
        at = time.monotonic()
        os.kill(pid, number)
        self.losses.append((at, label))
        return at, pid

    def status_since(self, at, worker, status):
        """Return the first time after `at` at which a worker had a status; None if not yet."""
        for record in self.events("status"):
            if record["time"] > at and (record["worker"], record["status"]) == (worker, status):
                return record["time"]
        return None

    def longest_gap(self, since, until):
        times = [r["time"] for r in self.events("steps") if since <= r["time"] <= until]
        ends = [since, *times, until]
        return max(b - a for a, b in itertools.pairwise(ends))

    def next_step(self, at):
        return (
            self.wait_for(lambda: any(r["time"] > at + 0.5 for r in self.events("steps")[-3:])) - at
        )


def address_of(pid):
    """Return the address at which a task's process serves, from its environment."""
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    config = json.loads(
        next(e for e in environment if e.startswith(b"TF_CONFIG=")).split(b"=", 1)[1]
    )
    return config["cluster"]["worker"][config["task"]["index"]]


def answers_at(run, address):
    """Wait until a server answers at an address; return the time."""
    from kerasps.runtime.probe import Answer, ask_servers

    return run.wait_for(lambda: ask_servers({0: address}, 0.2)[0] is Answer.SERVES)


def measure(run):
    """Cause every loss once; return the seconds of each."""
    found = {}
    run.wait_for(lambda: len(run.events("steps")) > 100)
    time.sleep(5.0)
    found["gap without a loss"] = run.longest_gap(time.monotonic() - 4.0, time.monotonic())
    # A worker.
    address = address_of(children_of(run.launcher.pid)["worker-1"])
    at, _ = run.signal("worker-1", signal.SIGKILL, "worker killed")
    served_at = answers_at(run, address)
    run.wait_for(lambda: run.status_since(at, 1, "there"))
    # The gap may come after: when the worker makes its step ready.
    time.sleep(5.0)
    found["worker killed, longest gap of the others"] = run.longest_gap(at - 0.5, time.monotonic())
    found["worker back after its server answers"] = run.status_since(at, 1, "there") - served_at
    found["worker killed, until it is back"] = run.status_since(at, 1, "there") - at
    time.sleep(APART_S)
    # A worker that hangs; the launcher kills it and starts another.
    at, _ = run.signal("worker-0", signal.SIGSTOP, "worker stopped")
    run.wait_for(lambda: run.status_since(at, 0, "does not answer"))
    found["worker stopped, until it is noticed"] = run.status_since(at, 0, "does not answer") - at
    time.sleep(APART_S)
    at, _ = run.signal("ps-0", signal.SIGKILL, "ps killed")
    found["ps killed, until the next step"] = run.next_step(at)
    time.sleep(APART_S)
    at, _ = run.signal("chief", signal.SIGKILL, "coordinator killed")
    found["coordinator killed, until the next step"] = run.next_step(at)
    time.sleep(APART_S)
    return found


def draw(run, path, steps_per_execution=10):
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "kerasps"
    import matplotlib.pyplot as plt
    import numpy as np

    times = np.array([record["time"] for record in run.events("steps")])
    began = times[0]
    bins = np.arange(0.0, times[-1] - began, _BIN_S)
    counts, _ = np.histogram(times - began, bins)
    figure, axes = plt.subplots(figsize=(9, 3))
    axes.stairs(counts * steps_per_execution / _BIN_S, bins, fill=True, color="#4c78a8")
    for at, label in run.losses:
        axes.axvline(at - began, color="#d62728", linewidth=1)
        axes.annotate(label, (at - began, axes.get_ylim()[1]), rotation=30, fontsize=8, va="bottom")
    axes.set_xlabel("seconds")
    axes.set_ylabel("steps per second")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", type=Path, help="the SVG file to draw")
    parser.add_argument("--log", default=os.devnull, help="a file for what the run prints")
    args = parser.parse_args()
    with TemporaryDirectory() as name, open(args.log, "wb") as log:
        folder = Path(name)
        (folder / "until").write_text(str(time.monotonic() + 3600.0))
        run = Run(folder, log)
        try:
            found = measure(run)
        finally:
            run.launcher.terminate()
            run.launcher.wait()
        for what, seconds in found.items():
            print(f"| {what} | {seconds:.2f} s |")
        if args.plot is not None:
            draw(run, args.plot)


if __name__ == "__main__":
    main()
