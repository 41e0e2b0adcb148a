"""Every page and every public name has its place on the site, which `tox -e docs` builds."""

from __future__ import annotations

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


def paths(nav):
    """The paths in a part of the navigation."""
    for entry in nav:
        if isinstance(entry, str):
            yield entry
            continue
        ((_, value),) = entry.items()
        yield from paths(value) if isinstance(value, list) else [value]


GUIDES = [*paths(next(entry["Guides"] for entry in NAV if "Guides" in entry))]


@pytest.mark.parametrize("page", GUIDES)
def test_the_title_of_a_guide_is_a_question(page):
    assert re.match(r"# .+\?\n", (DOCS / page).read_text("utf-8"))


@pytest.mark.parametrize("page", ["install.md", *GUIDES])
def test_the_readme_links_to_every_guide(page):
    path = (DOCS / page).resolve().relative_to(CHECKOUT)
    assert f"({path})" in (CHECKOUT / "README.md").read_text("utf-8")


def test_every_public_name_is_on_one_api_page():
    pages = [page.read_text("utf-8") for page in (DOCS / "api").glob("*.md")]
    shown = [name for page in pages for name in re.findall(r"^::: kerasps\.(\S+)$", page, re.M)]
    shown.remove("errors")  # the module, above the classes in it
    modules = {place: getattr(kerasps, place) for place in ("layers", "metrics", "serving")}
    others = ("__version__", "callbacks", *modules)  # the names of `callbacks` are the package's
    public = [name for name in kerasps.__all__ if name not in others]
    public += [f"{place}.{name}" for place, module in modules.items() for name in module.__all__]
    assert sorted(shown) == sorted(public)


def test_the_home_page_shows_the_script_of_the_readme_whose_comments_are_three():
    (code,) = code_blocks(INDEX)
    assert code in code_blocks((CHECKOUT / "README.md").read_text("utf-8"))
    marked = re.findall(r"^ *# .*\n *(.*)$", code, re.MULTILINE)
    assert len(marked) == 3
    # Each line that uses kerasps is below a comment, and no other one is.
    assert set(re.findall(r".*(?:kerasps\.|strategy\.).*", code)) == {
        line for line in code.splitlines() if line.strip() in marked
    }


def test_what_checks_everything_builds_the_site():
    command = "-e lint,types,docs,py"
    for path in (".ci/run", "README.md"):
        assert command in (CHECKOUT / path).read_text("utf-8"), path
