"""`kerasps plan`: advice, words, and what is read of the data. Processes: `tests/processes`."""

from __future__ import annotations

import dataclasses
import io
import json
import threading

import pytest
from rich.console import Console

from kerasps import words
from kerasps.tools.plan.advice import advice_for
from kerasps.tools.plan.dry_run import COORDINATOR_CPU, here_instead
from kerasps.tools.plan.report import (
    Advice,
    Plan,
    PSPlan,
    SamplePlan,
    ShardPlan,
    StepCosts,
    VariablePlan,
    WorkerMemory,
)
from kerasps.tools.plan.sample import take_sample
from kerasps.tools.plan.table import MAX_VARIABLES, print_plan
from support.documentation import CHECKOUT

GB = 10**9
MACHINE = 16 * GB


def ps(index, num_bytes, moved=1000.0):
    return PSPlan(index, 3, num_bytes, 0, num_bytes, 0, num_bytes, 0.0, moved, moved, 0.0, 2)


def variable(path, num_bytes, shards=(0,), read="whole", dtype="float32"):
    parts = tuple(ShardPlan(index, num_bytes // len(shards), None) for index in shards)
    return VariablePlan(path, (1000, 8), dtype, num_bytes, 0, read, None, None, parts)


def a_plan(tasks, variables=(), *, num_workers=2, **step):
    moved = sum(task.pulled_bytes or 0 for task in tasks)
    is_known = all(task.pulled_bytes is not None for task in tasks)
    costs = StepCosts(
        moved if is_known else None,
        moved if is_known else None,
        *(0.0, int(moved), int(moved), 0.0, 2, 1, 1, 10, None, "workers"),
    )
    return Plan(
        "train.py",
        "fit",
        "model",
        "Adam",
        num_workers,
        len(tasks),
        tuple(tasks),
        tuple(variables),
        dataclasses.replace(costs, **step),
        SamplePlan(20, 1e6, None),
        WorkerMemory(1, 1, 0.0, 1e6, 1e6 + 2),
    )


def advice(plan, *, is_split=False, is_16_bits=False, overlaps=False):
    given = {"is_split": is_split, "is_16_bits": is_16_bits, "overlaps": overlaps}
    found = advice_for(plan, **given, memory=MACHINE)
    assert all(hint.text.endswith(".") for hint in found)
    return {hint.change: hint.text for hint in found}


def test_nothing_is_said_of_a_plan_that_is_well():
    table = variable("large", GB, (0, 1))
    assert advice(a_plan([ps(0, GB), ps(1, GB)], [table])) == {}


def test_values_that_exceed_memory_need_more_ps():
    found = advice(a_plan([ps(0, 60 * GB)], [variable("large", 60 * GB)]))
    assert set(found) == {"more_ps"}
    assert found["more_ps"].startswith("Take 5 ps and `variable_partitioner=")
    assert "ps 0 needs 60 GB for its values, and this machine has 16 GB" in found["more_ps"]
    split = advice(a_plan([ps(0, 60 * GB)], [variable("large", 60 * GB)]), is_split=True)
    assert split["more_ps"].startswith("Take 5 ps, or machines")


def test_a_whole_variable_that_makes_ps_uneven_is_to_be_split():
    plan = a_plan([ps(0, 3 * GB), ps(1, GB // 100)], [variable("large", 3 * GB)])
    found = advice(plan)
    assert set(found) == {"partitioner"}
    assert (
        "ps 0 holds 100% of all bytes, since 'large', with its slots 3 GB" in found["partitioner"]
    )
    assert "Lower `min_shard_bytes`" in advice(plan, is_split=True)["partitioner"]
    # Small models lie on few ps on purpose.
    assert advice(a_plan([ps(0, 10**6), ps(1, 100)], [variable("small", 10**6)])) == {}


def test_ps_without_a_variable_are_too_many():
    assert advice(a_plan([ps(0, 100), ps(1, 0), ps(2, 0)])) == {
        "fewer_ps": "Take 1 ps: 2 of 3 hold no variable."
    }


def test_a_link_that_takes_long_needs_more_ps_or_fewer_bits():
    plan = a_plan([ps(0, GB, moved=50e6)], [variable("dense", GB)], num_workers=4)
    # Of 50 MB each way, which a link carries at once.
    found = advice(plan)
    assert set(found) == {"more_ps", "wire_dtype"}
    assert (
        "a step moves 50 MB to or from ps 0, which takes 0.16 s at 10 Gbit/s" in (found["more_ps"])
    )
    assert "for a step of each of 4 workers" in found["more_ps"]
    assert set(advice(plan, is_16_bits=True)) == {"more_ps"}
    halves = a_plan([ps(0, GB, moved=10e6)], [variable("dense", GB, dtype="float16")])
    assert advice(halves) == {}
    assert advice(a_plan([ps(0, GB, moved=None)])) == {}


def test_short_steps_are_to_be_sent_together():
    plan = a_plan([ps(0, 1000)], steps_per_execution=1)
    text = advice(plan)["steps_per_execution"]
    assert "Pass `steps_per_execution=10`" in text
    assert "2.5 ms beside its steps" in text
    assert advice(plan, overlaps=True) == {}
    few = a_plan([ps(0, 1000)], steps_per_execution=1, num_batches=13)
    assert "steps_per_execution=3" in advice(few)["steps_per_execution"]
    assert advice(a_plan([ps(0, 1000)], steps_per_execution=1, num_batches=7)) == {}
    # kerasps does so by itself with one worker.
    assert advice(a_plan([ps(0, 1000)], steps_per_execution=1, num_workers=1)) == {}


def test_tables_that_are_read_whole_and_fed_data_are_named():
    table = variable("user/embeddings", GB)
    plan = a_plan([ps(0, GB)], [table], data_read_by="coordinator")
    found = advice(plan)
    assert "each step reads all of its 1 GB" in found["lookup"]
    assert (
        "the coordinator reads each batch of 1 MB and sends it to one of 2 workers"
        in (found["dataset_creator"])
    )


def test_json_has_the_documented_keys():
    content = json.loads(json.dumps(a_plan([ps(0, 1)], [variable("v", 8)]).as_dict()))
    assert content["version"] == 1
    assert content["variables"][0]["shards"] == [{"ps": 0, "num_bytes": 8, "rows_per_step": None}]


def test_the_table_names_the_largest_variables_and_sums_up_the_others():
    known = [variable(f"v{n}", 1000) for n in range(MAX_VARIABLES + 2)]
    console = Console(width=120, record=True, file=io.StringIO())
    print_plan(a_plan([ps(0, 1000, moved=None), ps(1, 0)], known), console)
    text = console.export_text()
    assert "2 others" in text
    assert f"v{MAX_VARIABLES} " not in text
    assert "A step pulls ? and pushes ?, in 2 messages and 1 round trip of its pull" in text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, "?"),
        (0, "0 bytes"),
        (999, "999 bytes"),
        (999.7, "1 kB"),
        (1234, "1.23 kB"),
        (999_999, "1 MB"),
        (128e9, "128 GB"),
        (2e18, "2,000 PB"),
    ],
)
def test_bytes_as_text(number, text):
    assert words.num_bytes(number) == text


def test_numbers_as_text():
    assert [words.count(n) for n in (None, 3, 3.25, 1234.5)] == ["?", "3", "3.2", "1,234"]
    assert [words.times(n, "step") for n in (1, 2)] == ["1 step", "2 steps"]


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("CPU:0", None),
        ("/job:ps/task:2", (COORDINATOR_CPU, "/job:ps/replica:0/task:2/device:CPU:0")),
        ("/job:worker/replica:0/task:1/device:GPU:0", (COORDINATOR_CPU, None)),
        (COORDINATOR_CPU, (COORDINATOR_CPU, None)),
    ],
)
def test_devices_of_absent_tasks_are_here(name, instead):
    assert here_instead(name) == instead


