"""Where a server listens: the address that is chosen, and how `bind` is held to it.

Python's own sockets call `bind` as TensorFlow does, through a slot of their library, so they show
what becomes of each kind of call.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import random
import re
import socket
import struct
import threading
from pathlib import Path

import pytest
import tensorflow as tf

from kerasps.cluster.description.cluster_description import ClusterDescription
from kerasps.cluster.serving import bind
from kerasps.cluster.serving.bind import listening_on
from kerasps.cluster.serving.listen_address import (
    coordinator_listen_address,
    leads_here,
    listen_address,
)
from kerasps.errors import ClusterConfigError, TaskStartError
from kerasps.runtime import linkage
from kerasps.runtime.linkage import Slot, UnknownLayoutError, find_slots

# Where Python's sockets are: a module of its own, or within the interpreter.
PYTHON = re.compile(r"^(_socket\.|libpython|python)")
REAL_BIND = ctypes.cast(ctypes.CDLL(None).bind, ctypes.c_void_p).value
HAS_IPV6 = Path("/proc/net/if_inet6").exists()
# Of RFC 5737: addresses that no machine has.
NOWHERE = "198.51.100.7"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def bound(family, address, port):
    with socket.socket(family) as bound:
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind((address, port))
        return bound.getsockname()[0]


def code_of(path):
    """The parts of memory that hold the code of a file, as the kernel lists them."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_, name = line.split()
        if name == path and "x" in permissions:
            yield range(*(int(bound, 16) for bound in span.split("-")))


def test_the_installed_library_has_a_slot_that_leads_to_the_systems_bind():
    slots = find_slots("bind", bind.LIBRARIES)
    folder = str(Path(tf.__file__).parent)
    assert slots
    for slot in slots:
        assert slot.library.startswith(folder)
        unresolved = any(slot.read() in code for code in code_of(slot.library))
        assert unresolved == slot.is_unresolved()
        assert unresolved or slot.read() == REAL_BIND


def test_a_slot_is_the_one_of_its_function():
    """Every function that Python's sockets call has one, and each leads to its own."""
    library = ctypes.CDLL(None)
    for name in ("bind", "listen", "accept4", "getsockname"):
        (slot,) = find_slots(name, PYTHON)
        function = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        assert slot.is_unresolved() or slot.read() == function
    assert find_slots("bind_no_such_function", PYTHON) == []
    assert find_slots("bind", re.compile("no such library")) == []


def test_a_bind_of_the_port_to_all_addresses_is_held_to_one():
    port, other = free_port(), free_port()
    before = [slot.read() for slot in find_slots("bind", PYTHON)]
    with listening_on("127.0.0.1", port, PYTHON):
        assert bound(socket.AF_INET, "0.0.0.0", port) == "127.0.0.1"
        assert bound(socket.AF_INET, "127.0.0.2", port) == "127.0.0.2"
        assert bound(socket.AF_INET, "0.0.0.0", other) == "0.0.0.0"
        assert bound(socket.AF_INET, "0.0.0.0", 0) == "0.0.0.0"
        if HAS_IPV6:
            assert bound(socket.AF_INET6, "::", port) == "::ffff:127.0.0.1"
            assert bound(socket.AF_INET6, "::ffff:0.0.0.0", port) == "::ffff:127.0.0.1"
            assert bound(socket.AF_INET6, "::", other) == "::"
    assert bound(socket.AF_INET, "0.0.0.0", port) == "0.0.0.0"
    assert [slot.read() for slot in find_slots("bind", PYTHON)] == before


@pytest.mark.skipif(not HAS_IPV6, reason="this system has no IPv6")
def test_an_ipv6_address_is_held_and_never_opens_ipv4():
    port = free_port()
    with listening_on("::1", port, PYTHON):
        assert bound(socket.AF_INET6, "::", port) == "::1"
        with pytest.raises(OSError, match=os.strerror(errno.EADDRNOTAVAIL)):
            bound(socket.AF_INET, "0.0.0.0", port)


def test_errors_of_other_binds_are_the_systems_own(tmp_path):
    port = free_port()
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        listening_on("127.0.0.1", port, PYTHON),
    ):
        with pytest.raises(OSError, match=os.strerror(errno.EADDRINUSE)):
            bound(socket.AF_INET, "127.0.0.1", taken.getsockname()[1])
        with pytest.raises(OSError, match=os.strerror(errno.EADDRNOTAVAIL)):
            bound(socket.AF_INET, NOWHERE, port)
        with socket.socket(socket.AF_UNIX) as local:
            local.bind(str(tmp_path / "socket"))
            assert local.getsockname() == str(tmp_path / "socket")
        with socket.socket(socket.AF_UNIX) as local, pytest.raises(FileNotFoundError):
            local.bind(str(tmp_path / "none" / "socket"))
        bound(socket.AF_INET, "0.0.0.0", port)


