"""What dies under `kerasps launch` comes back: a worker, or all when a ps or the script is lost."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
from pathlib import Path

import pytest

from support.process_checks import is_alive, wait_for
from support.runs import ToldTraining

TRAINING = Path(__file__).with_name("restarted_training.py")
RUN_TRAINING = f"import runpy\nrunpy.run_path({str(TRAINING)!r}, run_name='__main__')"
SMALL = ("--num-workers=1",)
# How often the script has been started, and the pids of the tasks each time.
COUNTED = """
while not {"worker-0", "ps-0"} <= set(tasks()):
    time.sleep(0.01)
with (here / "starts").open("a") as file:
    file.write(json.dumps({"pid": os.getpid(), "argv": sys.argv, **tasks()}) + "\\n")
start = len((here / "starts").read_text().splitlines())
"""
TOLD = """
from kerasps.runtime.supervision import tell_supervisor
"""


def has_received(pid, number):
    """Return whether a signal that was sent is no longer on its way."""
    if number == signal.SIGKILL or not is_alive(pid):
        return not is_alive(pid)
    status = Path(f"/proc/{pid}/status").read_text()
    pending = int(status.partition("ShdPnd:")[2].split()[0], 16)
    return not pending >> (number - 1) & 1


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def said(err):
    """What the launcher has said, without reports."""
    prefix = "kerasps launch: "
    return [line.removeprefix(prefix) for line in err.splitlines() if line.startswith(prefix)]


GOES_ON = (
    "It resumes from the last backup of its `keras.callbacks.BackupAndRestore`; without one, from "
    "the beginning."
)


def test_a_training_goes_on_by_itself_whatever_is_killed(launch, tmp_path):
    epochs, steps = 6, 20
    ToldTraining(tmp_path, None, None).hold(1, 2, 4)
    launched = launch(
        RUN_TRAINING,
        options=("--num-workers=2", "--num-ps=2"),
        args=(str(tmp_path), str(epochs), str(steps)),
        variables={"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"},
    )

    told = ToldTraining(
        tmp_path, lambda: launched.process.poll() is not None, launched.process.communicate
    )
    events, release, wait_for_epoch = told.events, told.release, told.wait_for_epoch

    def kill(epoch, pid_of, number):
        wait_for_epoch(epoch)
        before, pid = len(events("started")), pid_of()
        os.kill(pid, number)
        wait_for(lambda: has_received(pid, number), what="the signal to come")
        release(epoch)
        wait_for(lambda: len(events("started")) > before, what="another start of the script")

    wait_for_epoch(1)
    pids = launched.tasks()
    worker, ps = pids["worker-1"], pids["ps-0"]
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: launched.tasks().get("worker-1", worker) != worker, what="a new worker")
    assert launched.tasks()["ps-0"] == ps
    release(1)
    # It holds what each step needs.
    kill(2, lambda: ps, signal.SIGKILL)
    kill(4, lambda: events("started")[-1]["pid"], signal.SIGTERM)
    code, _, err = launched.result()
    assert code == 0, err
    told.check_exact(epochs * steps, starts=3)
    by_process = itertools.groupby(events("epoch"), lambda event: event["pid"])
    first, second, third = [[event["epoch"] for event in group] for _, group in by_process]
    for numbers in (first, second, third):
        assert numbers == list(range(numbers[0], numbers[-1] + 1)), err
    assert (first[0], first[-1], second[-1], third[-1]) == (0, 2, 4, epochs - 1), err
    # A backup is written beside the training: of the epoch that has ended just now, or the one
    # before. On SIGTERM it is made at once.
    assert second[0] in (1, 2), err
    assert third[0] == 4, err
    assert len({event["tf_config"] for event in events("started")}) == 1
    assert said(err) == [
        "worker 1 died. It is started again, 1 of 3 in this hour.",
        "ps 0 died. When the script has ended, the run is started again, 1 of 3 in this hour.",
        f"the script has ended (exit code 1). The run is started again, 1 of 3 in this hour. "
        f"{GOES_ON}",
        f"the script has ended (exit code 143). The run is started again, 1 of 3 in this hour. "
        f"{GOES_ON}",
    ]


def test_a_script_that_a_signal_ends_begins_anew_with_all_tasks_but_the_evaluator(launch, tmp_path):
    evaluator = tmp_path / "evaluate.py"
    evaluator.write_text("import sys; print('began'); sys.stdin.read(); print('ended')")
    body = (
        "print('start', start, flush=True)\n"
        "if start == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "if start == 2: sys.exit(143)\n"
    )
    launched = launch(
        COUNTED + body,
        options=(*SMALL, f"--evaluator={shlex.quote(str(evaluator))}"),
        args=("--rate", "two words"),
    )
    code, out, err = launched.result()
    assert (code, out) == (0, "start 1\nstart 2\nstart 3\n")
    starts = records(tmp_path / "starts")
    assert [start["argv"][1:] for start in starts] == [["--rate", "two words"]] * 3
    for name in ("pid", "worker-0", "ps-0"):
        assert len({start[name] for start in starts}) == 3, starts
    assert [line for line in err.splitlines() if line.startswith("[evaluator]")] == [
        "[evaluator] began",
        "[evaluator] ended",
    ]
    assert said(err)[:2] == [
        f"the script has ended (signal SIGKILL). The run is started again, 1 of 3 in this hour. "
        f"{GOES_ON}",
        f"the script has ended (exit code 143). The run is started again in 1 s, 2 of 3 in this "
        f"hour. {GOES_ON}",
    ]


@pytest.mark.parametrize(
    ("loss", "ends"),
    [
        pytest.param(
            "tell_supervisor('lost', 'worker', 0)",
            "it has lost worker 0",
            marks=pytest.mark.matrix,
        ),
        ("tell_supervisor('lost', 'ps', 0)", "it has lost ps 0"),
        ("os.kill(tasks()['ps-0'], signal.SIGKILL)", None),
        (
            "os.kill(tasks()['ps-0'], signal.SIGSTOP); tell_supervisor('hung', 'ps', 0)",
            None,
        ),
        ("pass", "an error of its own"),
    ],
)
def test_a_script_that_fails_of_a_loss_begins_anew_and_of_itself_does_not(
    launch, tmp_path, loss, ends
):
    body = f"if start == 1:\n    {loss}\n    sys.exit(3)\nsys.exit(4)\n"
    launched = launch(COUNTED + TOLD + body, options=SMALL)
    code, _, err = launched.result()
    starts = records(tmp_path / "starts")
    if ends == "an error of its own":
        assert (code, err, len(starts)) == (3, "", 1)
        return
    # The second time it fails of itself.
    assert (code, len(starts)) == (4, 2)
    assert starts[0]["ps-0"] != starts[1]["ps-0"]
    why = "" if ends is None else f": {ends}"
    assert f"the script has ended (exit code 3){why}. The run is started again" in err


def test_a_worker_that_hangs_is_killed_and_comes_back_while_the_script_goes_on(launch, tmp_path):
    body = """
