"""Chooses the address of this machine that a task's server listens on.

It is the address that the other tasks use: the host of the task's entry in the cluster's
description. That host may be a name, which may resolve differently elsewhere. Only an address that
this machine has, and that the other tasks can reach, is used. If there is none, the server does not
start, unless it is told to listen on all addresses.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Mapping
from typing import Any

from kerasps.cluster.description.cluster_description import ClusterDescription, is_loopback
from kerasps.errors import ClusterConfigError
from kerasps.runtime.addresses import split_address

# A family, and a socket address of that family as `bind` takes it.
_Address = tuple[int, Any]

BIND_VARIABLE = "KERASPS_BIND"
_HOW = (
    "Correct the entry, or set the address to listen on, with `kerasps serve --bind ADDRESS` or "
    f"the environment variable {BIND_VARIABLE}. 0.0.0.0 stands for all: then anyone who reaches "
    "the port can read and write files as this user."
)


def listen_address(description: ClusterDescription, bind: str | None = None) -> str | None:
    """Return the IP address that the server of this task must listen on, None for all addresses.

    Args:
        bind: a host name or an IP address of this machine; `0.0.0.0`, `::` and `*` stand for all.
            None (default) takes the host of the task's entry.
    """
    if bind is not None:
        return _asked_for(bind)
    host, _ = split_address(str(description.address))
    if _is_unspecified(host):
        return None
    found = _addresses(host)
    local = [address for address in found if _is_of_this_machine(address)]
    if not is_loopback(host) and not _all_are_here(description, host):
        # On Debian, a machine resolves its name to 127.0.1.1; other machines do not.
        local = [address for address in local if not is_loopback(_text(address))]
    if local:
        return _text(_best(local))
    received = _text_of_all(found) or "a name that has no known address"
    raise ClusterConfigError(
        f"{description.task_type} {description.task_index} does not start, since it would listen "
        f"on every network interface. Expected: its host in the cluster's description, {host!r}, "
        f"to be an address of this machine that the other tasks can reach. Received: {received}. "
        f"{_HOW}"
    )


def is_of_this_machine(address: str, hostname: str) -> bool:
    """Return whether the host of an address is this machine."""
    try:
        host, _ = split_address(address)
    except ValueError:
        return False
    if host.partition(".")[0] == hostname.partition(".")[0] and not _is_ip(host):
        return True
    return bool(leads_here(host))


def leads_here(host: str) -> bool | None:
    """Return whether an address of a host is this machine's; None if the host has no address."""
    found = _addresses(host)
    return any(_is_of_this_machine(address) for address in found) if found else None


def may_listen_on_all() -> bool:
    """Return whether the environment allows servers to listen on all addresses."""
    return _is_all(os.environ.get(BIND_VARIABLE, ""))


def coordinator_listen_address(
    cluster: ClusterDescription, environ: Mapping[str, str] = os.environ
) -> str | None:
    """Return the IP address that the coordinator's server must listen on, None for all.

    Like `listen_address`, with the environment variable KERASPS_BIND as the argument `bind`. If the
    whole cluster is on the loopback, the variable is ignored: it is meant for the machine's network
    addresses.
    """
    host, _ = split_address(str(cluster.address))
    is_local = cluster.is_on_one_machine and is_loopback(host)
    return listen_address(cluster, None if is_local else environ.get(BIND_VARIABLE) or None)


def _asked_for(bind: str) -> str | None:
    if _is_all(bind):
        return None
    found = _addresses(bind)
    local = [address for address in found if _is_of_this_machine(address)]
    if local:
        return _text(_best(local))
    received = f"{bind!r}"
    if _text_of_all(found) not in ("", bind):
        received += f" ({_text_of_all(found)})"
    raise ClusterConfigError(
        "The address to listen on is not one of this machine. Expected: a host name or an IP "
        f"address of this machine, or 0.0.0.0 for all. Received: {received}. `ip address` lists "
        "them."
    )


def _all_are_here(description: ClusterDescription, host: str) -> bool:
    """Return whether all tasks are certainly on the machine that `host` names."""
    hosts = {split_address(address)[0] for address in description.addresses.values()}
    return all(other == host or is_loopback(other) for other in hosts)


def _is_all(bind: str) -> bool:
    # Check for `*` first: some resolvers treat it as a name.
    return bind == "*" or _is_unspecified(bind)


def _is_ip(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def _is_unspecified(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_unspecified
    return False


def _addresses(host: str) -> list[_Address]:
    """Return the socket addresses of a host; none if its name cannot be resolved."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [(family, address) for family, _, _, _, address in found]


def _is_of_this_machine(address: _Address) -> bool:
    # A socket can bind only to an address that the machine has.
    family, place = address
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True


def _best(addresses: list[_Address]) -> _Address:
    # A server has one socket, and a client tries all addresses of a name in turn. A machine that
    # others reach only over IPv4 is more common than one that they reach only over IPv6.
    return min(
        addresses,
        key=lambda address: (is_loopback(_text(address)), address[0] != socket.AF_INET),
    )


def _text(address: _Address) -> str:
    """Return the IP address as text, with the scope of a link-local address."""
    _, place = address
    return socket.getnameinfo(place, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]


def _text_of_all(addresses: list[_Address]) -> str:
    return ", ".join(map(_text, addresses))
