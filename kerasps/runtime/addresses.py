"""The addresses of tasks: a host and a port."""

from __future__ import annotations

# More digits than any index has; Python refuses to parse a number of thousands of digits.
MAX_DIGITS = 20


def split_address(address: str) -> tuple[str, int]:
    """Split `"host:port"` or `"[ipv6]:port"` into its host, without brackets, and its port.

    Raises:
        ValueError: the address is neither.
    """
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    is_port = (
        port.isascii() and port.isdecimal() and len(port) < MAX_DIGITS and 0 < int(port) < 65536
    )
    is_host = (
        host
        and not any(character.isspace() for character in host)
        and (":" not in host or bracketed)
    )
    if not colon or not is_port or not is_host:
        raise ValueError(f"not an address: {address!r}")
    return (host[1:-1] if bracketed else host), int(port)
