"""`docs/how_it_works.md`, and the pages of the wings, speak of files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")
PAGES = sorted((ROOT / "kerasps").glob("*/README.md"))
ALL = TEXT + "".join(page.read_text(encoding="utf-8") for page in PAGES)
FILES = sorted(set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.py)`", ALL)))
WINGS = sorted(path.parent.name for path in (ROOT / "kerasps").glob("*/__init__.py"))


def test_files_are_named():
    assert len(FILES) > 40


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_named_is_there(name):
    assert (ROOT / "kerasps" / name).is_file() or (ROOT / name).is_file()


@pytest.mark.parametrize("wing", WINGS)
def test_every_wing_is_told_of(wing):
    assert f"| `{wing}/` |" in TEXT


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_a_page_of_a_wing_is_linked_and_its_links_lead_somewhere(page):
    assert f"](../kerasps/{page.parent.name}/README.md)" in TEXT
    for target in re.findall(r"\]\(([^)#:]+\.md)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).is_file(), target


def journey():
    (text,) = re.findall(r"## Journey of a step\n(.*?)\n## ", TEXT, re.DOTALL)
    return text


@pytest.mark.parametrize("what", ["Ids become row requests", "A gradient meets its slot"])
def test_the_journey_says_where(what):
    assert f"**{what}**" in journey()


def test_the_journey_says_where_a_lost_workers_execution_goes():
    assert "**Where a lost worker's execution goes.**" in journey()
