"""The scripts of the pages for users run, and do what the pages say of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from support.documentation import CHECKOUT, code_blocks
from support.process_checks import MARK, marked_environment, marked_processes, wait_for


@contextlib.contextmanager
def running(tmp_path, page, command, *options, block=0):
    """Runs a script of a page, the first one, by a command of kerasps, in this directory."""
    text = (CHECKOUT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    (tmp_path / "train.py").write_text(code_blocks(text)[block])
    env = marked_environment(
        str(tmp_path), tmp_path, KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="3"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "kerasps", command, *options, "train.py"],
        env=env,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
    assert marked_processes(env[MARK]) == {}


def output_of(process):
    out, err = process.communicate()
    assert process.returncode == 0, out[-2000:] + err[-6000:]
    return out, err


def words_of(text):
    """The lines of a table and of sentences, without its frame, as lists of words."""
    lines = (re.sub(r"[┃│]", " ", line).split() for line in text.splitlines())
    return [words for words in lines if words and words[0][0] not in "┏┡└├"]


def test_the_plan_of_the_page_on_sizes_is_what_kerasps_plan_prints(tmp_path):
    with running(tmp_path, "sizing", "plan", "--num-workers=8", "--num-ps=4") as process:
        printed, _ = output_of(process)
    page = (CHECKOUT / "docs" / "sizing.md").read_text(encoding="utf-8")
    shown = words_of(code_blocks(page, "")[0])
    assert len(shown) == 10
    missing = [line for line in shown if line not in words_of(printed)]
    assert missing == []
    # What the page goes on with.
    assert "A step pulls 33.3 MB and pushes 33.3 MB" in printed
    assert "pulled = pushed = 33.3e6" in page
    assert "of_one_ps = 8.33e6" in page
    assert "51.2 GB in all, 12.8 GB on each of four ps" in " ".join(page.split())


def test_large_tables_are_spread_read_by_rows_and_saved_whole(tmp_path):
    options = ("--num-workers=2", "--num-ps=2")
    with running(tmp_path, "for_large_tables", "launch", *options) as process:
        out, _ = output_of(process)
    assert "by rows: 1 variable, 64,000,000 bytes" in out
    rows = re.findall(r"^ *[01] +([\d,]+) +[\d.,]+ ", out, re.MULTILINE)
    first, second = (int(number.replace(",", "")) for number in rows[-2:])
    assert 0.8 < first / second < 1.25
    saved = dict(tf.train.list_variables(str(tmp_path / "checkpoints" / "model-1")))
    assert [1_000_000, 16] in saved.values()


@pytest.mark.matrix
def test_users_whom_nobody_knew_get_rows(tmp_path):
    options = ("--num-workers=2", "--num-ps=2")
    with running(tmp_path, "tables_without_a_vocabulary", "launch", *options) as process:
        out, _ = output_of(process)
    assert re.findall(r"^(\d+) users$", out, re.MULTILINE) == ["100", "200"]


@pytest.mark.matrix
def test_rows_make_room_for_new_ones(tmp_path):
    options = ("--num-workers=1", "--num-ps=2")
    page = "tables_without_a_vocabulary"
    with running(tmp_path, page, "launch", *options, block=2) as process:
        out, _ = output_of(process)
    (rows, evicted) = re.findall(r"'(?:rows|evicted)': (\d+)", out)
    assert 890 <= int(rows) <= 902
    assert int(rows) + int(evicted) == 5000
    assert re.findall(r"^(\d+)$", out, re.MULTILINE) in (["1"], ["2"])


@pytest.mark.matrix
def test_a_worker_that_is_told_to_go_costs_no_update(tmp_path):
    options = ("--num-workers=2", "--num-ps=1")
    with running(tmp_path, "for_preemptible_workers", "launch", *options) as process:
        env = marked_environment(str(tmp_path), tmp_path)

        def status():
            # Other runs of this user may be on this machine.
            for pid in set(marked_processes(env[MARK])) - {process.pid}:
                top = [sys.executable, "-m", "kerasps", "top", "--json", str(pid)]
                if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    done = subprocess.run(top, env=env, capture_output=True, text=True)
                    found = json.loads(done.stdout)["status"] if not done.returncode else {}
                    return found if found.get("steps", 0) > 100 else None
            return None

        trained = wait_for(status, what="a step")
        os.kill(trained["workers"][1]["usage"]["pid"], signal.SIGTERM)
        out, err = output_of(process)
    assert "6000 updates" in out
    assert re.search(r"^kerasps launch: worker 1 .*started again", err, re.MULTILINE)


@pytest.mark.matrix
def test_a_script_for_gpus_says_where_it_computes(tmp_path):
    options = ("--num-workers=2", "--num-ps=1")
    with running(tmp_path, "for_gpu_workers", "launch", *options) as process:
        out, _ = output_of(process)
    assert re.search(r"^worker 0 computes on \('[CG]PU:0',", out, re.MULTILINE)
    assert re.search(r"^worker 1 computes on ", out, re.MULTILINE)
    assert re.search(r"Trace of \d+ steps: logs/trace_", out)
