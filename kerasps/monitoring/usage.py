"""The memory and processor time of processes on this machine, from `/proc`."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from kerasps.monitoring.status import ProcessUsage
from kerasps.runtime.addresses import split_address

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
# The system counts processor time in hundredths of a second, too coarse for a shorter interval.
_LEAST_S = 0.5
_LISTENING = "0A"


class UsageMeter:
    """Reads the usage of processes, and the share of the processor since the last reading.

    Thread: any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # For each process: its start, the time of the last reading, its processor time, its share.
        self._known: dict[int, tuple[int, float, float, float]] = {}

    def read(self, pid: int) -> ProcessUsage | None:
        """Return the usage of a process; None if it has ended, or this user may not read it."""
        try:
            # The fields after the name, which may contain spaces and parentheses.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            self._known.pop(pid, None)
            return None
        if fields[0] in "ZX":  # it has ended, and its parent has not reaped it yet
            return None
        began, cpu_seconds = int(fields[19]), (int(fields[11]) + int(fields[12])) / _TICKS
        return ProcessUsage(pid, pages * _PAGE, cpu_seconds, self._share(pid, began, cpu_seconds))

    def _share(self, pid: int, began: int, cpu_seconds: float) -> float:
        now = time.monotonic()
        with self._lock:
            before = self._known.get(pid)
            if before is None or before[0] != began:
                age = time.clock_gettime(time.CLOCK_BOOTTIME) - began / _TICKS
                share = cpu_seconds / age if age > 0 else 0.0
            elif now - before[1] < _LEAST_S:
                return before[3]
            else:
                share = (cpu_seconds - before[2]) / (now - before[1])
            self._known[pid] = began, now, cpu_seconds, max(0.0, share)
            return max(0.0, share)


class Listeners:
    """Finds the processes of this user that listen at addresses of this machine.

    The coordinator knows the tasks of `kerasps launch` and `kerasps serve` only by their addresses.
    Searching `/proc` takes some milliseconds, so this remembers a process until it has ended.
    Thread: any, one at a time.
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, str]] = {}

    def pids(self, addresses: Iterable[str]) -> dict[str, int]:
        """Return the process that listens at each address for which one was found."""
        wanted = [address for address in addresses if not self._is_known(address)]
        inodes = {inode: address for address in wanted for inode in _inodes(address)}
        if inodes:
            for pid, inode in _sockets(inodes):
                self._found.setdefault(inodes[inode], (pid, inode))
        return {address: pid for address, (pid, _) in self._found.items()}

    def _is_known(self, address: str) -> bool:
        if address not in self._found:
            return False
        pid, inode = self._found[address]
        if any(found == inode for _, found in _sockets({inode: address}, [pid])):
            return True
        del self._found[address]
        return False


def _inodes(address: str) -> list[str]:
    """Return the sockets that listen at an address of this machine, by their numbers in `/proc`."""
    host, port = split_address(address)
    host = "127.0.0.1" if host == "localhost" else host
    # TensorFlow's servers listen at `::ffff:127.0.0.1` for 127.0.0.1.
    places = {_in_proc(place) for place in (host, f"::ffff:{host}", "0.0.0.0", "::")} - {""}
    found = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                place, _, number = fields[1].partition(":")
                if fields[3] == _LISTENING and int(number, 16) == port and place in places:
                    found.append(fields[9])
    return found if _is_here(host) else []


def _is_here(host: str) -> bool:
    """Return True if a host is the loopback, or an address of this machine."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False  # a name: resolving it may take seconds
    if address.is_loopback:
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def _in_proc(host: str) -> str:
    """Return an IP address in the format of `/proc/net/tcp`; empty for a name."""
    try:
        packed = ipaddress.ip_address(host).packed
    except ValueError:
        return ""
    words = struct.unpack(f"{'<' if sys.byteorder == 'little' else '>'}{len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words)


def _sockets(
    inodes: Mapping[str, str], pids: Iterable[int] | None = None
) -> Iterable[tuple[int, str]]:
    """Yield the processes that have some of these sockets, each with the socket."""
    if pids is None:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    for pid in pids:
        with contextlib.suppress(OSError):  # another user's, or ended
            for number in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{number}")
                    match = re.fullmatch(r"socket:\[(\d+)\]", target)
                    if match is not None and match[1] in inodes:
                        yield pid, match[1]
