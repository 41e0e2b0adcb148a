"""`kerasps launch`: a script with a cluster around it, and every way in which it can end."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
from pathlib import Path

import pytest

from support.launched import lines_until
from support.process_checks import (
    marked_processes,
    mode_of,
    temporary_files,
    wait_for,
)

SMALL = ("--num-workers=1",)
IDLE = (
    "kerasps launch: the script made no strategy of kerasps: it ran in one process, beside 1 "
    "worker and 1 ps without work. To use these, make one: `kerasps.ParameterServerStrategy()`\n"
)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("print('to stdout'); print('to stderr', file=sys.stderr)", 0),
        pytest.param("sys.exit(3)", 3, marks=pytest.mark.matrix),
        ("raise ValueError('wrong')", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
        pytest.param("os.kill(os.getpid(), signal.SIGABRT)", 134, marks=pytest.mark.matrix),
    ],
)
def test_the_exit_code_is_that_of_the_script(launch, tmp_path, body, expected):
    code, out, err = launch(body, options=(*SMALL, "--max-restarts=0")).result()
    assert code == expected
    if expected == 0:
        assert (out, err) == ("to stdout\n", "to stderr\n" + IDLE)
    else:
        assert "kerasps launch" not in err
    assert temporary_files(tmp_path) == []


@pytest.mark.parametrize("made", ["", "cluster.cluster_resolver"])
def test_a_script_with_a_cluster_that_it_starts_is_told_of_the_idle_one(launch, made):
    body = f"""
import kerasps
with kerasps.LocalCluster(1, 1) as cluster:
    strategy = kerasps.ParameterServerStrategy({made})
"""
    code, _, err = launch(body, options=SMALL).result()
    assert code == 0, err
    idle = "the script trained on a `LocalCluster` that it started, beside 1 worker and 1 ps"
    # Without a cluster resolver, the strategy is of the cluster of the launcher.
    assert (idle in err) == bool(made), err
    assert "made no strategy" not in err


def test_the_script_gets_its_arguments_and_the_cluster(launch, tmp_path):
    body = "print(json.dumps([sys.argv[1:], config['task'], sorted(tasks())]))"
    variables = {
        "KERASPS_NUM_WORKERS": "2",
        "KERASPS_NUM_PS": "3",
        "KERASPS_LOG_DIR": str(tmp_path / "logs"),
        "TF_CONFIG": "old",
    }
    args = ("--num-ps", "7", "-h", "", "two words")
    launched = launch(body, options=("--num-ps=1",), args=args, variables=variables)
    code, out, _ = launched.result()
    assert code == 0
    # The command line beats the environment; what follows the script is the script's.
    seen_args, task, servers = json.loads(out)
    assert seen_args == list(args)
    assert task == {"type": "chief", "index": 0}
    assert {"worker-0", "worker-1", "ps-0"} <= set(servers)
    assert "ps-1" not in servers
    assert {job: len(addresses) for job, addresses in launched.cluster().items()} == {
        "chief": 1,
        "worker": 2,
        "ps": 1,
    }
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "ps-0.log",
        "worker-0.log",
        "worker-1.log",
    ]


@pytest.fixture
def terminal():
    """Both ends of a terminal."""
    ends = pty.openpty()
    yield ends
    for end in ends:
        os.close(end)


def test_the_script_reads_the_terminals_stdin(launch, terminal):
    master, slave = terminal
    launched = launch("ready(); print(input())", options=SMALL, terminal=slave)
    launched.wait_until_ready()
    os.write(master, b"hello\n")
    code, out, _ = launched.result()
    assert (code, out) == (0, "hello\n")


INTERRUPTED = """
from kerasps.cluster.description.tf_config import read_tf_config
from kerasps.cluster.members.reachability import unreachable
interrupts = []
def interrupt(number, frame):
    interrupts.append(number)
signal.signal(signal.SIGINT, interrupt)
ready()
while not interrupts:
    time.sleep(0.01)
