"""A strategy with one of TensorFlow's own partitioners: bare `tf.Variable`s and Keras's are split,
a model trains as ever.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.process_checks import run_and_report

SCRIPT = Path(__file__).with_name("partitioned_training.py")
PS = ["/job:ps/replica:0/task:0/device:CPU:0", "/job:ps/replica:0/task:1/device:CPU:0"]


@pytest.fixture(
    scope="module", params=[pytest.param("fixed", marks=pytest.mark.matrix), "min_size"]
)
def partitioner(request):
    return request.param


@pytest.fixture(scope="module")
def report(once, partitioner):
    return once(f"partitioner-{partitioner}", lambda: run_and_report(SCRIPT, partitioner))


def test_a_keras_model_equals_plain_keras(report):
    assert report["difference_before"] == 0.0
    assert report["learned"] > 0.05
    assert report["difference"] < 1e-5
    assert report["optimizer_difference"] < 1e-5
    assert report["loss_difference"] < 1e-5
    assert report["iterations"] == 20


def test_keras_variables_are_split_as_the_partitioner_says(report, partitioner):
    shards = {
        "fixed": [[[2, 8], [2, 8]], [[4], [4]], [[4, 1], [4, 1]], [[1]]],
        "min_size": [[[2, 8], [2, 8]], [[8]], [[8, 1]], [[1]]],
    }[partitioner]
    weights = report["weights"]
    assert [weight["shapes"] for weight in weights] == shards
    assert all(len(set(weight["devices"])) == len(weight["devices"]) for weight in weights)
    assert {device for weight in weights for device in weight["devices"]} == set(PS)


@pytest.mark.parametrize("name", ["table", "lazy"])
def test_a_bare_variable_is_split_over_the_ps_and_has_its_value(report, name):
    variable = report[name]
    assert (variable["type"], variable["shapes"]) == ("ShardedVariable", [[5, 3], [5, 3]])
    assert sorted(variable["devices"]) == PS
    assert variable["value_is_right"]


def test_a_sharded_variable_can_be_assigned_and_looked_up(report):
    assert report["table"]["takes_values"]
    assert report["table"]["rows"] == [[1.0, 2.0, 3.0], [28.0, 29.0, 30.0]]


def test_shards_are_in_the_placement(report):
    assert sorted(report["placed"]) == [["table/part_0:0"], ["table/part_1:0"]]


def test_the_partitioner_decides_what_is_split(report, partitioner):
    shards = {"fixed": [[1, 3], [1, 3]], "min_size": [[2, 3]]}[partitioner]
    assert report["small"]["shapes"] == shards


def test_a_second_strategy_with_another_partitioner_is_refused_and_leaves_the_first(report):
    kind, text = report["second_strategy"]
    assert kind == "ValueError"
    assert (
        "Argument `variable_partitioner` differs from that of the strategy which this process has"
        in text
    )
    assert "Received: variable_partitioner=None." in text
    assert report["first_still_trains"] == 1
