"""A run that is looked at: by `strategy.status()`, `kerasps top`, Prometheus and TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kerasps.tools.monitoring.metrics import METRICS
from kerasps.tools.monitoring.status import status_of
from support.launched import Launch
from support.process_checks import run_and_report

SCRIPT = Path(__file__).with_name("monitored.py")


@pytest.fixture(scope="module")
def seen(once):
    return once("monitored", lambda: run_and_report(SCRIPT))


def steps_of(status):
    return [worker["steps"] for worker in status["workers"]]


def states_of(status, job="workers"):
    return [task["state"] for task in status[job]]


def test_before_fit_all_are_connected_and_nothing_is_done(seen):
    before = seen["before"]
    assert (before["state"], before["epoch"], before["steps"]) == ("idle", None, 0)
    assert states_of(before) == states_of(before, "ps") == ["connected"] * 2
    assert before["tables"] == []
    assert before["coordinator"]["pid"] == seen["pid"]


def test_steps_are_counted_exactly_though_a_worker_was_lost(seen):
    assert seen["error"] is None
    after = seen["after"]
    assert sum(steps_of(after)) == after["steps"] == after["steps_total"] == seen["iterations"]
    assert all(steps_of(after))
    assert seen["at_epoch_end"] % 40 == 0
    assert sum(steps_of(seen["during"])) == seen["during"]["steps"] > 0


def test_a_second_fit_counts_anew_and_goes_on_in_all(seen):
    second = seen["second"]
    assert second["steps"] == sum(steps_of(second)) == 80
    assert second["steps_total"] == seen["iterations_of_both"] == seen["iterations"] + 80
    totals = [worker["steps_total"] for worker in second["workers"]]
    assert sum(totals) == second["steps_total"]


def test_a_killed_worker_is_shown_lost_and_back(seen):
    lost, back = seen["lost"], seen["back"]
    assert lost["state"] in ("lost", "hangs")
    assert (lost["times_lost"], lost["times_back"]) == (1, 0)
    assert lost["usage"] is None
    assert (back["state"], back["times_lost"], back["times_back"]) == ("connected", 1, 1)
    assert back["usage"]
    assert back["steps"] > lost["steps"]


def test_what_runs_is_told_while_it_runs(seen):
    during = seen["during"]
    assert during["state"] == "training"
    assert during["epoch"] is not None
    assert during["steps_per_second"] > 0
    for worker in during["workers"]:
        assert worker["executions_in_flight"] or worker["waits_for"]
        assert worker["usage"]["memory_bytes"] > 1e7


def test_ps_tell_what_they_hold_and_move(seen):
    after = seen["after"]
    assert [ps["num_bytes"] > 0 for ps in after["ps"]] == [True, True]
    assert after["tables"][0]["name"] == "users/embeddings"
    assert after["tables"][0]["num_rows"] == 500
    # Each step reads the rows of its different ids: at most 48, and few fewer.
    read = after["tables"][0]["rows_read_total"]
    assert 0.85 * seen["rows_read"] < read <= seen["rows_read"]
    assert sum(ps["rows_read_total"] for ps in after["ps"]) == read
    assert all(ps["bytes_written_total"] > 0 for ps in after["ps"])
    assert seen["second"]["tables"][0]["rows_read_total"] > read
    assert after["staleness_mean"] is not None


def test_top_attaches_from_another_process(seen):
    code, out, err = seen["top"]
    assert (code, err) == (0, "")
    reply = json.loads(out)
    assert (reply["pid"], reply["script"]) == (seen["pid"], "monitored.py")
    status = status_of(reply["status"])
    assert len(status.workers) == len(status.ps) == 2
    assert status.steps >= seen["during"]["steps"]


def test_top_reads_the_address_of_a_monitor(seen):
    code, out, _ = seen["top_at_address"]
    assert code == 0
    assert "users/embeddings" in out
    assert len([line for line in out.splitlines() if "connected" in line]) == 4
    assert seen["status_at_address"] == seen["pid"]


def test_prometheus_is_told_all_that_is_known(seen):
    metrics = seen["metrics"]
    names = {name.partition("|")[0] for name in metrics}
    # No table here has a bound.
    assert names == {m.name for m in METRICS} - {"kerasps_table_share_of_max_rows"}
    steps = [metrics[f"kerasps_worker_steps_total|{worker}"] for worker in (0, 1)]
    assert sum(steps) == metrics["kerasps_steps_total"] > 0
    assert metrics["kerasps_table_rows|users/embeddings"] == 500
    assert metrics["kerasps_up|worker:1"] == 1


def test_tensorboard_has_a_point_for_each_epoch_or_number_of_steps(seen):
    # TensorBoard's reader keeps ten points of each.
    assert seen["scalars"]["steps_total"] == min(10, seen["iterations"] // 40)
    assert "worker_steps_total/1" in seen["scalars"]
    assert seen["scalars_by_steps"]["steps_total"] >= 1


def test_a_monitor_may_be_used_again_and_copied_and_closes_its_port(seen):
    (first, copied), again = seen["addresses"]
    assert first != copied
    assert again == [first, copied]
    assert seen["address_after"] is seen["address_after_evaluate"] is None


def test_the_port_is_closed_when_fit_fails(seen):
    assert seen["failed"] == "on purpose"
    assert seen["address_in_failing"]
    assert not seen["open_after_failure"]


def test_after_the_loss_of_a_ps_and_the_end_of_the_cluster_there_is_a_status(seen):
    assert "ps_lost" in seen
    assert states_of(seen["after_ps_loss"], "ps") == ["connected", "lost"]
    closed = seen["closed"]
    assert closed["state"] == "closed"
    assert {*states_of(closed), *states_of(closed, "ps")} == {"closed"}
    assert closed["steps_total"] == seen["after_ps_loss"]["steps_total"]
    assert (seen["sockets"], seen["threads"]) == ([], [])


OWN_STEPS = """
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
import keras
import numpy as np
import kerasps

strategy = kerasps.WorkerDrivenStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
statuses, addresses = [], []
monitor = kerasps.ClusterMonitor(port=0)

class Looks(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        statuses.append(strategy.status().as_dict())
        addresses.append(monitor.address)

model.fit(np.ones((320, 4)), np.ones(320), batch_size=8, epochs=2, verbose=0,
    callbacks=[monitor, Looks()])
seen = {"statuses": statuses, "addresses": addresses, "worker": strategy.worker_index}
(here / f"seen-{strategy.worker_index}.json").write_text(json.dumps(seen))
"""


def test_a_worker_that_drives_itself_shows_itself_and_the_ps(tmp_path):
    launched = Launch(
        tmp_path, OWN_STEPS, options=["--num-workers", "2", "--num-ps", "1", "--mode", "worker"]
    )
    try:
        _, err = launched.process.communicate()
        assert launched.process.returncode == 0, err
        launched.assert_nothing_left()
    finally:
        launched.end()
    for index in (0, 1):
        seen = json.loads((tmp_path / f"seen-{index}.json").read_text())
        assert all(seen["addresses"])
        last = seen["statuses"][-1]
        (worker,) = last["workers"]
        assert worker["worker"] == index
        assert worker["steps"] == last["steps"] == 40, "its half of two epochs"
        assert worker["usage"]["memory_bytes"] > 1e7
        assert last["coordinator"] is None
        (ps,) = last["ps"]
        # Another process has started it, so it was found by its address.
        assert (ps["state"], ps["usage"]["memory_bytes"] > 1e7) == ("connected", True)
        assert ps["bytes_read_total"] > 0
