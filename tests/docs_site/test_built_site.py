"""The built site: elements, API pages, titles. `tox -e docs` builds it, which checks links and
navigation, and runs this.
"""

from __future__ import annotations

import re

import pytest
from markdown_it import MarkdownIt

import kerasps
from docs_site.pages import CHECKOUT, SITE, site_pages

# GitHub and the site must see as many of each.
ELEMENTS = ("li", "ul", "ol", "tr", "pre", "h2", "h3", "blockquote")
HEADINGS = re.compile(r'<h2 id="([\w.]+)" class="doc doc-heading"')


def sources():
    """From the path of a page on the site to the Markdown that GitHub shows."""
    for file in sorted([*CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").rglob("*.md")]):
        path = file.relative_to(CHECKOUT)
        path = path.relative_to("docs") if path.parts[0] == "docs" else "repository" / path
        folder = path.parent if path.stem in ("index", "README") else path.with_suffix("")
        if "api" not in path.parts:
            yield (folder / "index.html").as_posix(), file
    for file in sorted([*CHECKOUT.glob("kerasps/*/README.md"), *CHECKOUT.glob("*s/README.md")]):
        folder = file.relative_to(CHECKOUT).parent
        yield f"repository/{folder}/index.html", file


SOURCES = dict(sources())
# Two whose heading is the name of the project.
NAMED = ("index.html", "repository/index.html")


def test_nothing_is_loaded_from_other_hosts():
    assert len(site_pages()) > 50
    loaded = {(p.path, link) for p in site_pages().values() for link in p.loaded}
    assert [each for each in loaded if re.match(r"(?!data:)\w+:|//", each[1])] == []
    styles = [file.read_text("utf-8") for file in SITE.rglob("*.css")]
    assert styles
    for style in styles:
        assert re.findall(r"url\([\"']?(?:https?:)?//[^)]*\)|@import[^;]*//[^;]*;", style) == []


@pytest.mark.parametrize("path", SOURCES)
def test_a_page_has_the_elements_that_github_shows(path):
    text = MarkdownIt("gfm-like", {"linkify": False}).render(SOURCES[path].read_text("utf-8"))
    on_github = {name: len(re.findall(f"<{name}[ >]", text)) for name in ELEMENTS}
    elements = site_pages()[path].elements
    assert {name: elements.get(name, 0) for name in ELEMENTS} == on_github


def public_names():
    modules = ("layers", "metrics", "serving")
    others = ("__version__", "callbacks", *modules)  # the names of `callbacks` are the package's
    yield from (name for name in kerasps.__all__ if name not in others)
    for place in modules:
        # Importing them would take Keras.
        module = (CHECKOUT / "kerasps" / place / "__init__.py").read_text("utf-8")
        names = re.findall(r'"(\w+)"', re.search(r"__all__ = \[(.*?)\]", module, re.DOTALL)[1])
        assert names
        yield from (f"{place}.{name}" for name in names)


def test_api_pages_have_the_public_names_and_no_private_ones():
    pages = (SITE / "api").glob("*/index.html")
    shown = [name for page in pages for name in HEADINGS.findall(page.read_text("utf-8"))]
    assert sorted(shown) == sorted(f"kerasps.{name}" for name in public_names())
    anchors = {a for page in site_pages().values() if page.path[:4] == "api/" for a in page.anchors}
    assert {"kerasps.LocalCluster.restart", "kerasps.DatasetCreator.__call__"} <= anchors
    # What is inherited from a base class that is not public.
    assert "kerasps.WorkerDrivenStrategy.description" in anchors
    assert [a for a in anchors if "._" in a and not a.endswith(".__call__")] == []


def test_a_page_has_its_neighbours_a_link_to_its_source_and_the_version():
    page = (SITE / "sharding/index.html").read_text("utf-8")
    repository = "https://github.com/kerasps/kerasps"
    assert f'href="{repository}/edit/main/docs/sharding.md"' in page
    assert re.search(rf'href="{repository}"[^>]*class="md-source"', page)
    assert f"<br>{kerasps.__version__}</div>" in page
    assert len(re.findall(r'class="md-footer__link md-footer__link--(?:prev|next)"', page)) == 2
    readme = (SITE / "repository/index.html").read_text("utf-8")
    assert f'href="{repository}/edit/main/README.md"' in readme


def titles(page):
    """The title of a page in the list of pages, and its heading."""
    text = (SITE / page).read_text("utf-8")
    ((listed,), (heading,)) = (
        re.findall(pattern, text, re.DOTALL)
        for pattern in (r"<title>(.*?) - kerasps</title>", r"<h1[^>]*>(.*?)<a ")
    )
    return listed, re.sub(r"<[^>]+>", "", heading)


@pytest.mark.parametrize("page", [page for page in SOURCES if page not in NAMED])
def test_the_title_of_a_page_is_its_heading(page):
    listed, heading = titles(page)
    assert listed == heading


@pytest.mark.parametrize("page", ["tf_keras", "estimator", "recommenders_addons"])
def test_scripts_before_and_after_are_in_two_tabs(page):
    text = (SITE / f"moving_from_{page}/index.html").read_text("utf-8")
    labels = re.findall(r'<label for="__tabbed_1_\d">(.*?)</label>', text)
    assert labels == ["Before", "After"]


def test_the_site_holds_what_pages_need_alone():
    assert [path for path in SITE.rglob("*") if path.suffix == ".pyc"] == []
    assert {"site_hook.py", "theme"} & {path.name for path in SITE.iterdir()} == set()
