"""Workers that drive their own steps: each is a process that runs the same program, and nobody
coordinates them.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import warnings
from pathlib import Path

import pytest

from kerasps.cluster.local.launched_cluster import LocalPS
from kerasps.cluster.processes.process import child_environment
from support.forked_scripts import ForkedScript
from support.launched import Launch
from support.process_checks import wait_for

SCRIPT = Path(__file__).with_name("worker_driven_training.py")
EPOCHS, STEPS, BATCH_SIZE, EXAMPLES = 3, 20, 8, 640


class Workers:
    """The ps of a cluster, and workers that are started one by one."""

    def __init__(self, here, num_workers, num_ps=1):
        self.here = here
        self.cluster = LocalPS(num_workers, num_ps, max_restarts=0)
        self.processes = []

    def start(self, what, task_type="worker", index=0, **config):
        env = child_environment(self.cluster.worker_environment(0))
        env |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
        env["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parents[1]), env.get("PYTHONPATH", "")])
        tf_config = json.loads(env["TF_CONFIG"])
        tf_config["cluster"] |= config
        env["TF_CONFIG"] = json.dumps(tf_config | {"task": {"type": task_type, "index": index}})
        log = self.here / f"{task_type}-{index}-{len(self.processes)}.log"
        with log.open("wb") as stream:
            process = ForkedScript([SCRIPT, what, self.here], env=env, stdout=stream, stderr=stream)
        process.log = log
        self.processes.append(process)
        return process

    def end_of(self, process):
        """The exit code of a worker, and what it printed."""
        process.wait(600)
        return process.returncode, process.log.read_text()

    def told(self, name, **expected):
        """Waits until a worker has written a file, and says these values; returns them all."""

        def found():
            for process in self.processes:
                assert process.poll() in (None, 0, -signal.SIGKILL), process.log.read_text()[-4000:]
            if not (self.here / name).exists():
                return None
            values = json.loads((self.here / name).read_text())
            return values if expected.items() <= values.items() else None

        return wait_for(found, what=f"{name} with {expected}")

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a ps that the test has killed
            self.cluster.close()


@pytest.fixture
def workers(tmp_path):
    made = []

    def make(num_workers, num_ps=1):
        made.append(Workers(tmp_path, num_workers, num_ps))
        return made[-1]

    yield make
    for group in made:
        group.close()


def test_one_worker_is_plain_keras(workers):
    group = workers(1, num_ps=2)
    code, out = group.end_of(group.start("equal"))
    assert code == 0, out[-4000:]
    report = json.loads(next(x for x in out.splitlines() if x.startswith("REPORT "))[7:])
    assert report["1"] == report["10"] == [40, 2]
    assert report["saved"]
    assert "Remove it from `callbacks`" in report["refused"]["backup"]
    assert "has no ClusterCoordinator" in report["refused"]["coordinator"]
    assert "does not know which workers are there" in report["refused"]["workers"]
    assert "runs steps of models only" in report["refused"]["run"]
    assert "Debug with one plain process" in report["refused"]["eagerly"]


def test_steps_of_all_are_counted_and_the_chief_sees_their_metrics(workers):
    group = workers(2)
    processes = [group.start("counts", index=index) for index in (1, 0)]
    for process in processes:
        code, out = group.end_of(process)
        assert code == 0, out[-4000:]
    steps = EPOCHS * STEPS
    # Who came last has seen all.
    assert max(group.told(f"fit-{i}")["iterations"] for i in range(2)) == 2 * steps
    chief, other = (group.told(f"report-{i}") for i in range(2))
    assert sum(chief["history"]["batches"]) == 2 * steps
    assert sum(chief["history"]["examples"]) == 2 * steps * BATCH_SIZE
    assert other["history"]["batches"] == [STEPS] * EPOCHS
    # Every example of a whole dataset is read once, whoever reads it.
    assert other["whole"]["batches"] == [EXAMPLES // BATCH_SIZE / 2]
    assert chief["whole"]["examples"] == [EXAMPLES]
    assert chief["whole"]["ids"] == [sum(range(EXAMPLES))]
    assert chief["whole"]["squares"] == [sum(i * i for i in range(EXAMPLES))]
    # What the chief says outside of steps holds, and what the other says does not.
    assert chief["biases"] == [[7.0]]
    assert chief["bare"] == other["bare"] == [5.0]
    assert (group.here / "log-0.csv").exists()
    assert not (group.here / "log-1.csv").exists()


def test_rows_of_a_table_without_a_vocabulary_are_those_of_all(workers):
    group = workers(2, num_ps=2)
    processes = [group.start("new_ids", index=index) for index in (1, 0)]
    for process in processes:
        code, out = group.end_of(process)
        assert code == 0, out[-4000:]
    report = group.told("report")
    # Each worker reads the first of its share: 60 batches of 8, of 320 examples, again and again.
    assert report["num_rows"] == len(set(range(EXAMPLES)) | {n % 7 - 5 for n in range(EXAMPLES)})
    assert report["updates"] == 2 * EPOCHS * STEPS * BATCH_SIZE * 2 * 4


def test_a_worker_that_dies_disturbs_nobody_and_may_come_back(workers):
    group = workers(2, num_ps=2)
    chief, other = (group.start("lasting", index=index) for index in (0, 1))
    group.told("epoch-1")
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    before = group.told("epoch-0")["epoch"]
    wait_for(lambda: group.told("epoch-0")["epoch"] > before + 2, what="epochs of the chief alone")
    again = group.start("lasting", index=1)
    group.told("epoch-1", pid=again.pid)
    (group.here / "stop").touch()
    # The chief's word to stop is for all.
    for process in (chief, again):
        code, out = group.end_of(process)
        assert code == 0, out[-4000:]
    assert group.told("end-0")["began_at"] == 0
    end = group.told("end-1")
    assert end["began_at"] > 0
    assert len(end["devices"]) == 2
    # Of the step that the other was doing when it was killed, a ps has all or nothing.
    steps = [end["iterations"], end["rows"] / BATCH_SIZE, *itertools.chain(*end["weights"])]
    assert all(len(values) == 1 for values in end["weights"])
    assert max(steps) - min(steps) <= 1


def test_a_worker_says_whom_it_waits_for(workers):
    group = workers(2)
    code, out = group.end_of(group.start("alone", index=1))
    assert code == 1
    address = group.cluster.description.jobs["worker"][0]
    assert (
        f"TaskUnreachableError: The chief of this run, worker 0 at {address}, did not answer" in out
    )
    assert "Expected: within 2 s" in out


def test_every_task_of_train_and_evaluate_ends_by_itself(workers):
    group = workers(2)
    first, second = group.cluster.description.jobs["worker"]
    (ps,) = group.cluster.description.jobs["ps"]
    group.cluster.kill("ps", 0)  # in its place comes one that runs the program
    tasks = [("ps", 0), ("evaluator", 0), ("worker", 0), ("chief", 0)]
    cluster = {"chief": [first], "worker": [second], "ps": [ps]}
    for process in [group.start("estimator", *task, **cluster) for task in tasks]:
        code, out = group.end_of(process)
        assert code == 0, out[-4000:]
    assert group.told("trained")["iterations"] == 100
    evaluated = group.told("evaluations")["iterations"]
    assert evaluated[-1] == 100
    assert evaluated == sorted(set(evaluated))
    assert (group.here / "best" / "model.keras").exists()
    assert (group.here / "run" / "model-100.weights.h5").exists()


LAUNCHED = """
sys.path.insert(0, TESTS)
index = config["task"]["index"]
if index == 1 and not (here / "began").exists():
    (here / "began").touch()
    os.kill(os.getpid(), signal.SIGKILL)
