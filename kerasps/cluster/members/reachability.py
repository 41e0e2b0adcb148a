"""Probes the tasks of a cluster, and waits until all answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from kerasps.checks import time_limit
from kerasps.errors import TaskUnreachableError
from kerasps.runtime.probe import Answer, ask_servers, connection_error
from kerasps.runtime.supervision import tell_supervisor

_LOGGER = logging.getLogger("kerasps")

# Tasks that start together with the coordinator take less; doubled after each message.
_SAY_AFTER_S = 3.0
# Long enough for tasks that a scheduler starts together with the coordinator; short enough for a
# person to wait.
DEFAULT_CONNECT_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_VARIABLE = "KERASPS_CONNECT_TIMEOUT"
# A refused attempt costs less than a millisecond, so ten a second cost almost nothing.
_POLL_INTERVAL_S = 0.1
# A host that drops packets never answers; a handshake across a continent takes a tenth of this.
_ATTEMPT_TIMEOUT_S = 2.0
# The number of threads, which mostly wait: a large cluster has a few hundred tasks.
_MAX_ATTEMPTS = 64


def wait_until_reachable(
    addresses: Mapping[tuple[str, int], str], timeout_s: float | None = None
) -> None:
    """Wait until a gRPC server answers at the address of every task.

    TensorFlow waits for ever, in silence, for a missing task. So the coordinator probes all tasks
    first. After 3, 6, 12 … seconds it logs the tasks that it waits for.

    Args:
        timeout_s: the time limit in seconds for all of them together. None (default) takes
            KERASPS_CONNECT_TIMEOUT, else 60.
    """
    limit = time_limit(
        timeout_s,
        variable=CONNECT_TIMEOUT_VARIABLE,
        default=DEFAULT_CONNECT_TIMEOUT_S,
        argument="connect_timeout",
    )
    began = time.monotonic()
    deadline, say_after = began + limit, _SAY_AFTER_S
    missing = unreachable(addresses, min(limit, _ATTEMPT_TIMEOUT_S))
    while missing and time.monotonic() < deadline:
        waited = time.monotonic() - began
        if waited > say_after:
            say_after *= 2
            _LOGGER.warning(
                "Waiting for %d of %d tasks since %.0f s, for %.0f s at most: %s.",
                len(missing),
                len(addresses),
                waited,
                limit,
                describe_unreachable(addresses, missing),
            )
        time.sleep(min(_POLL_INTERVAL_S, max(0.0, deadline - time.monotonic())))
        left = max(0.01, deadline - time.monotonic())
        missing = unreachable(
            {task: addresses[task] for task in missing}, min(left, _ATTEMPT_TIMEOUT_S)
        )
    if not missing:
        return
    tell_supervisor("absent", *min(missing))
    raise TaskUnreachableError(
        f"{len(missing)} of {len(addresses)} tasks could not be reached within {limit:g} s. "
        "Expected: a server that accepts connections at each address. Received: "
        f"{describe_unreachable(addresses, missing)}. Start `kerasps serve` in these tasks, check "
        "that the addresses are correct and no firewall is in the way, or allow more time with "
        "KERASPS_CONNECT_TIMEOUT (seconds)."
    )


def describe_unreachable(
    addresses: Mapping[tuple[str, int], str], missing: Mapping[tuple[str, int], str]
) -> str:
    """Return text that names each unreachable task, its address and the reason."""
    return ", ".join(
        f"{job} {index} at {addresses[job, index]} ({missing[job, index]})"
        for job, index in missing
    )


def unreachable(
    addresses: Mapping[tuple[str, int], str], timeout_s: float
) -> dict[tuple[str, int], str]:
    """Try to connect to each task once, and return the reason for each one that failed.

    Returns:
        The reason for each task that could not be reached, keyed like `addresses`.
    """
    if not addresses:
        return {}
    # Concurrently, so that a host that drops packets does not delay the others.
    with ThreadPoolExecutor(max_workers=min(len(addresses), _MAX_ATTEMPTS)) as pool:
        errors = list(
            pool.map(lambda address: connection_error(address, timeout_s), addresses.values())
        )
    reasons = {
        task: error.strerror or str(error) or type(error).__name__
        for task, error in zip(addresses, errors, strict=True)
        if error is not None
    }
    # The kernel accepts connections for a stopped process, and any program may listen there.
    accepting = {task: addresses[task] for task in addresses if task not in reasons}
    for task, answer in ask_servers(accepting, timeout_s).items():
        if answer is not Answer.SERVES:
            reasons[task] = f"connected, but {answer.value}"
    return reasons
