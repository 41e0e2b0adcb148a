"""Asks a run for its status repeatedly, and shows it in the terminal."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from rich.console import Console
from rich.live import Live

from kerasps.errors import KeraspsError
from kerasps.runtime.addresses import split_address
from kerasps.tools.cli.live.running import RunNotFoundError, chosen_run
from kerasps.tools.cli.live.top_view import view
from kerasps.tools.monitoring.sockets import ask_running
from kerasps.tools.monitoring.status import Fields, status_of

# The share of the CPU is measured between two requests.
_BETWEEN_S = 0.6
_HTTP_S = 5.0
_MAX_BYTES = 2**26

_ELSEWHERE = ", or name the host:port of a `kerasps.ClusterMonitor(port=...)` on another machine"

Ask = Callable[[], Fields]


class RunEndedError(KeraspsError):
    """The run that was shown has ended."""


def show(target: str | None, *, once: bool, as_json: bool, interval_s: float) -> int:
    """Show a run until it ends, or until Ctrl-C.

    Args:
        target: the process id, or the `"host:port"` of a `ClusterMonitor`. None: the only run of
            this user on this machine.
        once: whether to show it once. This also holds if the output is not a terminal.
    """
    ask = _chosen(target)
    console = Console()
    reply = ask()
    if once or as_json or not console.is_terminal:
        time.sleep(_BETWEEN_S)
        reply = ask()
        if as_json:
            print(json.dumps(reply))
        elif console.is_terminal:
            console.print(view(reply, console.width))
        else:
            print(status_of(reply["status"]))
        return 0
    return _watch(ask, reply, console, interval_s)


def _watch(ask: Ask, reply: Fields, console: Console, interval_s: float) -> int:
    with contextlib.suppress(KeyboardInterrupt):
        try:
            with Live(view(reply, console.width), console=console, auto_refresh=False) as live:
                while True:
                    time.sleep(interval_s)
                    live.update(view(ask(), console.width), refresh=True)
        except RunEndedError as exc:
            print(f"kerasps top: {exc}", file=sys.stderr)
    return 0


def _chosen(target: str | None) -> Ask:
    """Return a function that asks the run that `target` names."""
    if target is None or target.isdecimal():
        pid = None if target is None else int(target)
        return _of_process(chosen_run("kerasps top", pid, advice=_ELSEWHERE).pid)
    return _of_address(target)


def _of_process(pid: int) -> Ask:
    def ask() -> Fields:
        found = ask_running(pid)
        if not found:
            raise RunEndedError(f"process {pid} has ended, or has left its cluster")
        return _checked(found[0].reply, f"process {pid}")

    return ask


def _of_address(target: str) -> Ask:
    address = target.removeprefix("http://").rstrip("/")
    try:
        split_address(address)
    except ValueError:
        raise RunNotFoundError(
            "Not a process id or an address. Expected: a number, or the host:port of a "
            f"`kerasps.ClusterMonitor(port=...)`. Received: {target!r}. Give one like 4711 or "
            "127.0.0.1:9090."
        ) from None
    has_answered = False

    def ask() -> Fields:
        nonlocal has_answered
        # Without a proxy: the environment's proxies are for the web; this may be the loopback.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://{address}/status", timeout=_HTTP_S) as response:
                reply = json.loads(response.read(_MAX_BYTES))
        except (OSError, ValueError, http.client.HTTPException) as exc:
            reason = exc.reason if isinstance(exc, urllib.error.URLError) else exc
            if has_answered:
                raise RunEndedError(f"{address} does not answer any more ({reason})") from None
            raise RunNotFoundError(
                f"No run answers at {address}. Expected: a `kerasps.ClusterMonitor` whose `fit` "
                f"runs. Received: {reason}. Check the host and the port; a monitor listens on "
                "the loopback unless its `host` says otherwise, and only while `fit` runs."
            ) from None
        has_answered = True
        return _checked(reply, address)

    return ask


def _checked(reply: object, source: str) -> Fields:
    """Return a reply that holds a status."""
    if not isinstance(reply, dict) or "status" not in reply:
        error = reply.get("error", reply) if isinstance(reply, dict) else reply
        raise RunNotFoundError(
            f"There is no status at {source}. Expected: the status of a run, as JSON. Received: "
            f"{error!r}. Try again; if it persists, the run has another version of kerasps."
        )
    try:
        status_of(reply["status"])
    except (KeyError, TypeError, ValueError) as exc:
        raise RunNotFoundError(
            f"The status at {source} is not one that this version can read. Expected: the fields "
            f"of `kerasps.RunStatus`. Received: {type(exc).__name__}: {exc}. Use the version of "
            "kerasps that the run has."
        ) from exc
    return reply
