"""Measures a step on a network with latency: every task is behind a proxy that delays all bytes.

    python benchmarks/latency.py
    python benchmarks/latency.py --delays 0 2 --peers kerasps "kerasps, overlap" --rounds 3

One worker, one ps, 2 x Dense(64), on the loopback. The peers take turns at each delay, each on a
new cluster. Prints a table in Markdown: milliseconds per step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from proxies import delaying
from run import Configuration, Outcome, machine, measure

# The peer, and its further arguments.
PEERS: dict[str, tuple[str, list[str]]] = {
    "kerasps": ("kerasps", []),
    "kerasps, overlap": ("kerasps", ["--overlap"]),
    "tf_keras + ps": ("tf_keras", []),
}


def measure_behind_proxies(
    peer: str, delay_ms: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the output of `peer.py`, with proxies in front of the worker and the ps."""
    name, extra = PEERS[peer]
    with delaying(delay_ms) as behind_proxies:
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
    """Measure, and print the table; return 1 if steps were lost."""
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
