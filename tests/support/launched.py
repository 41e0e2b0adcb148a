"""A `kerasps launch` under test, and what it leaves behind."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import uuid
from pathlib import Path

from support.process_checks import (
    is_free,
    marked_environment,
    marked_processes,
    name_of,
    wait_for,
)

PREAMBLE = """
import json, os, pathlib, signal, sys, time
here = pathlib.Path(__file__).parent
config = json.loads(os.environ["TF_CONFIG"])
(here / "tf_config.json").write_text(os.environ["TF_CONFIG"])

def tasks():
    "The pids of the servers, by name."
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
        try:
            stat = (entry / "stat").read_text() if entry.name.isdecimal() else ") S -1"
            if int(stat.rpartition(")")[2].split()[1]) == os.getppid():
                found[(entry / "comm").read_text().strip()] = int(entry.name)
        except OSError:
            pass
    return found

def await_servers():
    "They start beside the script; each closes what it reports on when it is ready."
    cluster = config["cluster"]
    expected = {f"{job}-{index}" for job in ("worker", "ps") for index in range(len(cluster[job]))}
    while not expected <= set(tasks()):
        time.sleep(0.01)
    for name in expected:
        process = pathlib.Path(f"/proc/{tasks()[name]}")
        words = (process / "cmdline").read_bytes().decode().split(chr(0))
        while (process / "fd" / words[words.index("--report-fd") + 1]).exists():
            time.sleep(0.01)

if "chief" in config["cluster"]:
    await_servers()

def ready():
    (here / "ready.new").write_text(json.dumps(tasks()))
    (here / "ready.new").rename(here / "ready")
"""


class Launch:
    """A launcher under test: its process, and what it left behind."""

    def __init__(self, tmp_path, body, *, options=(), args=(), variables=None, terminal=None):
        self.mark = str(uuid.uuid4())
        self.here = tmp_path
        script = tmp_path / "script.py"
        script.write_text(PREAMBLE + body)
        env = marked_environment(self.mark, tmp_path, **(variables or {}))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kerasps", "launch", *options, str(script), *args],
            env=env,
            stdin=subprocess.DEVNULL if terminal is None else terminal,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=None if terminal is None else lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def wait_until_ready(self):
        """Waits until the script has called `ready()`; the pids of the servers, by name."""
        wait_for(
            lambda: (self.here / "ready").exists() or self.process.poll() is not None,
            what="a ready script",
        )
        assert self.process.poll() is None, self.process.communicate()
        return json.loads((self.here / "ready").read_text())

    def tasks(self):
        """The pids of the servers that run, by name."""
        found = {}
        for entry in Path(f"/proc/{self.process.pid}/task").iterdir():
            for child in (entry / "children").read_text().split():
                with contextlib.suppress(OSError):
                    found[name_of(child)] = int(child)
        return found

    def result(self):
        """The exit code, stdout and stderr, after making sure that nothing is left."""
        out, err = self.process.communicate()
        self.assert_nothing_left()
        return self.process.returncode, out, err

    def assert_nothing_left(self):
        wait_for(
            lambda: not marked_processes(self.mark),
            what="the end of all processes",
        )
        # A process that is on its way out loses its environment, and with it the mark, before its
        # sockets are closed.
        for addresses in self.cluster().values():
            for address in addresses:
                wait_for(
                    lambda address=address: is_free(address),
                    what=f"a free port at {address}",
                )

    def cluster(self):
        path = self.here / "tf_config.json"
        return json.loads(path.read_text())["cluster"] if path.exists() else {}

    def end(self):
        for pid in marked_processes(self.mark):
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()


def lines_until(stream, words):
    """Reads lines up to the first that has these words, and returns them."""
    lines = []
    while not lines or words not in lines[-1]:
        lines.append(stream.readline())
        assert lines[-1], lines
    return lines