time.sleep(float(sys.argv[2]))
print(len(interrupts), unreachable(read_tf_config().server_addresses, 3600), flush=True)
if sys.argv[1] == "die":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("end", "seconds", "expected"),
    [
        ("die", 0.5, 130),
        pytest.param("1", 0.5, 130, marks=pytest.mark.matrix),
        # So long that the launcher would pass on what came to it alone.
        ("0", 6, 0),
    ],
)
def test_ctrl_c_reaches_the_script_once_and_the_cluster_outlives_it(
    launch, tmp_path, terminal, end, seconds, expected
):
    master, slave = terminal
    launched = launch(INTERRUPTED, options=SMALL, args=(end, str(seconds)), terminal=slave)
    launched.wait_until_ready()
    os.write(master, b"\x03")
    code, out, err = launched.result()
    assert (code, out, err) == (expected, "1 {}\n", "" if expected else IDLE)
    assert temporary_files(tmp_path) == []


def test_sigint_for_the_launcher_alone_is_passed_on_in_the_end(launch):
    launched = launch("ready(); time.sleep(3600)", options=SMALL)
    launched.wait_until_ready()
    launched.process.send_signal(signal.SIGINT)
    code, _, err = launched.result()
    assert code == 130
    assert "KeyboardInterrupt" in err


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.matrix)]
)
def test_a_signal_to_end_is_passed_on_to_the_script(launch, tmp_path, number):
    launched = launch("ready(); time.sleep(3600)", options=SMALL)
    launched.wait_until_ready()
    launched.process.send_signal(number)
    assert launched.result()[0] == 128 + number
    assert temporary_files(tmp_path) == []


BACKED_UP = """
import keras, kerasps, numpy as np
strategy = kerasps.ParameterServerStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
class Ready(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if any((here / "backups").glob("backup-*.json")):
            ready()
backups = keras.callbacks.BackupAndRestore(str(here / "backups"))
model.fit(np.ones((64, 8)), np.ones(64), epochs=10**6, verbose=0, callbacks=[backups, Ready()])
"""


def test_a_signal_to_end_while_a_ps_is_silent_says_which_backup_is_there(launch, tmp_path):
    launched = launch(BACKED_UP, options=SMALL, variables={"KERASPS_HANG_TIMEOUT": "3"})
    ps = launched.wait_until_ready()["ps-0"]
    os.kill(ps, signal.SIGSTOP)
    launched.process.send_signal(signal.SIGTERM)
    code, _, err = launched.result()
    assert code == 143, err
    assert "SIGTERM came, and no further backup can be made: ps 0 at " in err
    assert f"The last backup is {tmp_path}/backups/backup-0" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("number", "expected"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.matrix)],
)
def test_a_signal_while_the_cluster_starts_ends_it(launch, tmp_path, number, expected):
    launched = launch("time.sleep(3600)", options=SMALL)
    # The script and two servers, which have started but do not serve yet.
    wait_for(lambda: len(children_of(launched.process.pid)) == 3, what="the start of the servers")
    launched.process.send_signal(number)
    code, _, err = launched.result()
    assert code == expected
    # The script may say where it was interrupted.
    assert "kerasps" not in err
    assert temporary_files(tmp_path) == []


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_each_task_that_dies_is_reported_once_and_the_first_again_at_the_end(launch, tmp_path):
    launched = launch(
        "ready()\nwhile not (here / 'go').exists(): time.sleep(0.01)\nsys.exit(5)",
        options=(*SMALL, "--max-restarts=0"),
    )
    pids = launched.wait_until_ready()
    (log_dir,) = (tmp_path / "temporary").iterdir()
    with (log_dir / "ps-0.log").open("a") as log:
        log.write("the last words of ps 0\n")
    first = [
        f"  task: ps 0 at {launched.cluster()['ps'][0]}\n",
        f"  pid: {pids['ps-0']}\n",
        "  ended by: signal SIGKILL\n",
        f"  log file: {log_dir / 'ps-0.log'}\n",
        "  last lines:\n",
    ]
    os.kill(pids["ps-0"], signal.SIGKILL)
    told = "ps 0 died. The run is not started again: restarts are turned off.\n"
    report = lines_until(launched.process.stderr, "last words")
    assert report[:6] == [f"kerasps launch: {told}", *first]
    assert report[-1] == "    the last words of ps 0\n"
    os.kill(pids["worker-0"], signal.SIGKILL)
    report = lines_until(launched.process.stderr, "last lines")
    assert report[0] == (
        "kerasps launch: worker 0 died. It is not started again: restarts are turned off.\n"
    )
    (tmp_path / "go").touch()
    code, _, rest = launched.result()
    assert code == 5
    end = rest[rest.index("kerasps launch: ") :].splitlines(keepends=True)
    assert end[:7] == ["kerasps launch: this was the first failure:\n", told, *first]
    assert end[-1] == "    the last words of ps 0\n"
    assert temporary_files(tmp_path) == [log_dir.name]


