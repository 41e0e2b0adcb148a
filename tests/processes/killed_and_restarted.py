"""Runs a script again and again, and kills it at random in between."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time


def run_with_kills(script, *arguments, kills, window_s, seed, limit_s=170.0, **environment):
    """Runs a script until it reports, and kills it with SIGKILL in between.

    Args:
        kills: how often to kill each training. The script says `TRAINING name` when one begins, and
            `DONE name`.
        window_s: from when to when after that line, in seconds.
        seed: of the times.
        limit_s: seconds for all of it.

    Returns:
        The report, the number of kills by training, and what was printed.
    """
    chance, killed, printed = random.Random(seed), {}, []
    deadline = time.monotonic() + limit_s
    while True:
        process = subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            env={
                **os.environ,
                "KERAS_BACKEND": "tensorflow",
                "TF_CPP_MIN_LOG_LEVEL": "3",
                **environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        end = threading.Timer(deadline - time.monotonic(), process.kill)
        end.start()
        current, timer = None, None
        for line in process.stdout:
            printed.append(line)
            word, _, rest = line.partition(" ")
            if word == "TRAINING":
                current = rest.strip()
                if killed.get(current, 0) < kills:
                    timer = threading.Timer(chance.uniform(*window_s), process.kill)
                    timer.start()
            elif word == "DONE" and timer is not None:
                timer.cancel()
                timer = None
            elif word == "REPORT":
                end.cancel()
                process.wait()
                return json.loads(rest), killed, printed
        end.cancel()
        code = process.wait()
        assert code == -signal.SIGKILL, "".join(printed)[-6000:]
        assert time.monotonic() < deadline, "".join(printed)[-6000:]
        assert timer is not None, "".join(printed)[-6000:]
        killed[current] = killed.get(current, 0) + 1


if __name__ == "__main__":
    # python killed_and_restarted.py SCRIPT KILLS FROM TO SEED [arguments of the script]
    script, kills, begin, until, seed, *rest = sys.argv[1:]
    report, killed, printed = run_with_kills(
        script,
        *rest,
        kills=int(kills),
        window_s=(float(begin), float(until)),
        seed=int(seed),
        limit_s=7200,
    )
    with contextlib.suppress(BrokenPipeError):
        print("".join(printed))
        print(killed, report)
