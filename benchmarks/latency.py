"""Measures a step where the network has a latency: every task behind a proxy that delays all bytes.

    python benchmarks/latency.py
    python benchmarks/latency.py --delays 0 2 --peers kerasps "kerasps, overlap" --rounds 3

One worker, one ps, 2 x Dense(64), on the loopback. Each peer takes its turn at each delay, on a
cluster of its own. Prints a table in Markdown: milliseconds per step.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import queue
import socket
import statistics
import sys
import threading
import time
from typing import Any

from run import Configuration, Outcome, machine, measure

# The peer, and its further arguments.
PEERS: dict[str, tuple[str, list[str]]] = {
    "kerasps": ("kerasps", []),
    "kerasps, overlap": ("kerasps", ["--overlap"]),
    "tf_keras + ps": ("tf_keras", []),
}
_CHUNK = 2**18


class Proxy:
    """Hands on what comes to a port of its own, in both directions, after a delay.

    It does not limit how much is on the way. Ends with the process.

    Args:
        target: the address of a task.
        delay_s: seconds each way.
    """

    def __init__(self, target: str, delay_s: float) -> None:
        host, _, port = target.rpartition(":")
        self._target = host.strip("[]"), int(port)
        self._delay_s = delay_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        _start(self._accept)

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.close()  # as the task itself would refuse
                    continue
                for one, other in ((near, far), (far, near)):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                    _start(self._receive, one, waiting)
                    _start(self._send, waiting, other)

    def _receive(self, source: socket.socket, waiting: Any) -> None:
        data = b"?"
        while data:
            try:
                data = source.recv(_CHUNK)
            except OSError:
                data = b""
            waiting.put((time.monotonic() + self._delay_s, data))

    def _send(self, waiting: Any, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = waiting.get()
                time.sleep(max(0.0, due - time.monotonic()))
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)


def _start(function: Any, *arguments: Any) -> None:
    threading.Thread(target=function, args=arguments, daemon=True).start()


def measure_behind_proxies(
    peer: str, delay_ms: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Return what `peer.py` printed, with proxies in front of the worker and the ps."""
    name, extra = PEERS[peer]
    with contextlib.ExitStack() as stack:

        def behind_proxies(tf_config: dict[str, Any]) -> dict[str, Any]:
            changed = copy.deepcopy(tf_config)
            for job in ("worker", "ps"):
                proxies = [Proxy(a, delay_ms / 1000) for a in changed["cluster"][job]]
                for proxy in proxies:
                    stack.callback(proxy.close)
                changed["cluster"][job] = [proxy.address for proxy in proxies]
            return changed

        return measure(
            Configuration("mlp2", options.steps_per_execution, 1, name),
            "--steps-per-epoch",
            str(options.steps_per_epoch),
            *extra,
            epochs=options.epochs,
            limit=600.0,
            reached_by=behind_proxies,
        )


def main() -> int:
    """Measure, and print the table; return 1 where steps were lost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--delays", nargs="+", type=float, default=[0, 1, 5], help="ms each way")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--steps-per-execution", type=int, default=10)
    parser.add_argument("--steps-per-epoch", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=3, help="epochs that are timed, per round")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    # A thread that hands on does little, and another waits for it.
    sys.setswitchinterval(1e-4)
    outcomes = {(peer, delay): Outcome() for delay in options.delays for peer in options.peers}
    for _ in range(options.rounds):
        for (peer, delay), outcome in outcomes.items():
            result = measure_behind_proxies(peer, delay, options)
            outcome.milliseconds += result["milliseconds_per_step"]
            outcome.versions = {"tensorflow": result["tensorflow"], PEERS[peer][0]: result["keras"]}
            if result["counted_steps"] != result["steps"]:
                outcome.problems.append(f"counted {result['counted_steps']} of {result['steps']}")
            median = statistics.median(result["milliseconds_per_step"])
            print(f"{delay:g} ms each way, {peer}: {median:.2f}", file=sys.stderr, flush=True)
    print("\n".join(table(options, outcomes)))
    print(f"\n{machine(outcomes.values())}")
    return int(any(outcome.problems for outcome in outcomes.values()))


def table(options: argparse.Namespace, outcomes: dict[tuple[str, float], Outcome]) -> list[str]:
    """Return the rows of a table in Markdown, one for each delay."""
    return [
        f"| ms each way | {' | '.join(options.peers)} |",
        f"| ---: {'| ---: ' * len(options.peers)}|",
        *(
            f"| {delay:g} | {' | '.join(str(outcomes[peer, delay]) for peer in options.peers)} |"
            for delay in options.delays
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
