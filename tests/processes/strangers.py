"""Runs `kerasps serve` on a machine with two networks, and reports who reaches it.

Run it with a user and a network namespace of its own (`unshare -rn`), which is the machine. Two
more network namespaces are a peer, on the network that the tasks use, and a stranger on another.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time

from support.process_checks import listening_addresses

OWN, PUBLIC, OWN_6 = "10.1.0.1", "10.2.0.1", "fd00:1::1"
# Addresses that no machine has: of a service, for example.
SERVICE = "198.51.100.7"
# Whose entry is no address of this machine, and which are not told where to listen.
REFUSED = {"service": (SERVICE, []), "unknown": ("no-such-host.invalid", [])}
# By name: the host in the task's entry, and the options of `kerasps serve`.
TASKS = {
    "entry": (OWN, []),
    "ipv6": (f"[{OWN_6}]", []),
    "loopback": ("127.0.0.1", []),
    "everywhere": (OWN, ["--bind", "0.0.0.0"]),
    "bound": (SERVICE, ["--bind", OWN]),
}
PORTS = {name: 2222 + number for number, name in enumerate(TASKS | REFUSED)}
CONNECT = """
import json, socket, sys
reached = {}
for name, address, port in json.load(sys.stdin):
    try:
        socket.create_connection((address, port)).close()
        reached[name] = "reached"
    except OSError as error:
        reached[name] = type(error).__name__
print(json.dumps(reached))
"""


def ip(*arguments, within=None):
    enter = [] if within is None else ["nsenter", "-t", str(within.pid), "-n"]
    subprocess.run([*enter, "ip", *arguments], check=True)


def neighbour(stack, link, prefix):
    """A namespace that is connected to this one; the machine is number 1 there, it number 2."""
    process = stack.enter_context(subprocess.Popen(["unshare", "-n", "sleep", "100"]))
    stack.callback(process.kill)
    while os.readlink(f"/proc/{process.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        time.sleep(0.01)
    ip("link", "add", link, "type", "veth", "peer", "name", "far", "netns", str(process.pid))
    for name, number, within in ((link, 1, None), ("far", 2, process)):
        ip("addr", "add", f"{prefix}.{number}/24", "dev", name, within=within)
        ip("link", "set", "dev", name, "up", within=within)
    return process


def serve(stack, name):
    host, options = (TASKS | REFUSED)[name]
    cluster = {"chief": [f"{SERVICE}:1"], "worker": [f"{host}:{PORTS[name]}"], "ps": ["peer:1"]}
    if name == "loopback":
        cluster |= {"chief": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    process = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-m", "kerasps", "serve", *options],
            env=os.environ | {"TF_CONFIG": json.dumps(config)},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    )
    stack.callback(process.kill)
    return process


def listens(process):
    """Where a task listens, when it says that it does, and all that it says."""
    said = []
    for line in process.stderr:
        if line.startswith("kerasps serve: "):
            said.append(line.strip())
        if " listens on port " in line:
            break
    return {"said": said, "listens": sorted(listening_addresses(process.pid))}


def reached(process, addresses):
    """What becomes of a connection from a namespace to each task, at the address given for it."""
    done = subprocess.run(
        ["nsenter", "-t", str(process.pid), "-n", sys.executable, "-c", CONNECT],
        input=json.dumps([(name, at, PORTS[name]) for name, at in addresses.items()]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


with contextlib.ExitStack() as stack:
    ip("link", "set", "dev", "lo", "up")
    peer = neighbour(stack, "own", "10.1.0")
    stranger = neighbour(stack, "public", "10.2.0")
    for name, number, within in (("own", 1, None), ("far", 2, peer)):
        # At once: no wait for another machine of the same address.
        ip("addr", "add", f"fd00:1::{number}/64", "dev", name, "nodad", within=within)
    served = {name: serve(stack, name) for name in TASKS}
    refused = {name: serve(stack, name) for name in REFUSED}
    report = {"tasks": {name: listens(process) for name, process in served.items()}}
    report["refused"] = {
        name: [process.communicate()[1], process.returncode] for name, process in refused.items()
    }
    addresses = dict.fromkeys(TASKS, OWN)
    report["peer"] = reached(peer, addresses | {"ipv6": OWN_6})
    report["stranger"] = reached(stranger, dict.fromkeys(TASKS, PUBLIC))
    # A neighbour may send to any address of a machine: that one has only to be told the way.
    ip("route", "add", OWN, "via", PUBLIC, within=stranger)
    report["neighbour"] = reached(stranger, addresses)
    print("REPORT", json.dumps(report), flush=True)
