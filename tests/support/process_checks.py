"""What the tests of real processes share: waiting for something to happen, and looking for what was
left behind.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from importlib.metadata import distributions
from pathlib import Path

import pytest

from kerasps.cluster.processes.process import child_environment
from kerasps.runtime.addresses import split_address
from support.forked_scripts import AT_IMPORT, MARK, ForkedScript, is_alive

# A network namespace of its own, as docs/security.md has it for a machine that is shared.
ALONE = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
# The kernel's number of the state, as its tables write it.
LISTENING = "0A"
# A process that hangs for minutes is a failure; one that takes longer than usual is not.
PATIENCE_S = 600.0
# A limit that no test reaches: pytest ends one that waits for so long.
EVER_S = 3600.0
# Modules with the names of packages, which cannot be imported.
ABSENT = Path(__file__).with_name("absent")


def wait_for(condition, what="the condition"):
    """Polls until the condition gives something true, and returns it."""
    deadline = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"{what} did not come true within {PATIENCE_S} s")
        time.sleep(0.02)
    return result


def environment_of(pid):
    content = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    return dict(entry.split("=", 1) for entry in content.split("\0") if "=" in entry)


def name_of(pid):
    return Path(f"/proc/{pid}/comm").read_text().strip()


def marked_processes(mark):
    """The running processes that inherited this mark, this one excepted, as pid -> name."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if environment_of(entry.name).get(MARK) == mark and is_alive(entry.name):
                    found[int(entry.name)] = name_of(entry.name)
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found


def light_environment(base):
    """Return an environment in which scripts find neither pandas nor scikit-learn.

    kerasps needs neither, but Keras and TensorFlow import them where they are installed, which
    takes two of five seconds of processor time.
    """
    path = os.pathsep.join(filter(None, (str(ABSENT), base.get("PYTHONPATH"))))
    return {**base, "PYTHONPATH": path}


# How kerasps begins a warning of versions that were not tested: it warns of nightly builds.
UNTESTED = "This version of"
IS_NIGHTLY = any(any(distributions(name=name)) for name in ("keras-nightly", "tf-nightly"))
# Python's `-W` and PYTHONWARNINGS take these; beside a release, no such warning is ignored.
IGNORED_WARNINGS = [f"ignore:{UNTESTED}"] if IS_NIGHTLY else []


def marked_environment(mark, tmp_path, **variables):
    """Return the environment of a process under test; it has a directory for temporary files."""
    temporary = tmp_path / "temporary"
    temporary.mkdir(exist_ok=True)
    env = child_environment(light_environment(os.environ))
    env.pop("TF_CONFIG", None)
    # TensorFlow imports code that it has written to TMPDIR; what Python keeps of that is not what
    # is looked for here.
    if IGNORED_WARNINGS:
        env["PYTHONWARNINGS"] = ",".join(IGNORED_WARNINGS)
    return env | {MARK: mark, "TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1", **variables}


def mode_of(path):
    """Who may do what with a file, as `chmod` takes it."""
    return oct(stat.S_IMODE(Path(path).stat().st_mode))


def temporary_files(tmp_path):
    """What is left there, but for sockets of killed scripts, which whoever looks next removes."""
    sockets = f"kerasps-{os.getuid()}"
    found = (path.name for path in (tmp_path / "temporary").iterdir())
    return sorted(name for name in found if name != sockets)


def is_free(address):
    """Whether a server could listen at the address: nobody listens there and nobody holds it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(split_address(address))
            probe.listen()
        except OSError:
            return False
    return True


def is_listening(address):
    try:
        socket.create_connection(split_address(address), timeout=PATIENCE_S).close()
    except OSError:
        return False
    return True


def listening_addresses(pid):
    """Where a process listens, as the system says: the IP address and the port of each socket.

    A socket that listens on all addresses is at `0.0.0.0` or `::`.
    """
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            sockets.add(os.readlink(descriptor))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENING and f"socket:[{inode}]" in sockets:
                address, port = local.split(":")
                # Words of four bytes, each in the byte order of the machine.
                words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
                packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
                ip = ipaddress.ip_address(packed)
                found.add((str(getattr(ip, "ipv4_mapped", None) or ip), int(port, 16)))
    return found


def reserved_address():
    """A free port, and the socket that keeps it from everyone but a server that is told it."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder, f"127.0.0.1:{holder.getsockname()[1]}"


def run_script(script, *arguments, env, timeout_s=PATIENCE_S, forked=True):
    """Runs a script as a process of its own; returns it, with its exit code and what it printed, as
    `subprocess.run` does.

    Args:
        forked: whether to fork it from a process that has imported TensorFlow. `False` is for what
            TensorFlow does when it is imported, and for GPUs.
    """
    command = [str(script), *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        outputs = {"stdout": out, "stderr": err}
        if forked:
            process = ForkedScript(command, env=env, **outputs)
        else:
            command, env = [sys.executable, *command], light_environment(env)
            process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, **outputs)
        try:
            process.wait(timeout_s)
        finally:
            process.kill()
            process.wait()
        printed = [(file.seek(0), file.read())[1] for file in (out, err)]
    return subprocess.CompletedProcess(command, process.returncode, *printed)


def run_and_report(script, *arguments, timeout_s=PATIENCE_S, forked=True, **environment):
    """Runs a script as `run_script` does; returns what it reported (`report_in`)."""
    env = {**os.environ, **AT_IMPORT, **environment}
    return report_in(run_script(script, *arguments, env=env, timeout_s=timeout_s, forked=forked))


def report_in(done):
    """Returns what a process that has ended reported: the JSON behind `REPORT ` in a line."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("REPORT "))
