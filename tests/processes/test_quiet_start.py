"""Nothing of TensorFlow's start is on stderr, and all else is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid

import pytest

from kerasps.cluster.processes.process import child_environment
from kerasps.start_filter import may_use_gpu
from support.launched import Launch
from support.matrix import with_matrix
from support.process_checks import (
    light_environment,
    marked_environment,
    marked_processes,
    reserved_address,
    wait_for,
)

ABSENT = ("TF_CPP_MIN_LOG_LEVEL", "KERASPS_VERBOSE_STARTUP", "TF_CONFIG")

TRAINING = """
import os, sys
FIRST
import keras, kerasps
import numpy as np

print("imported", file=sys.stderr, flush=True)
with kerasps.LocalCluster(num_workers=1, num_ps=1) as cluster:
    strategy = kerasps.ParameterServerStrategy(cluster)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(np.ones((64, 8)), np.ones(64), verbose=0)
    print("level", os.environ.get("TF_CPP_MIN_LOG_LEVEL"))
print("trained", file=sys.stderr, flush=True)
"""
# A warning and an error of TensorFlow's C++ code, which come behind its start.
LATER = """
import tensorflow as tf
try:
    tf.io.decode_png(b"no picture")
except tf.errors.InvalidArgumentError:
    print("refused", file=sys.stderr, flush=True)
"""
FILTER = """
import os, subprocess, sys, threading, time
from kerasps.quiet_start import quiet_start
START = b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\\n"
"""


def environment(**variables):
    env = child_environment(light_environment(os.environ)) | {"KERAS_BACKEND": "tensorflow"}
    for name in ABSENT:
        env.pop(name, None)
    return env | variables


def run(script, **variables):
    return subprocess.run(
        [sys.executable, "-c", script],
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def test_a_coordinator_prints_what_its_script_prints():
    done = run(TRAINING.replace("FIRST", "import kerasps") + LATER)
    assert (done.returncode, done.stdout) == (0, "level None\n")
    start, _, later = done.stderr.partition("trained\n")
    assert start == "imported\n"
    assert re.match(r"W\d{4} .*local_rendezvous.cc:\d+\] .*\n(?:.*\n)*refused\n$", later), later


@pytest.mark.matrix
def test_behind_an_import_that_came_before_kerasps_all_is_quiet():
    done = run(TRAINING.replace("FIRST", "import tensorflow"))
    assert done.returncode == 0
    _, _, behind = done.stderr.partition("imported\n")
    assert behind == "trained\n"


@pytest.mark.parametrize(
    "variable",
    with_matrix(
        ["KERASPS_VERBOSE_STARTUP=1", "TF_CPP_MIN_LOG_LEVEL=0"],
        at_length=["TF_CPP_MIN_LOG_LEVEL=0"],
    ),
)
def test_an_environment_variable_brings_the_lines_back(variable):
    name, _, value = variable.partition("=")
    script = "import kerasps, tensorflow as tf; tf.ones(1)"
    done = run(script, **{name: value})
    assert done.returncode == 0
    # Some are of some processors only.
    assert re.search(r"^I\d{4} .*cpu_feature_guard.cc:\d+\] ", done.stderr, re.MULTILINE)
    assert may_use_gpu() or "failed call to cuInit" in done.stderr


def test_a_missing_tensorflow_is_an_error_as_ever(tmp_path):
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow/__init__.py").write_text("import not_installed")
    done = run(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import kerasps, tensorflow")
    assert done.returncode == 1
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'not_installed'\n")


def test_launch_makes_a_script_quiet_that_imports_tensorflow_first(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("USERS = True")
    body = """