def test_held_in_one_thread_after_the_other():
    """Each server gets its own address, and the library is as it was when the last one has it."""
    ports = [free_port() for _ in range(8)]
    found = {}

    def hold(index, port):
        with listening_on(f"127.0.0.{index + 1}", port, PYTHON):
            found[index] = bound(socket.AF_INET, "0.0.0.0", port)

    threads = [threading.Thread(target=hold, args=case) for case in enumerate(ports)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {index: f"127.0.0.{index + 1}" for index in range(8)}
    assert bound(socket.AF_INET, "0.0.0.0", ports[0]) == "0.0.0.0"


def test_all_addresses_are_left_as_they_are():
    port = free_port()
    with listening_on(None, port, PYTHON):
        assert bound(socket.AF_INET, "0.0.0.0", port) == "0.0.0.0"


# What is in the way


def error_of(port, **options):
    """What a server is told that would listen on all addresses; it does not start."""
    with (
        pytest.raises(TaskStartError) as caught,
        listening_on("127.0.0.1", port, **options),
    ):
        raise AssertionError("the server would start")
    return str(caught.value)


def test_without_a_library_no_server_starts():
    port = free_port()
    text = error_of(port, libraries=re.compile("no such library"))
    assert text == (
        f"The server cannot be held to 127.0.0.1, and port {port} would be open on every network "
        "interface: anyone who reaches it can read and write files as this user. Expected: a "
        "library of TensorFlow whose call of `bind` can be changed. Received: no library of "
        "TensorFlow in this process calls `bind`. If all may reach the port, or a firewall "
        "protects it, set the environment variable KERASPS_BIND to 0.0.0.0. If the server listens "
        "already, end this process."
    )


@pytest.mark.parametrize("libraries", [re.compile("no such library"), PYTHON])
def test_where_all_may_reach_the_port_it_is_a_warning(monkeypatch, libraries):
    monkeypatch.setenv("KERASPS_BIND", "0.0.0.0")
    began = False
    with (
        pytest.warns(RuntimeWarning, match="would be open on every network interface"),
        listening_on("127.0.0.1", free_port(), libraries),
    ):
        began = True
    assert began


def test_a_server_that_never_binds_the_port_is_an_error():
    with (
        pytest.raises(TaskStartError, match="Received: the server did not call it"),
        listening_on("127.0.0.1", free_port(), PYTHON),
    ):
        pass


def test_nothing_hides_the_error_of_a_server():
    with (
        pytest.raises(ZeroDivisionError),
        listening_on("127.0.0.1", free_port(), PYTHON),
    ):
        raise ZeroDivisionError


@pytest.fixture
def foreign_bind():
    """Another program's function in the slots of Python's sockets, as a tracer puts it there."""

    @bind._FUNCTION
    def pass_on(*arguments):
        return bind._real_bind(*arguments)

    slots = find_slots("bind", PYTHON)
    before = [slot.read() for slot in slots]
    for slot in slots:
        slot.write(ctypes.cast(pass_on, ctypes.c_void_p).value)
    yield
    for slot, value in zip(slots, before, strict=True):
        slot.write(value)


def test_a_slot_that_somebody_else_has_taken_is_left_to_them(foreign_bind):
    before = [slot.read() for slot in find_slots("bind", PYTHON)]
    text = error_of(free_port(), libraries=PYTHON)
    assert "its `bind` is not that of the system" in text
    assert [slot.read() for slot in find_slots("bind", PYTHON)] == before


def read_only_slot(file, prot):
    """A slot in a page that may not be written to, and the memory that it is in."""
    file.write_bytes(struct.pack("<Q", REAL_BIND).ljust(mmap.PAGESIZE, b"\0"))
    with file.open("rb") as opened:
        flags = mmap.MAP_PRIVATE if prot == "private" else mmap.MAP_SHARED
        memory = mmap.mmap(opened.fileno(), mmap.PAGESIZE, flags=flags, prot=mmap.PROT_READ)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(file)):
            return Slot(str(file), int(line.split("-")[0], 16), False, ()), memory
    raise AssertionError(file)


def test_a_slot_that_the_loader_made_read_only_is_written_and_stays_read_only(tmp_path):
    slot, memory = read_only_slot(tmp_path / "library.so", "private")
    slot.write(1)
    assert (slot.read(), memory[:8]) == (1, struct.pack("<Q", 1))
    (line,) = (
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(tmp_path / "library.so"))
    )
    assert line.split()[1] == "r--p"


def test_a_slot_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    slot, memory = read_only_slot(tmp_path / "library.so", "shared")
    assert slot.read() == REAL_BIND
    monkeypatch.setattr(bind, "find_slots", lambda *args: [slot])
    assert "memory cannot be made writable" in error_of(free_port())
    assert struct.unpack("<Q", memory[:8]) == (REAL_BIND,)


def test_a_system_that_does_not_list_its_memory_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(linkage, "_MAPS", tmp_path / "maps")
    assert f"{tmp_path}/maps cannot be read" in error_of(free_port())


