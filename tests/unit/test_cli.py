"""The command line: help, settings and errors.

What the commands do with processes is tested in `tests/processes`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import keras
import psutil
import pytest
import tensorflow as tf

from kerasps.cluster.local.local_cluster import LocalCluster
from kerasps.cluster.processes import process
from kerasps.cluster.processes.gpus import visible_gpus, worker_gpus
from kerasps.tools.cli import main as cli
from kerasps.tools.cli.commands import env as environment
from kerasps.tools.cli.commands import launch as launcher
from kerasps.words import num_bytes
from support.process_checks import PATIENCE_S

JOBS = {"chief": ["127.0.0.1:2222"], "worker": ["127.0.0.1:2223"], "ps": ["127.0.0.1:2224"]}


def run(capsys, *argv):
    """The exit code, stdout and stderr of a command."""
    try:
        code = cli.main(argv)
    except SystemExit as exc:
        code = exc.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("raise SystemExit('the script must not be reached')\n")
    return str(path)


def test_version(capsys):
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert re.fullmatch(r"kerasps \d+\.\d+\.\d+\S*\n", out)


def test_a_command_is_required(capsys):
    code, _, err = run(capsys)
    assert code == 2
    assert "required: COMMAND" in err


def test_plan_refuses_what_it_does_not_know(capsys, script):
    code, _, err = run(capsys, "plan", "--sample-batch", "3", script)
    assert code == 2
    assert "Did you mean --sample-batches?" in err
    code, _, err = run(capsys, "plan", "--sample-batches", "-1", script)
    assert code == 2
    assert "Not a count. Expected: " in err
    code, _, err = run(capsys, "plan", "missing.py")
    assert code == 2
    assert "There is no such script" in err


COUNT = "Not a count. Expected: a whole number of at least"
TIME = "Not a time limit. Expected: a positive number of seconds"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        *(("--num-workers", value, f"{COUNT} 1") for value in ("0", "two", "1.5")),
        *(("--num-ps", "-1", f"{COUNT} 1"), ("--max-restarts", "-1", f"{COUNT} 0")),
        *(("--start-timeout", value, TIME) for value in ("0", "-1", "soon", "inf", "nan")),
    ],
)
def test_a_number_on_the_command_line_is_checked(capsys, script, option, value, message):
    code, _, err = run(capsys, "launch", f"{option}={value}", script)
    assert code == 2
    assert f"argument {option}: {message}. Received: {value!r}." in err


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("KERASPS_NUM_WORKERS", "Not a count"),
        ("KERASPS_NUM_PS", "Not a count"),
        ("KERASPS_START_TIMEOUT", "Not a time limit"),
        ("KERASPS_MAX_RESTARTS", "Not a count"),
        ("KERASPS_EVALUATOR", "Not an evaluation script"),
        ("KERASPS_EVALUATOR_TIMEOUT", "Not a time limit"),
    ],
)
def test_a_wrong_setting_in_the_environment_names_its_variable(
    capsys, monkeypatch, script, variable, message
):
    monkeypatch.setenv(variable, "many")
    code, _, err = run(capsys, "launch", script)
    assert code == 2
    assert f"environment variable {variable}: {message}" in err


@pytest.mark.parametrize("command", ["", "missing.py", "missing.py --steps 3", "it's one quote"])
def test_an_evaluation_script_that_is_missing_is_named(capsys, script, command):
    code, _, err = run(capsys, "launch", f"--evaluator={command}", script)
    assert code == 2
    expected = (
        "Not an evaluation script. Expected: a Python file, and its arguments in the same quotes."
    )
    assert f"argument --evaluator: {expected} Received: {command!r}." in err


def test_an_unknown_option_is_not_taken_for_an_abbreviation(capsys, script):
    code, _, err = run(capsys, "launch", "--num-w=2", script)
    assert code == 2
    assert "unrecognized arguments: --num-w=2" in err


def test_an_option_that_is_like_one_of_ours_is_named(capsys, script):
    code, _, err = run(capsys, "launch", "--num-worker", "2", script)
    assert code == 2
    assert "Did you mean --num-workers? Options of the script go after it." in err


@pytest.mark.parametrize("options", [[], ["--num-workers", "2"]])
def test_launch_without_a_script_says_what_to_give(capsys, options):
    code, _, err = run(capsys, "launch", *options)
    assert code == 2
    assert (
        "No script is named. Expected: the training script, after the options. Received: none. "
        "Give one like `kerasps launch train.py`"
    ) in err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".", "The script is a directory. Expected: a Python file. Received: '.'. Name the file"),
        ("python3", "Received: 'python3'. Leave python3 out, and name only the script."),
    ],
)
def test_what_is_no_script_is_named(capsys, tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, "launch", name, "train.py")
    assert code == 2
    assert message in err


def test_options_behind_the_script_go_to_the_script_and_it_is_said(capsys, script, monkeypatch):
    commands = []
    monkeypatch.setattr(launcher, "launch", lambda command, **_: commands.append(command) or 0)
    code, _, err = run(capsys, "launch", script, "--num-workers=3", "--epochs", "2")
    assert (code, commands[0][2:]) == (0, ["--num-workers=3", "--epochs", "2"])
    assert "kerasps launch: --num-workers=3 after the script is passed to the script" in err
    _, _, err = run(capsys, "launch", script, "--epochs", "2")
    assert "behind" not in err


def test_a_script_that_is_missing_is_named(capsys, tmp_path):
    code, _, err = run(capsys, "launch", str(tmp_path / "train.py"))
    assert code == 2
    assert re.search(
        r"There is no such script. Expected: a Python file. Received: '.*train.py'", err
    )


@pytest.mark.parametrize(
    ("task_type", "fix"),
    [("chief", "Run the training script here."), ("evaluator", "Run the evaluation script here.")],
)
def test_serve_refuses_a_task_that_runs_no_server(capsys, monkeypatch, task_type, fix):
    monkeypatch.setenv(
        "TF_CONFIG", json.dumps({"cluster": JOBS, "task": {"type": task_type, "index": 0}})
    )
    code, _, err = run(capsys, "serve")
    assert code == 2
    assert err == (
        "kerasps serve: error: This task runs no server. Expected: task type 'worker' or 'ps' in "
        f"TF_CONFIG. Received: task type {task_type!r}. {fix}\n"
    )


@pytest.mark.parametrize(
    ("options", "variable", "received"),
    [(["--bind", "198.51.100.7"], "127.0.0.1", "198.51.100.7"), ([], "no.invalid", "no.invalid")],
)
def test_serve_listens_on_an_address_of_this_machine(
    capsys, monkeypatch, options, variable, received
):
    """An option beats its environment variable."""
    cluster = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    monkeypatch.setenv("KERASPS_BIND", variable)
    code, _, err = run(capsys, "serve", *options)
    assert code == 2
    assert "kerasps serve: error: The address to listen on is not one of this machine." in err
    assert f"Received: {received!r}." in err


def test_serve_needs_tf_config(capsys, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    code, _, err = run(capsys, "serve")
    assert code == 2
    assert "kerasps serve: error: TF_CONFIG is not set." in err


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Importing TensorFlow may take as long as it likes."""
    monkeypatch.setattr(environment, "_DEVICES_TIMEOUT_S", PATIENCE_S)


