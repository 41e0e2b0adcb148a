"""Hosts of a network: namespaces on a bridge, each with an address and a name.

They need no rights where the system lets users make namespaces; else they need root. Nothing of
the machine's own network is touched: the bridge too is in a namespace. The first host has the
first name, and so on; `rename` gives a name to another host.

    with Hosts(["chief", "ps-0"]) as hosts:
        hosts.run("ps-0", ["kerasps", "serve"], env=env)
        hosts.cut("ps-0")
        hosts.heal("ps-0")
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from pathlib import Path

SUBNET = "10.77.0"
# Entering the user's namespace, of those who are not root, is entering with the rights in it.
OF_USER = ("--user", "--map-root-user")
PROGRAMS = ("env", "ip", "mount", "nsenter", "unshare")


class HostsNotAllowedError(Exception):
    """This machine lets nobody, or not this user, make hosts."""


class _Namespaces:
    """Namespaces that last until `close`, or until this process ends in whatever way."""

    def __init__(self, command: list[str]) -> None:
        # `cat` ends when the pipe does.
        self.process = subprocess.Popen(
            [*command, "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(b"\n")
        # What comes back says that the namespaces are there.
        if self.process.stdout.read(1) != b"\n":
            _, errors = self.process.communicate()
            raise HostsNotAllowedError(f"{' '.join(command)}: {errors.decode().strip()}")

    @property
    def pid(self) -> int:
        return self.process.pid

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()


class Hosts:
    """So many hosts as there are names, and `spare` ones more, which `rename` can use.

    Args:
        names: the names by which all hosts find them.
        spare: the number of hosts without a name, called `"spare-0"` and so on here.
    """

    def __init__(self, names: list[str], spare: int = 0) -> None:
        self._closing = contextlib.ExitStack()
        self._hosts: dict[str, _Namespaces] = {}
        self._links: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        for program in PROGRAMS:
            if shutil.which(program) is None:
                raise HostsNotAllowedError(f"there is no program {program} here")
        try:
            self._make(names, spare)
        except BaseException:
            self.close()
            raise

    def _make(self, names: list[str], spare: int) -> None:
        folder = Path(self._closing.enter_context(tempfile.TemporaryDirectory()))
        self._table = folder / "hosts"
        self._table.touch()
        try:
            self._bridge = _Namespaces(["unshare", *OF_USER, "--net", "--mount"])
        except HostsNotAllowedError:  # which root may do where users may not
            self._bridge = _Namespaces(["unshare", "--net", "--mount"])
        self._closing.callback(self._bridge.close)
        self._call(self._bridge, "ip", "link", "add", "bridge", "type", "bridge")
        self._call(self._bridge, "ip", "link", "set", "bridge", "up")
        for number, name in enumerate([*names, *(f"spare-{n}" for n in range(spare))], 1):
            self._make_host(name, number)
        self._names = {name: name for name in names}
        self._write_names()

    def _make_host(self, name: str, number: int) -> None:
        command = ["unshare", "--net", "--mount", "--uts", "--propagation", "private"]
        host = _Namespaces([*self._inside(self._bridge, uts=False), *command])
        self._closing.callback(host.close)
        self._hosts[name], self._links[name] = host, f"link{number}"
        self._addresses[name] = f"{SUBNET}.{number}"
        link = f"link{number}"
        self._call(
            self._bridge,
            *("ip", "link", "add", link, "type", "veth"),
            *("peer", "name", "eth0", "netns", str(host.pid)),
        )
        self._call(self._bridge, "ip", "link", "set", link, "master", "bridge", "up")
        self._call(host, "ip", "address", "add", f"{SUBNET}.{number}/24", "dev", "eth0")
        self._call(host, "ip", "link", "set", "eth0", "up")
        self._call(host, "ip", "link", "set", "lo", "up")
        # As Kubernetes does, whose names have a domain behind the pod's.
        self._call(host, "hostname", name.partition(".")[0])
        self._call(host, "mount", "--bind", str(self._table), "/etc/hosts")

    def _inside(self, where: _Namespaces, uts: bool = True) -> list[str]:
        names = ["--user", "--preserve-credentials", "--net", "--mount", *(["--uts"] * uts)]
        return ["nsenter", "--target", str(where.pid), *names, "--"]

    def _call(self, where: _Namespaces, *command: str) -> None:
        done = subprocess.run(
            [*self._inside(where, uts=where is not self._bridge), *command],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise HostsNotAllowedError(f"{' '.join(command)}: {done.stderr.strip()}")

    def _write_names(self) -> None:
        lines = [f"{self._addresses[host]} {name}" for name, host in self._names.items()]
        # In its place: the hosts have mounted this very file.
        self._table.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def address(self, host: str) -> str:
        """Return the IPv4 address of a host."""
        return self._addresses[host]

    def run(self, host: str, command: list[str], cwd: object = None, **options) -> subprocess.Popen:
        """Start a command on a host; `cwd` and `options` are those of `subprocess.Popen`."""
        # Who enters a namespace of mounts is at its root.
        there = ["env", f"--chdir={Path.cwd() if cwd is None else cwd}"]
        return subprocess.Popen([*self._inside(self._hosts[host]), *there, *command], **options)

    def cut(self, host: str) -> None:
        """Take the host off the network: from now on nothing reaches it or leaves it."""
        self._call(self._bridge, "ip", "link", "set", self._links[host], "nomaster")

    def heal(self, host: str) -> None:
        """Take the host into the network again."""
        self._call(self._bridge, "ip", "link", "set", self._links[host], "master", "bridge")

    def rename(self, name: str, host: str) -> None:
        """Let a name be that of another host, for all hosts."""
        self._names[name] = host
        self._write_names()

    def close(self) -> None:
        """Remove hosts and network. Processes that run on them lose it."""
        self._closing.close()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
