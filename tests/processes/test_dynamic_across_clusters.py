"""Files of tables without a vocabulary are the same for any number of ps: 3 save, 1 loads, trains
and saves, 2 load. One process without ps loads what the 2 saved.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.process_checks import run_and_report

CHAIN = Path(__file__).with_name("delta_chain.py")
SCRIPT = Path(__file__).with_name("dynamic_across_clusters.py")
NUMBERS = [3, 1, 2, 0]


@pytest.fixture(scope="module")
def reports(once, tmp_path_factory):
    def run():
        directories = [tmp_path_factory.mktemp(f"with-{number}-ps") for number in NUMBERS]
        before = [[], *([directory] for directory in directories)]
        return [
            run_and_report(SCRIPT, number, directory, *earlier)
            for number, directory, earlier in zip(NUMBERS, directories, before, strict=False)
        ]

    return once("dynamic-across-clusters", run)


@pytest.mark.parametrize("index", [1, 2, 3])
def test_every_format_is_loaded_bit_for_bit(reports, index):
    assert reports[index]["different"] == []


@pytest.mark.parametrize("index", [1, 2, 3])
def test_what_is_saved_again_is_equal_byte_for_byte(reports, index):
    assert reports[index]["content"] == []


@pytest.mark.parametrize("index", [1, 2, 3])
def test_tables_are_taken_by_name_from_every_kind_of_file(reports, index):
    assert min(reports[index]["taken"]) > 0
    assert len(reports[index]["taken"]) == 2 * 4
    assert reports[index]["taken_wrong"] == []


@pytest.mark.parametrize("index", [1, 2])
def test_training_goes_on_alike(reports, index):
    assert reports[index]["trained_apart"] == []


@pytest.mark.parametrize("index", [1, 2])
def test_a_backup_is_resumed_with_another_number_of_ps(reports, index):
    # A ps was lost in the first training.
    assert reports[index]["resumed_apart"] == []


def test_a_lost_ps_is_named_and_leaves_the_file_that_was_there(reports):
    assert "ps 1 at " in reports[0]["lost"]
    assert reports[0]["unchanged"]


def test_the_tables_have_rows(reports):
    assert all(min(report["num_rows"]) > 0 for report in reports[:3])


def test_a_chain_of_deltas_is_restored_bit_for_bit(tmp_path):
    for number, num_ps in enumerate([1, 3, 2]):
        report = run_and_report(CHAIN, num_ps, tmp_path, 6 * (number + 1))
        assert report["different"] == []
        assert report["lengths"][0] == 6
        assert report["evicted"] > 0
