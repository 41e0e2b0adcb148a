"""The pages of the built site, as a reader's browser gets them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
SITE = CHECKOUT / "site"
LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}


@dataclass
class SitePage:
    """A page: what it loads, the anchors in it, and how often each element is in the article."""

    path: str
    loaded: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    elements: dict[str, int] = field(default_factory=dict)


class _Reader(HTMLParser):
    def __init__(self, page: SitePage) -> None:
        super().__init__()
        self.page, self.in_article = page, False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.in_article |= tag == "article"
        self.page.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if self.in_article:
            self.page.elements[tag] = self.page.elements.get(tag, 0) + 1
        for name, value in attrs:
            if (tag, name) in LOADED and not (tag == "link" and given.get("rel") != "stylesheet"):
                self.page.loaded.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        self.in_article &= tag != "article"


@functools.cache
def site_pages() -> dict[str, SitePage]:
    """Return the pages of the site by their paths, such as `sharding/index.html`."""
    found = {}
    for file in sorted(SITE.rglob("*.html")):
        page = SitePage(file.relative_to(SITE).as_posix())
        _Reader(page).feed(file.read_text("utf-8"))
        found[page.path] = page
    return found
