"""What one process saves, another loads, whatever cluster either has: plain Keras, 2 ps with 2
shards, 3 ps with 5.

Each process loads all formats of the ones before it and compares them bit for bit, trains on and
saves. The second is killed by SIGKILL half-way through saving again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.process_checks import run_and_report

SCRIPT = Path(__file__).with_name("saving_across_clusters.py")


@pytest.fixture(scope="module")
def reports(once, tmp_path_factory):
    def run():
        directory = tmp_path_factory.mktemp("saved")
        roles = ("plain_first", "two_ps", "three_ps", "plain_last")
        return {role: run_and_report(SCRIPT, role, directory) for role in roles}

    return once("saving-across-clusters", run)


@pytest.mark.parametrize("role", ["two_ps", "three_ps", "plain_last"])
def test_every_format_is_loaded_bit_for_bit(reports, role):
    assert reports[role]["different"] == []


def test_training_goes_on_from_what_was_saved(reports):
    assert [
        reports[role]["iterations"] for role in ("plain_first", "two_ps", "three_ps", "plain_last")
    ] == [
        [0, 6],
        [6, 12],
        [12, 18],
        [18],
    ]


def test_the_table_was_in_shards(reports):
    assert (reports["two_ps"]["num_shards"], reports["three_ps"]["num_shards"]) == (2, 5)


def test_an_exported_model_answers_in_a_plain_process(reports):
    assert all(difference < 1e-6 for difference in reports["plain_last"]["answers"].values())


def test_a_directory_that_no_ps_sees_is_written_by_the_coordinator(reports):
    suffixes = reports["two_ps"]["not_shared"]
    assert suffixes.count(".index") == 1
    assert len(suffixes) > 1


def test_a_value_of_another_shape_is_refused_by_name(reports):
    refused = reports["two_ps"]["refused"]
    for text in refused.values():
        assert "has a value of another shape than the variable" in text
        assert "Expected: (802, 16). Received: (801, 16)" in text
    assert "Load it into a model of the size that was saved." in refused["weights"]
    assert "Restore it into a model of the size that was saved." in refused["checkpoint"]


def test_a_killed_save_leaves_what_was_there_before(reports):
    # What it left was equal to the save before, or `different` would name it; these were being
    # written.
    assert reports["three_ps"]["unfinished"] == [
        ".partial.saved.keras",
        ".partial.saved.weights.h5",
        "ckpt-1_temp",
    ]


def test_the_next_save_removes_what_a_killed_one_left(reports):
    assert reports["three_ps"]["unfinished_after_saving"] == []


def test_a_backup_knows_its_epoch_where_the_file_that_says_so_was_not_written(reports):
    assert (reports["three_ps"]["epoch_in_json"], reports["three_ps"]["epoch_restored"]) == (1, 2)


def test_a_lost_ps_is_named_and_leaves_the_file_that_was_there(reports):
    assert "ps 1 at " in reports["three_ps"]["lost"]
    assert "is gone, and with it its variables." in reports["three_ps"]["lost"]
    assert reports["three_ps"]["unchanged"]