import keras, numpy as np, kerasps
strategy = kerasps.WorkerDrivenStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
class Kill(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        (here / f"epoch-{index}").touch()
        if index == 0 and (here / "epoch-1").exists():
            os.kill(tasks()["ps-0"], signal.SIGKILL)
x, y = np.ones((64, 2)), np.ones((64, 1))
model.fit(x, y, epochs=100_000, verbose=0, callbacks=[Kill()])
"""


def test_launch_starts_a_worker_again_and_ends_with_a_ps(tmp_path):
    launched = Launch(
        tmp_path,
        LAUNCHED.replace("TESTS", repr(str(SCRIPT.parents[1]))),
        options=("--mode=worker", "--num-workers=2", "--num-ps=1", f"--log-dir={tmp_path}/logs"),
        variables={"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    try:
        _, err = launched.process.communicate()
        assert launched.process.returncode == 1, err
        # Looked for anywhere: a line of the launcher may begin where one of the chief, which writes
        # to the same place, has not ended.
        began = err.index("kerasps launch: worker 1 died (signal SIGKILL): started again")
        assert err.index("kerasps launch: ps 0 died") > began
        assert err.count("kerasps launch: ") == 2, err
        assert "kerasps.PSLostError: ps 0 at " in err
        assert "kerasps.PSLostError: ps 0 at " in (tmp_path / "logs" / "worker-1.log").read_text()
        launched.assert_nothing_left()
    finally:
        launched.end()
