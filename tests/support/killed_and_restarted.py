"""Runs a script again and again, and ends it in between, at random."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import sys
import threading
from pathlib import Path

from support.forked_scripts import AT_IMPORT, ForkedScript
from support.process_checks import PATIENCE_S

# Kills a ps in place of the process itself, which then ends in an error.
KILL_PS = "kill a ps"


class _Ender(threading.Thread):
    """Sends a signal to a process, some time after it has made its first backup of a training."""

    def __init__(self, send, backups, delay):
        super().__init__(daemon=True)
        self.send = send
        self.backups, self.delay = backups, delay
        self.before = {*backups.glob("backup-*.json")}
        self.is_over = threading.Event()

    def run(self):
        while self.before >= {*self.backups.glob("backup-*.json")}:
            if self.is_over.wait(0.005):
                return
        if not self.is_over.wait(self.delay):
            self.send()


def run_with_kills(
    script, directory, *arguments, signals=(signal.SIGKILL,), most_after=0.8, seed=0
):
    """Runs a script until it reports, and ends it in between.

    Args:
        script: it says `TRAINING name` when a training begins, `DONE name` when it has ended, and
            before, for `KILL_PS`, `PS` and the process number of a ps.
        directory: given to the script; the backups of a training are in its folder `name`.
        signals: those that each training gets, one in each run.
        most_after: how long after there is a backup, in seconds.
        seed: of these times.

    Returns:
        The report, the exit codes of the runs before, and what was printed.
    """
    chance, sent, codes, printed = random.Random(seed), {}, [], []
    while True:
        read, write = os.pipe()
        with os.fdopen(write, "w") as output:
            process = ForkedScript(
                [script, "--directory", directory, *arguments],
                env={**os.environ, **AT_IMPORT},
                stdout=output,
                stderr=output,
            )
        end = threading.Timer(PATIENCE_S, process.kill)
        end.start()
        ender = report = ps = None
        with os.fdopen(read) as lines:
            for line in lines:
                printed.append(line)
                word, _, rest = line.strip().partition(" ")
                if word == "TRAINING" and sent.get(rest, 0) < len(signals):
                    number = signals[sent.get(rest, 0)]
                    sent[rest] = sent.get(rest, 0) + 1
                    if number == KILL_PS:
                        send = functools.partial(os.kill, ps, signal.SIGKILL)
                    else:
                        send = functools.partial(process.send_signal, number)
                    ender = _Ender(send, directory / rest, chance.uniform(0, most_after))
                    ender.start()
                elif word == "PS":
                    ps = int(rest)
                elif word == "DONE" and ender is not None:
                    ender.is_over.set()
                elif word == "REPORT":
                    report = json.loads(rest)
        codes.append(process.wait())
        assert end.is_alive(), f"a run hangs, with seed {seed}: " + "".join(printed)[-6000:]
        end.cancel()
        if ender is not None:
            ender.is_over.set()
            ender.join()
        if report is not None:
            return report, codes[:-1], "".join(printed)
        assert ender is not None, "".join(printed)[-6000:]


if __name__ == "__main__":
    # python killed_and_restarted.py SCRIPT DIRECTORY KILLS SEED [more arguments of the script]
    script, directory, kills, seed, *rest = sys.argv[1:]
    report, codes, printed = run_with_kills(
        script,
        Path(directory),
        *rest,
        signals=[signal.SIGKILL] * int(kills),
        seed=int(seed),
    )
    print(printed, codes, report)