@pytest.mark.parametrize("name", [pytest.param("worker 0", marks=pytest.mark.matrix), "ps 0"])
def test_a_task_that_takes_the_script_down_with_it_is_still_reported(launch, name):
    body = f"os.kill(tasks()['{name.replace(' ', '-')}'], signal.SIGKILL)\nsys.exit(4)"
    code, _, err = launch(body, options=(*SMALL, "--max-restarts=0")).result()
    assert code == 4
    assert f"kerasps launch: {name} died. " in err
    assert f"  task: {name} at" in err


def test_a_task_that_dies_before_it_is_ready_ends_the_run(launch):
    # A module that the task imports, and that ends it.
    variables = {"KERASPS_FULL_IMPORT": "no_such_module"}
    launched = launch("time.sleep(3600)", options=SMALL, variables=variables)
    code, _, err = launched.result()
    assert code == 1
    assert "kerasps launch: error: The process of " in err
    assert "ended before it was ready" in err
    assert "No module named 'no_such_module'" in err
    assert "RuntimeWarning" not in err


def test_a_log_directory_that_cannot_be_made_is_an_error(launch, tmp_path):
    (tmp_path / "file").touch()
    code, _, err = launch(
        "pass", options=(*SMALL, f"--log-dir={tmp_path / 'file' / 'logs'}")
    ).result()
    assert code == 1
    assert "kerasps launch: error: [Errno 20] Not a directory" in err
    assert "Traceback" not in err


EVALUATOR = """
import json, os, pathlib, sys, time
here = pathlib.Path(__file__).parent
print("task", json.dumps(json.loads(os.environ["TF_CONFIG"])["task"]), sys.argv[1:])
(here / "evaluating.new").write_text(str(os.getpid()))
(here / "evaluating.new").rename(here / "evaluating")
"""
# Ends with the training, as a SidecarEvaluator does.
UNTIL_THE_END = (
    "assert sys.stdin.read() == ''; print('evaluated the last', flush=True); "
    "print('unfinished line', end='')"
)
# What the script does until the evaluator is there, and until it is no longer.
WAIT = "\nwhile not (here / 'evaluating').exists(): time.sleep(0.01)\n"
WAIT_FOR_ITS_END = """
pid = (here / "evaluating").read_text()
while pathlib.Path(f"/proc/{pid}").exists(): time.sleep(0.01)
"""


@pytest.fixture
def evaluator(tmp_path):
    """Writes an evaluation script; returns the option that runs it."""

    def write(body, *arguments):
        script = tmp_path / "evaluate.py"
        script.write_text(EVALUATOR + body)
        return f"--evaluator={shlex.join([str(script), *arguments])}"

    return write