@pytest.fixture
def broken_tensorflow(monkeypatch, tmp_path):
    """What `kerasps env` finds, which is quick."""
    (tmp_path / "tensorflow.py").write_text("raise ImportError('this TensorFlow is broken')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_env_calls_a_wrong_tf_config_wrong(capsys, monkeypatch, broken_tensorflow):
    monkeypatch.setenv(
        "TF_CONFIG",
        json.dumps({"cluster": {"worker": ["host:1"]}, "task": {"type": "worker", "index": 0}}),
    )
    code, out, _ = run(capsys, "env")
    assert code == 1
    assert "TF_CONFIG: wrong: The cluster in TF_CONFIG has no ps." in out


def test_env_prints_versions_devices_and_variables(capsys, monkeypatch):
    from importlib.metadata import version

    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("KERASPS_CONNECT_TIMEOUT", "7")
    code, out, _ = run(capsys, "env")
    lines = dict(line.split(": ", 1) for line in out.splitlines())
    assert code == 0
    # A nightly build may stand beside a release.
    assert keras.__version__ in lines["keras"].replace(",", "").split()
    assert tf.__version__.replace("-", ".") in lines["tensorflow"].replace("-", ".")
    for package in ("grpcio", "protobuf", "numpy"):
        assert lines[package] == version(package)
    total = num_bytes(psutil.virtual_memory().total)
    assert re.fullmatch(rf"{total}, of which [\d.]+ \wB are free", lines["memory"])
    assert "/physical_device:CPU:0" in lines["devices"]
    assert lines["KERASPS_CONNECT_TIMEOUT"] == "7"
    assert lines["TF_CONFIG"] == "not set"
    assert {"kerasps", "python", "platform", "processors"} <= set(lines)


def test_env_says_why_tensorflow_fails(capsys, monkeypatch, broken_tensorflow):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    code, out, _ = run(capsys, "env")
    assert code == 0
    assert "devices: TensorFlow fails: ImportError: this TensorFlow is broken\n" in out


def test_env_says_that_a_package_is_not_installed():
    assert environment._version("no-such-package-at-all") == "not installed"


def test_env_finds_a_package_that_a_nightly_build_installed(monkeypatch, tmp_path):
    info = tmp_path / "keras_nightly-3.16.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: keras-nightly\nVersion: 3.16.0\n")
    (info / "top_level.txt").write_text("some_nightly_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert environment._version("some_nightly_package") == "3.16.0 (keras-nightly)"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Tue Jan 1\nGCC", "570.86.15"),
        (None, "none"),
    ],
)
def test_env_reads_the_version_of_the_driver(monkeypatch, tmp_path, text, expected):
    if text is not None:
        (tmp_path / "version").write_text(text)
    monkeypatch.setattr(environment, "_DRIVER", tmp_path / "version")
    assert environment._driver() == expected


