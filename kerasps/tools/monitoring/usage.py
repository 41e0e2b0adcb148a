"""The memory and processor time of processes on this machine."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
import types
from collections.abc import Iterable, Iterator

import psutil

from kerasps.runtime.addresses import split_address
from kerasps.tools.monitoring.status import ProcessUsage

# The system counts processor time in hundredths of a second, too coarse for a shorter interval.
_LEAST_S = 0.5


class UsageMeter:
    """Reads the usage of processes, and the share of the processor since the last reading.

    Thread: any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # For each process: its start, the time of the last reading, its processor time, its share.
        self._known: dict[int, tuple[float, float, float, float]] = {}

    def read(self, pid: int) -> ProcessUsage | None:
        """Return the usage of a process; None if it has ended, or this user may not read it."""
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                has_ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
                began, memory = process.create_time(), process.memory_info().rss
                times = process.cpu_times()
        except (psutil.Error, OSError):
            self._known.pop(pid, None)
            return None
        if has_ended:  # its parent has not reaped it yet
            return None
        cpu_seconds = times.user + times.system
        return ProcessUsage(pid, memory, cpu_seconds, self._share(pid, began, cpu_seconds))

    def _share(self, pid: int, began: float, cpu_seconds: float) -> float:
        now = time.monotonic()
        with self._lock:
            before = self._known.get(pid)
            if before is None or before[0] != began:
                age = time.time() - began
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
    Searching all processes takes some milliseconds, so this remembers a process until it has ended.
    Thread: any, one at a time.
    """

    def __init__(self) -> None:
        self._found: dict[str, psutil.Process] = {}

    def pids(self, addresses: Iterable[str]) -> dict[str, int]:
        """Return the process that listens at each address for which one was found."""
        wanted = [address for address in addresses if not self._is_known(address)]
        if wanted:
            # Those of other users have no process here.
            found = [(place, pid) for place, pid in _listening(psutil, *wanted) if pid is not None]
            for address, pid in found:
                with contextlib.suppress(psutil.Error):
                    self._found.setdefault(address, psutil.Process(pid))
        return {address: process.pid for address, process in self._found.items()}

    def _is_known(self, address: str) -> bool:
        process = self._found.get(address)
        if process is None:
            return False
        with contextlib.suppress(psutil.Error, OSError):
            if process.is_running() and list(_listening(process, address)):
                return True
        del self._found[address]
        return False


def _listening(
    source: types.ModuleType | psutil.Process, *addresses: str
) -> Iterator[tuple[str, int | None]]:
    """Yield the given addresses at which a process listens, with its id if psutil knows it."""
    places: dict[tuple[str, int], str] = {}
    for address in addresses:
        host, port = split_address(address)
        host = "127.0.0.1" if host == "localhost" else host
        if _is_here(host):
            # TensorFlow's servers listen at `::ffff:127.0.0.1` for 127.0.0.1.
            for place in (host, f"::ffff:{host}", "0.0.0.0", "::"):
                places.setdefault((place, port), address)
    for found in source.net_connections("tcp") if places else ():
        asked = places.get((found.laddr.ip, found.laddr.port)) if found.laddr else None
        if asked is not None and found.status == psutil.CONN_LISTEN:
            yield asked, getattr(found, "pid", None)


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