def test_an_evaluator_ends_after_the_training(launch, evaluator, tmp_path):
    options = (
        *SMALL,
        evaluator(UNTIL_THE_END, "two words", "-x"),
        f"--log-dir={tmp_path / 'logs'}",
    )
    body = (
        WAIT + "print('trained', 'evaluator' in config['cluster'], "
        "'KERASPS_END_OF_TRAINING_ON_STDIN' in os.environ)"
    )
    code, out, err = launch(body, options=options).result()
    assert (code, out) == (0, "trained False False\n")
    lines = [
        'task {"type": "evaluator", "index": 0} [\'two words\', \'-x\']',
        "evaluated the last",
        "unfinished line",
    ]
    found = err.splitlines()
    # It may be quicker than the launcher's look at it.
    over = "kerasps launch: the training is over; the evaluator has 600 s for the last checkpoint."
    told = [line for line in found if line not in (over, IDLE.rstrip())]
    assert told == [f"[evaluator] {line}" for line in lines]
    assert {mode_of(log) for log in (tmp_path / "logs").iterdir()} == {"0o600"}
    assert (tmp_path / "logs" / "evaluator-0.log").read_text() == "\n".join(lines)


def test_an_evaluator_that_fails_is_reported_at_once_and_makes_the_launch_fail(launch, evaluator):
    launched = launch(
        "ready()\nwhile not (here / 'go').exists(): time.sleep(0.01)",
        options=(*SMALL, evaluator("1 / 0")),
    )
    report = lines_until(launched.process.stderr, "kerasps launch")
    assert "[evaluator] ZeroDivisionError: division by zero\n" in report
    assert (
        report[-1] == "kerasps launch: the evaluator failed (exit code 1): see its output above.\n"
    )
    launched.wait_until_ready()
    (launched.here / "go").touch()
    assert launched.result() == (1, "", IDLE)


def test_the_exit_code_of_a_script_that_fails_goes_first(launch, evaluator):
    code, _, err = launch(
        WAIT + "sys.exit(3)", options=(*SMALL, evaluator(UNTIL_THE_END + "; sys.exit(5)"))
    ).result()
    assert code == 3
    assert "the evaluator failed (exit code 5)" in err
    assert "[evaluator] evaluated the last" in err


def test_an_evaluator_that_does_not_end_is_ended(launch, evaluator):
    options = (*SMALL, evaluator("time.sleep(3600)"), "--evaluator-timeout=0.2")
    code, _, err = launch(WAIT, options=options).result()
    assert code == 1
    assert "the evaluator has 0.2 s for the last checkpoint." in err
    assert (
        "the evaluator did not end within 0.2 s after the training, and is ended. Expected: a "
        "script that ends when" in err
    )


def test_an_evaluator_that_has_done_enough_may_end_first(launch, evaluator):
    body = WAIT + WAIT_FOR_ITS_END
    code, _, err = launch(body, options=(*SMALL, evaluator("sys.exit(0)"))).result()
    assert (code, err) == (0, '[evaluator] task {"type": "evaluator", "index": 0} []\n' + IDLE)


def test_a_signal_ends_the_evaluator_too(launch, evaluator):
    launched = launch(
        WAIT + "ready(); time.sleep(3600)", options=(*SMALL, evaluator("time.sleep(3600)"))
    )
    launched.wait_until_ready()
    launched.process.send_signal(signal.SIGTERM)
    code, _, err = launched.result()
    assert code == 143
    assert "kerasps launch" not in err


def test_a_signal_ends_the_wait_for_the_evaluator(launch, evaluator):
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
    launched = launch(WAIT, options=(*SMALL, evaluator(f"import signal; {body}")))
    lines_until(launched.process.stderr, "the training is over")
    launched.process.send_signal(signal.SIGINT)
    assert launched.result()[0] == 0


def test_no_evaluator_is_left_when_the_launcher_is_killed(launch, evaluator):
    launched = launch(
        WAIT + "ready(); time.sleep(3600)", options=(*SMALL, evaluator("time.sleep(3600)"))
    )
    launched.wait_until_ready()
    assert int((launched.here / "evaluating").read_text()) in marked_processes(launched.mark)
    launched.process.send_signal(signal.SIGKILL)
    assert launched.result()[0] == -signal.SIGKILL
