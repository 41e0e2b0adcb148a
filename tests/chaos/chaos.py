"""One training under `kerasps launch`, of which anything dies, sleeps or is preempted at any time.

    python tests/chaos/chaos.py --seconds 3600 --seed 1
    python tests/chaos/chaos.py --kill ps --times 10

Workers, ps and the coordinator get SIGKILL, SIGTERM, or SIGSTOP and SIGCONT, at random times; with
`--kill`, tasks of one kind get SIGKILL. What the training adds up to is compared at the end of each
pass. Prints a line of JSON behind `REPORT`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

TRAINING = Path(__file__).with_name("training.py")
# A run that is brought back takes some ten seconds, more on a busy machine. Most of what goes are
# workers, or nothing would be trained.
WEIGHTS = {"worker": 12, "ps": 1, "chief": 1}
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
END_S = 600.0


def children_of(pid):
    """The pids of a process's children, by name."""
    found = {}
    for entry in Path(f"/proc/{pid}/task").iterdir():
        for child in (entry / "children").read_text().split():
            with contextlib.suppress(OSError):
                found[Path(f"/proc/{child}/comm").read_text().strip()] = int(child)
    return found


def victims(launcher):
    """The tasks that run, by (type, name)."""
    found = {}
    for name, pid in children_of(launcher).items():
        kind = name.partition("-")[0] if name.partition("-")[0] in ("worker", "ps") else "chief"
        found[kind, name] = pid
    return found


class Chaos:
    """Sends signals to the tasks of a launcher, by a seed.

    Args:
        launcher: its pid.
        seed: an integer.
        kills: the only kind of tasks that are struck, by SIGKILL; None for all kinds and signals.
    """

    def __init__(self, launcher, seed, kills=None):
        self.launcher, self.random = launcher, random.Random(seed)
        self.weights = WEIGHTS if kills is None else {kills: 1}
        self.signals = SIGNALS if kills is None else (signal.SIGKILL,)
        self.sent = Counter()
        self.stopped = []

    def strike(self):
        """Send one signal to one task, if there is one of the kind that was drawn."""
        kind = self.random.choices([*self.weights], [*self.weights.values()])[0]
        number = self.random.choice(self.signals)
        seconds = self.random.choice((0.2, 2.0, 14.0))
        pids = [pid for (k, _), pid in sorted(victims(self.launcher).items()) if k == kind]
        if not pids:
            return
        pid = self.random.choice(pids)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            self.sent[f"{kind} {signal.Signals(number).name}"] += 1
            if number == signal.SIGSTOP:
                self.stopped.append((time.monotonic() + seconds, pid))

    def wake(self, *, all_of_them=False):
        """Let those go on whose time has come."""
        now = time.monotonic()
        for until, pid in list(self.stopped):
            if all_of_them or now >= until:
                self.stopped.remove((until, pid))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def run(self, seconds, times, most_between, is_over):
        """Strike for so many seconds, and so many times at least."""
        deadline = time.monotonic() + seconds
        while not is_over() and (time.monotonic() < deadline or sum(self.sent.values()) < times):
            pause = time.monotonic() + self.random.uniform(0.2, most_between)
            while time.monotonic() < pause:
                self.wake()
                time.sleep(0.05)
            self.strike()
        self.wake(all_of_them=True)


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--kill", choices=[*WEIGHTS], help="send SIGKILL to tasks of this kind only"
    )
    parser.add_argument("--times", type=int, default=2, help="so many signals at least")
    parser.add_argument("--most-between", type=float, default=5.0, help="seconds between two")
    parser.add_argument("--num-ps", type=int, default=2)
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd")
    parser.add_argument("--steps-per-execution", type=int, default=5)
    parser.add_argument("--strategy", default="{}", help="its arguments, as JSON")
    parser.add_argument("--log", type=Path, help="a file for what is printed meanwhile")
    args = parser.parse_args()
    with TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        log_path = args.log or folder / "log"
        log = stack.enter_context(log_path.open("wb"))
        command = [sys.executable, "-m", "kerasps", "launch", "--num-workers=2"]
        command += [f"--num-ps={args.num_ps}", "--max-restarts=100000", str(TRAINING), name]
        command += [args.optimizer, str(args.steps_per_execution), args.strategy]
        command += ["figures"] if args.kill == "worker" else []
        launcher = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        chaos = Chaos(launcher.pid, args.seed, args.kill)
        try:
            while not records(folder / "passes") and launcher.poll() is None:
                time.sleep(0.1)
            is_over = lambda: launcher.poll() is not None  # noqa: E731
            chaos.run(args.seconds, args.times, args.most_between, is_over)
            (folder / "enough").touch()
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(END_S)
            code = launcher.poll()
        finally:
            launcher.kill()
            launcher.wait()
        passes = records(folder / "passes")
        report = {
            "exit_code": code,
            "is_done": (folder / "done").exists(),
            "sent": dict(chaos.sent),
            "scripts": len({record["pid"] for record in passes}),
            "passes": 1 + max((record["epoch"] for record in passes), default=-1),
            "wrong": [record for record in passes if record["wrong"]],
            "said_last": "" if code == 0 else log_path.read_text(errors="replace")[-6000:],
        }
        print("REPORT", json.dumps(report), flush=True)
    return 0 if code == 0 and not report["wrong"] else 1


if __name__ == "__main__":
    sys.exit(main())
