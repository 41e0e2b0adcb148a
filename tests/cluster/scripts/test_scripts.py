"""Scripts in the manner of Keras's published examples and guides give under a strategy what they
give under plain Keras.

A script ends with `counts`, which must be the same, and `figures`: name to value and by how much it
may differ, since two workers do not update the weights in the order of one process. That order is
luck: a figure is wrong if it is too far off each time that the script runs. What must hold in
either is an `assert` in the script.
"""

from __future__ import annotations

import keras
import pytest

from support import scripts
from support.compare import MAX_ATTEMPTS

NAMES = sorted(path.stem for path in scripts.PLAIN.glob("*.py"))

# With their variables of 256 bytes or more in two shards.
SHARDED = {
    "feature_space",
    "image_classification",
    "timeseries",
    "transfer_learning",
    "two_towers",
}

# What kerasps says, and plain Keras has no reason to.
EXPECTED_WARNINGS = {"metric_learning": {"x, of type AnchorPositivePairs, lives in"}}


@pytest.mark.parametrize("name", NAMES)
def test_a_script_gives_what_it_gives_in_plain_keras(name, cluster, tmp_path):
    source = (scripts.PLAIN / f"{name}.py").read_text()
    plain = scripts.run(source, tmp_path / "plain")
    off = []
    for attempt in range(MAX_ATTEMPTS):
        keras.config.set_dtype_policy("float32")
        ours = scripts.run_on_cluster(
            source, tmp_path / f"ours{attempt}", cluster, num_shards=2 if name in SHARDED else 1
        )
        assert ours["warnings"] <= plain["warnings"] | EXPECTED_WARNINGS.get(name, set())
        assert ours["counts"] == plain["counts"]
        assert ours["figures"].keys() == plain["figures"].keys()
        off.append(
            {
                figure: (value, plain["figures"][figure][0])
                for figure, (value, tolerance) in ours["figures"].items()
                if value != pytest.approx(plain["figures"][figure][0], abs=tolerance)
            }
        )
        if not off[-1]:
            return
    pytest.fail(f"figures under the strategy and in plain Keras, {MAX_ATTEMPTS} times: {off}")


@pytest.mark.parametrize("name", NAMES)
def test_three_lines_are_changed(name):
    source = (scripts.PLAIN / f"{name}.py").read_text()
    expected = [f"+ {line}" for line in (scripts.IMPORT, scripts.STRATEGY, scripts.SCOPE)]
    assert scripts.changed_lines(source, scripts.with_strategy(source)) == expected
