"""Run the tests that the README's command runs, all others, or those that are named.

    python tests/run.py          # tests/unit, tests/smoke, and a test for each promise
    python tests/run.py full     # all others
    python tests/run.py tests    # all
    python tests/run.py tests/unit tests/cluster/one_worker -k adam
    python tests/run.py -m matrix

A process connects to one cluster in its life, so there is a session of pytest per kind of cluster,
and each of the two processes that pytest-xdist starts has a cluster of its own. A failure in one
session does not keep the others from running. What is no path goes to each session as it stands.
Tests marked `matrix` run where `-m` asks for them: they do at length what others do in short.
`tests/promises.py` has the tests for promises.

Tests are in another order in each run. The closing lines say of which seed; `--order-seed=N` has
them in that order again.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))
from promises import TESTS as FOR_PROMISES

TESTS = Path(__file__).resolve().parent
# The folders of each session.
SESSIONS = {
    "unit": ("unit",),
    "smoke": ("smoke",),
    "processes": ("processes", "chaos"),
    "one_worker": ("cluster/one_worker",),
    "two_workers": ("cluster/two_workers",),
    "scripts": ("cluster/scripts",),
}
# The sessions of the README's command; of each other, it has the tests for promises.
WHOLE = ("unit", "smoke")
FULL = "full"
NOTHING_COLLECTED = 5
ORDER_SEED = "--order-seed"


def sessions_of(arguments: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the paths for each session, and what is no path."""
    paths: dict[str, list[str]] = {}
    options = []
    for argument in arguments:
        path = Path(argument.partition("::")[0]).resolve()
        if argument.startswith("-") or not path.exists() or not path.is_relative_to(TESTS):
            options.append(argument)
            continue
        for session, folders in SESSIONS.items():
            for folder in (TESTS / name for name in folders):
                if path.is_relative_to(folder):
                    paths.setdefault(session, []).append(argument)
                elif folder.is_relative_to(path):
                    paths.setdefault(session, []).append(str(folder))
    everything = {name: [str(TESTS / f) for f in folders] for name, folders in SESSIONS.items()}
    if FULL in options:
        options.remove(FULL)
        paths = paths or {
            name: folders for name, folders in everything.items() if name not in WHOLE
        }
        options += [f"--deselect={test}" for test in FOR_PROMISES]
    elif not paths and asks_for_marks(options):
        paths = everything
    elif not paths:
        promised, _ = sessions_of([str(TESTS.parent / test) for test in FOR_PROMISES])
        paths = {name: everything[name] for name in WHOLE} | promised
    if not asks_for_marks(options):
        options += ["-m", "not matrix"]
    if not any(option.startswith(ORDER_SEED) for option in options):
        options.append(f"{ORDER_SEED}={random.SystemRandom().randrange(1, 1_000_000)}")
    return paths, options


def asks_for_marks(options: list[str]) -> bool:
    return any(option.startswith("-m") for option in options)


def run(session: str, paths: list[str], options: list[str]) -> tuple[int, str]:
    """Run a session of pytest; return its exit code and the last line that it printed."""
    # With `worksteal`, the slow tests of both processes end together.
    # Without `-P`, it would import the checkout that it is called in, and not what is installed.
    pytest = [sys.executable, "-P", "-m", "pytest"]
    command = [*pytest, "-n", "2", "--dist", "worksteal", *options, *paths]
    print("$", *command[3:], flush=True)
    last = ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=hear_signals
    ) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return process.returncode, last


def hear_signals() -> None:
    """Have signals do what they do, also where a shell has this ignore them, in the background.

    Tests send some, and a process inherits that it ignores them.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def main(arguments: list[str]) -> int:
    paths, options = sessions_of(arguments)
    started = time.monotonic()
    done = {
        session: run(session, paths[session], options) for session in SESSIONS if session in paths
    }
    print(f"\n{len(done)} sessions, {time.monotonic() - started:.0f} s")
    for session, (_, last) in done.items():
        print(f"{session}: {last.strip('= ')}")
    print(*[option for option in options if option.startswith(ORDER_SEED)])
    codes = {code for code, _ in done.values()}
    if codes == {NOTHING_COLLECTED}:
        return NOTHING_COLLECTED
    return max(codes - {NOTHING_COLLECTED})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