before = tasks()
os.kill(before["worker-0"], signal.SIGSTOP)
tell_supervisor("hung", "worker", 0)
while tasks().get("worker-0", before["worker-0"]) == before["worker-0"]:
    time.sleep(0.01)
# What is said of the process before is not held against the new one.
os.write(int(os.environ["KERASPS_SUPERVISOR_FD"].split(":")[0]), b"hung worker 0 1.0\\n")
time.sleep(0.5)
after = tasks()
print(after["ps-0"] == before["ps-0"], len(after) == len(before))
"""
    code, out, err = launch(COUNTED + TOLD + body, options=SMALL).result()
    assert (code, out) == (0, "True True\n")
    restart, no_strategy = said(err)
    assert restart == (
        "worker 0 did not answer and was killed. It is started again, 1 of 3 in this hour."
    )
    assert no_strategy.startswith("the script made no strategy of kerasps")


def test_after_a_signal_nothing_is_started_again(launch, tmp_path):
    # As a scheduler ends a job: every process of it gets the signal.
    body = "ready()\nwhile True: time.sleep(1)"
    launched = launch(COUNTED + body, options=SMALL)
    pids = launched.wait_until_ready()
    script = records(tmp_path / "starts")[0]["pid"]
    for pid in (launched.process.pid, script, pids["ps-0"], pids["worker-0"]):
        os.kill(pid, signal.SIGTERM)
    code, _, err = launched.result()
    assert code == 143
    assert "script has ended" not in err
    assert len(records(tmp_path / "starts")) == 1
    assert not is_alive(script)
