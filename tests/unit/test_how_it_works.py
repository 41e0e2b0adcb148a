"""`docs/how_it_works.md` speaks of files that are there, and of every wing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")
FILES = sorted(set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.py)`", TEXT)))
WINGS = sorted(path.parent.name for path in (ROOT / "kerasps").glob("*/__init__.py"))


def test_files_are_named():
    assert len(FILES) > 40


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_named_is_there(name):
    assert (ROOT / "kerasps" / name).is_file() or (ROOT / name).is_file()


@pytest.mark.parametrize("wing", WINGS)
def test_every_wing_is_told_of(wing):
    assert f"| `{wing}/` |" in TEXT


def journey():
    (text,) = re.findall(r"## Journey of a step\n(.*?)\n## ", TEXT, re.DOTALL)
    return text


@pytest.mark.parametrize("what", ["Ids become row requests", "A gradient meets its slot"])
def test_the_journey_says_where(what):
    assert f"**{what}**" in journey()


def test_the_journey_says_where_a_lost_workers_execution_goes():
    assert "**Where a lost worker's execution goes.**" in journey()
