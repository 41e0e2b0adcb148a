"""The pages of the built site, as a reader's browser gets them."""

from __future__ import annotations

import functools
import posixpath
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

CHECKOUT = Path(__file__).resolve().parents[2]
SITE = CHECKOUT / "site"
LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}


@dataclass
class SitePage:
    """A page: what it links to, what it loads, and the anchors in it."""

    path: str
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    # How often each element is in the article.
    elements: dict[str, int] = field(default_factory=dict)
    # The links of the navigation.
    navigation: list[str] = field(default_factory=list)


class _Reader(HTMLParser):
    def __init__(self, page: SitePage) -> None:
        super().__init__()
        self.page, self.in_article, self.in_navigation = page, False, False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.in_article |= tag == "article"
        self.in_navigation |= tag == "nav" and "md-nav--primary" in (given.get("class") or "")
        self.page.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if self.in_article:
            self.page.elements[tag] = self.page.elements.get(tag, 0) + 1
        for name, value in attrs:
            if (tag, name) in LOADED and not (tag == "link" and given.get("rel") != "stylesheet"):
                self.page.loaded.append(value or "")
            elif name in ("href", "src"):
                self.page.links.append(value or "")
        if self.in_navigation and tag == "a" and given.get("href"):
            self.page.navigation.append(given["href"])

    def handle_endtag(self, tag: str) -> None:
        self.in_article &= tag != "article"
        # The navigation is before the article.
        self.in_navigation &= tag != "article"


@functools.cache
def site_pages() -> dict[str, SitePage]:
    """Return the pages of the site by their paths, such as `sharding/index.html`."""
    found = {}
    for file in sorted(SITE.rglob("*.html")):
        page = SitePage(file.relative_to(SITE).as_posix())
        _Reader(page).feed(file.read_text("utf-8"))
        found[page.path] = page
    return found


def target_of(page: SitePage, link: str) -> tuple[str, str] | None:
    """Return the file of the site that a link leads to and the anchor; None for other sites."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    path = posixpath.join(posixpath.dirname(page.path), unquote(parts.path))
    path = posixpath.normpath(path).lstrip("/") if parts.path else page.path
    if (SITE / path).is_dir():
        path = posixpath.normpath(f"{path}/index.html")
    return path, unquote(parts.fragment)
