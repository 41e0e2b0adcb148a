"""Which ps holds what, and which takes the next variable."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import kerasps
from kerasps.variables.placing.placement import RUN_BYTES, SMALL_BYTES, PlacementLedger

LARGE = SMALL_BYTES + 1


class RemoteVariable:
    """What the ledger looks at in a `tf.Variable` on a ps."""

    def __init__(self, ps, shape, dtype="float32", name="v", device=None):
        self.device = f"/job:ps/replica:0/task:{ps}/device:CPU:0" if device is None else device
        self.shape = shape
        self.dtype = type("DType", (), {"size": np.dtype(dtype).itemsize})
        self.name = name


def ledger_of(*variables, num_ps=2):
    ledger = PlacementLedger(num_ps)
    for variable in variables:
        ledger.add(variable, is_placed=True)
    return ledger


def placed(ledger, num_bytes, name="v"):
    """Add a variable of so many bytes where the ledger says; return it."""
    variable = RemoteVariable(ledger.place(num_bytes), (num_bytes,), "int8", name)
    ledger.add(variable, is_placed=True)
    return variable


def ps_of(*variables):
    return [int(variable.device.partition("task:")[2].partition("/")[0]) for variable in variables]


def test_each_ps_tells_its_variables_and_bytes():
    held = [
        RemoteVariable(0, (10, 3), name="kernel"),
        RemoteVariable(1, (), "int64", name="counter"),
        RemoteVariable(0, (3,)),
    ]
    placement = ledger_of(*held).placement()
    assert list(placement) == [
        kerasps.TaskPlacement("/job:ps/replica:0/task:0/device:CPU:0", 2, 132, ("kernel", "v")),
        kerasps.TaskPlacement("/job:ps/replica:0/task:1/device:CPU:0", 1, 8, ("counter",)),
    ]
    assert placement.num_bytes == 140
    assert (len(placement), placement[1].num_bytes, placement[:1]) == (2, 8, (placement[0],))


def test_a_large_variable_goes_where_the_fewest_bytes_are():
    ledger = PlacementLedger(3)
    held = [placed(ledger, LARGE + more) for more in (40, 10, 30, 0, 25)]
    assert ps_of(*held) == [0, 1, 2, 1, 2]


def test_large_variables_of_equal_size_are_dealt_out_in_turn():
    ledger = PlacementLedger(3)
    held = [placed(ledger, LARGE) for _ in range(7)]
    assert len(held) == 7
    assert [task.num_variables for task in ledger.placement()] == [3, 2, 2]


def test_small_variables_go_where_the_one_before_went():
    ledger = PlacementLedger(2)
    held = [placed(ledger, num_bytes) for num_bytes in (LARGE, LARGE, 10, 0, SMALL_BYTES)]
    assert ps_of(*held) == [0, 1, 1, 1, 1]
    held += [placed(ledger, num_bytes) for num_bytes in (LARGE, 10)]
    assert ps_of(*held[-2:]) == [0, 0]


def test_a_large_variable_joins_the_small_ones_before_it():
    ledger = PlacementLedger(2)
    held = [placed(ledger, 100) for _ in range(3)]
    slots = [RemoteVariable(0, (50,), "int8") for _ in range(2)]
    for slot in slots:
        ledger.add(slot, is_placed=False)
    assert ps_of(*held, placed(ledger, 100)) == [0] * 4
    assert ps_of(placed(ledger, LARGE)) == [1], "slots count"
    ledger = PlacementLedger(2)
    held = [placed(ledger, num_bytes) for num_bytes in (100, 100, LARGE, LARGE)]
    assert ps_of(*held) == [0, 0, 0, 1]


def test_many_small_variables_lie_in_runs_of_a_megabyte():
    ledger = PlacementLedger(2)
    held = [placed(ledger, RUN_BYTES // 8) for _ in range(36)]
    assert ps_of(*held) == [0] * 8 + [1] * 8 + [0] * 8 + [1] * 8 + [0] * 4
    del held[8:]
    gc.collect()
    assert ledger.place(1) == 1, "the run is full"


def test_what_is_placed_by_others_moves_no_run():
    ledger = PlacementLedger(2)
    first, beside = placed(ledger, 10), RemoteVariable(1, (10,))
    ledger.add(beside, is_placed=False)
    assert ps_of(first, placed(ledger, 10)) == [0, 0]


@pytest.mark.parametrize(
    ("num_shards", "expected"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 0]), (5, [1, 2, 0, 1, 2])]
)
def test_shards_go_to_different_ps_the_lightest_first(num_shards, expected):
    held = [RemoteVariable(0, (9,)), RemoteVariable(1, (1,)), RemoteVariable(2, (4,))]
    assert ledger_of(*held, num_ps=3).spread(num_shards) == expected


def test_a_variable_counts_until_it_is_collected():
    small, large = RemoteVariable(0, (1,)), RemoteVariable(0, (1000,))
    ledger = ledger_of(small, large)
    del large
    gc.collect()
    assert ledger.placement()[0].num_bytes == 4
    assert small.name == "v"


@pytest.mark.parametrize("device", ["/job:chief/replica:0/task:0/device:CPU:0", ""])
def test_what_is_on_the_coordinator_does_not_count(device):
    variable = RemoteVariable(0, (5,), device=device)
    assert ledger_of(variable).placement().num_bytes == 0
