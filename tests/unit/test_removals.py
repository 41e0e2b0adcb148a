"""Everything in the package that ends a process, or removes or replaces a file, is in the table of
docs/decisions/0040, which says why it can only hit what kerasps made.
"""

from __future__ import annotations

import ast
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

from kerasps.tools.cli.scripts.script_forks import ScriptForks
from kerasps.tools.cli.scripts.script_process import ScriptProcess
from support.process_checks import is_listening, wait_for

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kerasps"
PAGE = ROOT / "docs" / "decisions" / "0040-what-may-be-killed-or-removed.md"
# The last part of the name of what is called.
NAMES = {
    *("kill", "killpg", "terminate", "send_signal", "begin_to_kill", "pidfd_send_signal"),
    *("unlink", "rmtree", "rmdir", "removedirs", "rename", "renames"),
    *("truncate", "shutdown", "link", "symlink", "execv", "execve", "_exit"),
}
# Names that lists, texts and records have too: only with this before the dot.
WITH_OWNER = re.compile(
    r"\bshutil\.|(os|gfile)\.(remove|replace)|\b(\w*part|unnamed|written)\.replace"
)


def calls():
    """The calls by (module, name), with their numbers."""
    found = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name, full = node.func.attr, ast.unparse(node.func)
                if name in NAMES or WITH_OWNER.search(full):
                    found[path.relative_to(PACKAGE).as_posix(), name] += 1
    return found


def table():
    """The same from the page: a line `| `module` | `name` 2, `other` | why |`."""
    found = Counter()
    for line in PAGE.read_text().splitlines():
        if match := re.match(r"\| `(\S+\.py)` \| (.+?) \| (.{20,}) \|$", line):
            for name, number in re.findall(r"`(\w+)`(?: (\d+))?", match[2]):
                found[match[1], name] += int(number or 1)
    return found


def test_each_call_is_in_the_table():
    assert dict(calls()) == dict(table())


def test_a_script_that_was_reaped_gets_no_signal(monkeypatch):
    script = ScriptProcess(["true"], os.environ)
    wait_for(lambda: script.poll() is not None)
    sent = []
    monkeypatch.setattr(os, "kill", lambda *what: sent.append(what))  # the id may be another's
    script.send_signal(signal.SIGTERM)
    script.close()
    assert sent == []


LISTENS = """
import socket, sys, time
listener = socket.socket()
listener.bind((sys.argv[1], int(sys.argv[2])))
listener.listen()
time.sleep(3600)
"""


def test_only_descendants_that_keep_the_port_are_ended():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    ours, others = ScriptForks(port), ScriptForks(port)
    given = {
        "127.0.0.1": ours.variables,  # what keeps the port
        "127.0.0.2": others.variables,  # of another run beside this one
        "127.0.0.3": {},  # started by hand
        "127.0.0.4": ours.variables,  # a descendant that keeps nothing
    }
    processes = {
        address: subprocess.Popen(
            [sys.executable, "-c", LISTENS, address, str(port)], env={**os.environ, **variables}
        )
        for address, variables in given.items()
    }
    try:
        for address in processes:
            wait_for(lambda address=address: is_listening(f"{address}:{port}"))
        assert ours.end("127.0.0.1") == [processes["127.0.0.1"].pid]
        assert ours.end("127.0.0.1") == []
        runs = [address for address, process in processes.items() if process.poll() is None]
        assert runs == ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
        # One that listens on all addresses cannot do so beside any of them.
        assert others.end(None) == [processes["127.0.0.2"].pid]
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
