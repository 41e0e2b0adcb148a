"""A training, a server that follows it, one who asks: any of them is killed, the others go on."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import kerasps
from support.process_checks import wait_for

SCRIPT = Path(__file__).with_name("served_versions.py")
ROLES = ("train", "serve", "ask")
# Versions of a training that is started again are above those of the one before.
VERSIONS = 100_000


def answers_in(directory):
    """The answers so far: the different versions of each, and the problem of the server."""
    path = directory / "answers"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines if line]


@pytest.mark.parametrize("rounds", [1, pytest.param(4, marks=pytest.mark.matrix)])
def test_no_answer_is_of_mixed_versions_however_they_are_killed(tmp_path, rounds):
    draws = random.Random(rounds)
    kills = [*ROLES] * rounds
    draws.shuffle(kills)
    first, processes = 1, {}

    def start(role):
        processes[role] = subprocess.Popen(
            [sys.executable, str(SCRIPT), role, str(tmp_path), str(first)],
            stdout=subprocess.DEVNULL,
            env={**sys_path_of_tests(), "TF_CPP_MIN_LOG_LEVEL": "3"},
        )

    def wait_for_answers(of_version, count):
        """Waits for so many answers of this version or later ones."""

        def are_there():
            assert all(processes[role].poll() is None for role in ROLES)
            found = [versions for versions, _ in answers_in(tmp_path)]
            return sum(versions[-1] >= of_version for versions in found) >= count

        wait_for(are_there, f"{count} answers of version {of_version}")

    try:
        for role in ROLES:
            start(role)
        wait_for_answers(first + 1, 20)
        for role in kills:
            # So many answers of the newest version by now: an instant that nobody chose.
            newest = max(versions[-1] for versions, _ in answers_in(tmp_path))
            wait_for_answers(newest + 1, draws.randint(1, 30))
            processes[role].kill()
            processes[role].wait()
            if role == "train":
                first += VERSIONS
            if role == "serve":
                (tmp_path / "port").unlink()
            newest = max(versions[-1] for versions, _ in answers_in(tmp_path))
            start(role)
            wait_for_answers(first if role == "train" else newest + 1, 3)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()

    found = answers_in(tmp_path)
    assert [versions for versions, _ in found if len(versions) != 1] == []
    assert [problem for _, problem in found if problem is not None] == []
    assert len({versions[0] for versions, _ in found}) > len(kills)
    # What the killed training left is a chain that a reader takes.
    state = kerasps.serving.State()
    for delta in kerasps.serving.DeltaReader(tmp_path / "deltas").new():
        state.apply(delta)
    ids, rows = state.tables["items/embeddings"]
    assert len(ids) == len(rows) == 2_000
    assert len({*rows.ravel().tolist(), *state.weights["weight/kernel"].ravel().tolist()}) == 1


def sys_path_of_tests():
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    return {**{k: v for k, v in os.environ.items() if k != "TF_CONFIG"}, "PYTHONPATH": path}