class _NoTables:
    """A plan of a step without tables."""

    table_shards = ()
    names = ()


def test_a_pipeline_that_does_not_come_is_not_waited_for():
    is_over = threading.Event()

    class Slow:
        num_splits, sends_batches = 0, True

        def start_pass(self, epoch, *, must_end):
            pass

        def next_batches(self, num_steps):
            is_over.wait()

    sample = take_sample(Slow(), _NoTables(), 5, seconds=0.1)
    assert sample.num_batches == 0
    is_over.set()
    assert sample.unknown == "No batch came within 0.1 s."


def test_a_pipeline_that_fails_says_why():
    class Failing:
        num_splits, sends_batches = 1, False

        def start_pass(self, epoch, *, must_end):
            pass

        def open(self, split, skip):
            raise ValueError("no such file")

    sample = take_sample(Failing(), _NoTables(), 5)
    assert sample.unknown == "No batch could be read: no such file"
    assert take_sample([], _NoTables(), 5).unknown == "There is no batch."
    assert take_sample([], _NoTables(), 0).unknown == "No batch was read (--sample-batches 0)."
    assert sample.mean(3.0) is None


@pytest.mark.parametrize(
    "record",
    [Advice, Plan, PSPlan, SamplePlan, ShardPlan, StepCosts, VariablePlan, WorkerMemory],
)
def test_the_page_has_every_key(record):
    page = (CHECKOUT / "docs" / "plan.md").read_text(encoding="utf-8")
    keys = page.partition("## The keys")[2]
    assert [f.name for f in dataclasses.fields(record) if f"`{f.name}`" not in keys] == []