import sitecustomize
import keras, tensorflow as tf
import numpy as np, kerasps
strategy = kerasps.ParameterServerStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
model.fit(np.ones((64, 8)), np.ones(64), verbose=0)
print(json.dumps([
    sitecustomize.USERS, os.environ["PYTHONPATH"], os.environ.get("TF_CPP_MIN_LOG_LEVEL"),
    [path for path in sys.path if "script_start" in path], type(tf.__loader__).__name__,
    type(tf.__spec__.loader).__name__,
]))
print("trained", file=sys.stderr)
"""
    env = environment()
    path = os.pathsep.join(filter(None, [str(tmp_path), env.get("PYTHONPATH")]))
    launched = Launch(
        tmp_path, body, options=("--num-workers=1",), variables=env | {"PYTHONPATH": path}
    )
    try:
        code, out, err = launched.result()
    finally:
        launched.end()
    assert (code, err) == (0, "trained\n"), err
    found = json.loads(out)
    assert found[1].endswith(path)
    assert "script_start" not in found[1]
    # As it was where the tests run.
    level = os.environ.get("TF_CPP_MIN_LOG_LEVEL")
    assert [found[0], *found[2:]] == [True, level, [], "SourceFileLoader", "SourceFileLoader"]


@pytest.mark.parametrize("task_type", ["worker", "ps"])
def test_serve_prints_where_it_listens(task_type, tmp_path):
    mark = str(uuid.uuid4())
    reserved = [reserved_address() for _ in range(3)]
    tasks = {
        job: [address]
        for job, (_, address) in zip(("chief", "worker", "ps"), reserved, strict=True)
    }
    config = {"cluster": tasks, "task": {"type": task_type, "index": 0}}
    process = subprocess.Popen(
        [sys.executable, "-m", "kerasps", "serve"],
        env=marked_environment(mark, tmp_path) | environment(TF_CONFIG=json.dumps(config)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stderr.readline()
        process.terminate()
        out, err = process.communicate()
    finally:
        process.kill()
        for holder, _ in reserved:
            holder.close()
    assert line.startswith(f"kerasps serve: {task_type} 0 listens on port ")
    assert (out, err, process.returncode) == ("", "", 0)
    wait_for(lambda: not marked_processes(mark), "the end of the filter")


def test_lines_of_threads_children_and_forks_come_in_order():
    script = (
        FILTER
        + """
with quiet_start():
    for number in range(1000):
        os.write(2, b"%d\\n" % number + START)
    subprocess.run(["sh", "-c", "echo child >&2"], check=True)
    if not os.fork():
        print("fork", file=sys.stderr, flush=True)
        os._exit(0)
    os.wait()
    print("unflushed", end=" ", file=sys.stderr)
print("after", file=sys.stderr)
os.write(2, START)
"""
    )
    done = run(script)
    numbers = "".join(f"{number}\n" for number in range(1000))
    expected = numbers + "child\nfork\nunflushed after\n" + "WARNING: All log messages before "
    assert done.returncode == 0
    assert done.stderr.startswith(expected)
    assert done.stderr.count("WARNING") == 1


@pytest.mark.parametrize(
    "end",
    with_matrix(
        ["os.abort()", "os.kill(os.getpid(), 9)", "os._exit(3)"],
        at_length=["os.abort()", "os._exit(3)"],
    ),
)
def test_what_a_process_says_before_it_crashes_is_there(end):
    done = run(
        f"{FILTER}\nwith quiet_start():\n    os.write(2, START + b'F0 last words')\n    {end}"
    )
    assert done.returncode != 0
    assert done.stderr == "F0 last words"


def test_a_program_that_was_started_meanwhile_keeps_its_stderr_and_nobody_waits_for_it():
    script = (
        FILTER
        + """
with quiet_start():
    child = subprocess.Popen(
        ["sh", "-c", "read line; echo $line >&2; cat >&2"], stdin=subprocess.PIPE
    )
print("went on", file=sys.stderr, flush=True)
child.communicate(b"behind\\n" + START)
with quiet_start():
    pass
print("end", file=sys.stderr, flush=True)
"""
    )
    done = run(script)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert [line[:7] for line in lines if line != "end"] == ["went on", "behind", "WARNING"]


def test_a_filter_that_is_killed_stops_nobody():
    script = (
        FILTER
        + """
import pathlib, signal
with quiet_start():
    [pid] = pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    os.kill(int(pid), signal.SIGKILL)
    os.waitpid(int(pid), 0)
    for _ in range(100_000):
        try:
            os.write(2, b"into the void\\n")
        except BrokenPipeError:
            pass
print("after", file=sys.stderr, flush=True)
"""
    )
    done = run(script)
    assert (done.returncode, done.stderr) == (0, "after\n")


def test_a_process_without_stderr_starts():
    done = run(f"{FILTER}\nos.close(2)\nwith quiet_start():\n    pass\nprint('on')")
    assert (done.returncode, done.stdout) == (0, "on\n")