@pytest.mark.parametrize(
    ("name", "values", "error", "message"),
    [
        ("num_workers", (0, -1), ValueError, "Expected: an int of at least 1"),
        ("num_ps", (1.0, "2", True), TypeError, "Expected: an int of at least 1"),
        ("start_timeout", (0, float("inf")), ValueError, "not a time limit"),
        ("start_timeout", ("60", True), TypeError, "not a time limit"),
        ("max_restarts", (-1,), ValueError, "not a count. Expected: .* least 0"),
        ("max_restarts", (1.0, None, True), TypeError, "not a count. Expected: .* least 0"),
    ],
)
def test_an_argument_of_a_local_cluster_is_checked(name, values, error, message):
    for value in values:
        with pytest.raises(error, match=rf"`{name}` is .*{message}.*Received: {value!r}"):
            LocalCluster(**{name: value})


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        ("", []),
        ("-1", []),
        ("0", ["0"]),
        ("0, 2", ["0", "2"]),
        ("1,-1,0", ["1"]),
        ("GPU-a,GPU-b", ["GPU-a", "GPU-b"]),
    ],
)
def test_cuda_visible_devices_says_which_gpus_there_are(visible, gpus):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": visible}) == gpus


def test_without_cuda_visible_devices_all_gpus_of_the_machine_count(capfd):
    import subprocess

    listed = Path("/proc/driver/nvidia/gpus")
    try:
        smi = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True
        ).stdout.splitlines()
    except FileNotFoundError:
        smi = []
    expected = len(list(listed.iterdir())) if listed.is_dir() else len(smi)
    assert visible_gpus({}) == [str(index) for index in range(expected)]


@pytest.mark.parametrize(
    ("num_workers", "gpus", "split"),
    [
        (2, [], None),
        (2, ["0"], None),
        (2, ["0", "1"], ["0", "1"]),
        (1, ["0", "1"], ["0,1"]),
        (2, ["0", "1", "2"], ["0", "1,2"]),
        (3, ["5", "7"], ["5", "7", "5"]),
    ],
)
def test_gpus_are_split_among_the_workers(num_workers, gpus, split):
    assert worker_gpus(num_workers, gpus) == split


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "signal SIGKILL"),
        (-11, "signal SIGSEGV"),
        (-63, "signal 63"),
    ],
)
def test_an_exit_code_is_described_in_words(code, words):
    assert process.describe_exit_code(code) == words


def test_the_last_lines_of_a_log_are_read_without_the_rest(tmp_path):
    log = tmp_path / "log"
    assert process.last_lines(log) == ""
    log.write_bytes(b"x" * 100_000 + b"\nbad \xff byte\nlast\n\n")
    assert process.last_lines(log, 2) == "bad \ufffd byte\nlast"
    assert len(process.last_lines(log, 5)) < 50_000
    assert process.last_lines(log, 5, begin=log.stat().st_size - 6) == "last"


def test_a_child_finds_this_kerasps_without_shadowing_the_standard_library():
    import kerasps

    env = process.child_environment({"PYTHONPATH": "/mine"})
    root = str(Path(kerasps.__file__).resolve().parent.parent)
    expected = "/mine" if "site-packages" in root else f"{root}:/mine"
    assert env == {"PYTHONPATH": expected}