def test_damaged_libraries_are_refused_and_end_nothing(tmp_path):
    """Files of another layout, mapped under the name of a library; a wrong read would crash."""
    (real,) = find_slots("bind", PYTHON)
    original = Path(real.library).read_bytes()[: 1 << 20]
    chance = random.Random(12)
    num_read = 0
    for number in range(200):
        image = bytearray(original)
        # In the headers, or in the tables that they lead to.
        for _ in range(chance.choice((0, 1, 4, 64))):
            reach = chance.choice((64, 1024, len(image)))
            image[chance.randrange(6, reach)] = chance.randrange(256)
        file = tmp_path / f"damaged-{number}.so"
        file.write_bytes(image[: chance.choice((64, 4096, len(image)))])
        with file.open("rb") as opened:
            memory = mmap.mmap(
                opened.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC
            )
        with contextlib.suppress(UnknownLayoutError):
            find_slots("bind", re.compile(re.escape(file.name)))
            num_read += 1
        memory.close()
        file.unlink()
    assert num_read < 100


# Which address


def described(address, others=("127.0.0.1:1", "127.0.0.1:2"), task_type="worker"):
    worker, chief = (address, others[0]) if task_type == "worker" else (others[0], address)
    return ClusterDescription(
        {"chief": (chief,), "worker": (worker,), "ps": (others[1],)}, task_type, 0
    )


REMOTE = (f"{NOWHERE}:1", f"{NOWHERE}:2")


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.5", "127.0.0.5"),
        ("localhost", "127.0.0.1"),
        ("0.0.0.0", None),
        ("[::]", None),
        pytest.param(
            "[::1]", "::1", marks=pytest.mark.skipif(not HAS_IPV6, reason="there is no IPv6")
        ),
        # As a name that only this machine knows: it means the loopback.
        ("127.1", "127.0.0.1"),
    ],
)
def test_a_task_listens_where_its_own_entry_says(host, address):
    assert listen_address(described(f"{host}:2222")) == address


@pytest.mark.parametrize(
    ("host", "received"),
    [
        (NOWHERE, NOWHERE),
        ("no-such-host.invalid", "a name that has no known address"),
        # Others cannot reach it there: what it means to them is another address.
        ("127.1", "127.0.0.1"),
    ],
)
def test_a_task_whose_entry_is_no_address_of_this_machine_does_not_start(host, received):
    for listens in (listen_address, coordinator_listen_address):
        with pytest.raises(ClusterConfigError) as caught:
            listens(described(f"{host}:2222", REMOTE))
        assert str(caught.value) == (
            "worker 0 does not start, since it would listen on every network interface. Expected: "
            f"its host in the cluster's description, {host!r}, to be an address of this machine "
            f"that the other tasks can reach. Received: {received}. Correct the entry, or set the "
            "address to listen on, with `kerasps serve --bind ADDRESS` or the environment variable "
            "KERASPS_BIND. 0.0.0.0 stands for all: then anyone who reaches the port can read and "
            "write files as this user."
        )


def test_an_address_that_is_asked_for_beats_the_entry():
    remote = described(f"{NOWHERE}:2222", REMOTE)
    assert listen_address(remote, "127.0.0.3") == "127.0.0.3"
    assert listen_address(remote, "localhost") == "127.0.0.1"
    assert listen_address(remote, "0.0.0.0") is None
    assert listen_address(remote, "::") is None
    assert listen_address(remote, "*") is None


@pytest.mark.parametrize("bind_to", [NOWHERE, "no-such-host.invalid", "10.0.0.1:2222", ""])
def test_an_address_that_is_asked_for_must_be_one(bind_to):
    with pytest.raises(ClusterConfigError) as caught:
        listen_address(described("127.0.0.1:2222"), bind_to)
    assert str(caught.value) == (
        "The address to listen on is not one of this machine. Expected: a host name or an IP "
        f"address of this machine, or 0.0.0.0 for all. Received: {bind_to!r}. `ip address` lists "
        "them."
    )


def test_the_environment_says_where_a_coordinator_listens(monkeypatch):
    remote = described("127.0.0.1:2222", REMOTE, "chief")
    monkeypatch.setenv("KERASPS_BIND", "127.0.0.9")
    assert coordinator_listen_address(remote) == "127.0.0.9"
    monkeypatch.setenv("KERASPS_BIND", "0.0.0.0")
    assert coordinator_listen_address(described("host.invalid:1", REMOTE, "chief")) is None
    monkeypatch.setenv("KERASPS_BIND", "")
    assert coordinator_listen_address(remote) == "127.0.0.1"


def test_the_environment_opens_no_cluster_that_is_on_the_loopback(monkeypatch):
    monkeypatch.setenv("KERASPS_BIND", "0.0.0.0")
    assert coordinator_listen_address(described("127.0.0.1:1", task_type="chief")) == "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "is_here"), [("127.0.0.1", True), ("192.0.2.1", False), ("host.invalid", None)]
)
def test_a_host_leads_here_elsewhere_or_nowhere(host, is_here):
    assert leads_here(host) is is_here
