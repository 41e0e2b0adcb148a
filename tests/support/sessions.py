"""The folders of tests that cannot be in one session of pytest."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
# Their tests connect pytest's own process to a cluster, each to one of another kind.
CLUSTERS = ("smoke", "cluster/one_worker", "cluster/two_workers", "cluster/scripts")


def refuse_two_clusters(paths: Iterable[Path]) -> None:
    """Raise `pytest.UsageError` if these files and folders have tests for two clusters."""
    asked = sorted(
        name
        for name in CLUSTERS
        if any(p.is_relative_to(TESTS / name) or (TESTS / name).is_relative_to(p) for p in paths)
    )
    if len(asked) > 1:
        folders = " ".join(f"tests/{name}" for name in asked)
        raise pytest.UsageError(
            "A process connects to one cluster in its life, and these folders need one each. "
            f"Expected: one of them in a session of pytest. Received: {folders}. Run `python "
            f"tests/run.py {folders}`, which has a session for each."
        )
