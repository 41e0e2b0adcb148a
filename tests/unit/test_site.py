"""Every page and every public name has its place on the site, which `tox -e docs` builds."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest
import yaml

import kerasps
from support.documentation import code_blocks

CHECKOUT = Path(__file__).resolve().parents[2]
DOCS = CHECKOUT / "docs"
INDEX = (DOCS / "index.md").read_text("utf-8")
NAV = yaml.safe_load((CHECKOUT / "mkdocs.yml").read_text("utf-8"))["nav"]
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


def entries(nav):
    """The titles and paths in a part of the navigation."""
    for entry in nav:
        ((title, value),) = entry.items()
        if isinstance(value, list):
            yield from entries(value)
        else:
            yield title, value


def test_there_are_four_groups():
    assert [group for entry in NAV for group in entry] == ["Start", "Guides", "How it works", "API"]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_in_one_group(page):
    """Give it a line in `mkdocs.yml`."""
    found = [path for _, path in entries(NAV) if page == path or fnmatch.fnmatch(page, f"{path}*")]
    assert len(found) == 1, f"docs/{page} is not in one group of `nav` in mkdocs.yml: {found}"


def test_the_title_of_a_guide_is_a_question():
    guides = next(entry["Guides"] for entry in NAV if "Guides" in entry)
    assert [title for title, _ in entries(guides) if not title.endswith("?")] == []


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("decisions/")])
def test_the_home_page_links_to_every_page(page):
    assert page == "index.md" or f"]({page})" in INDEX


def test_every_public_name_is_on_one_api_page():
    pages = [page.read_text("utf-8") for page in (DOCS / "api").glob("*.md")]
    shown = [name for page in pages for name in re.findall(r"^::: kerasps\.(\S+)$", page, re.M)]
    shown.remove("errors")  # the module, above the classes in it
    public = [name for name in kerasps.__all__ if name not in ("__version__", "metrics")]
    public += [f"metrics.{name}" for name in kerasps.metrics.__all__]
    assert sorted(shown) == sorted(public)


def test_the_home_page_shows_the_script_of_the_readme_whose_marked_lines_are_three():
    (code,) = code_blocks(INDEX)
    assert code in code_blocks((CHECKOUT / "README.md").read_text("utf-8"))
    assert code.count("  # <- ") == 3


def test_what_checks_everything_builds_the_site():
    command = "-e lint,types,docs,py"
    for path in (".ci/run", "README.md"):
        assert command in (CHECKOUT / path).read_text("utf-8"), path
