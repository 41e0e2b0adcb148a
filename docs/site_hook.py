"""Hooks for MkDocs, with which pages written for GitHub work on the site too.

Pages link to files of the repository: `../README.md`, `../examples/dlrm.py`, `../deploy/slurm/`.
Each linked file becomes a page of the site, below `repository/`: Markdown as it is, other files as
code, a folder as a list. So no link needs the address of the repository. Headings get GitHub's
anchors, and lists can be indented as GitHub allows. Code before and after a move is in two tabs.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from textwrap import indent
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
FOLDER = "repository"
# Code, in which a link is none; or the target of a link, without its anchor.
LINK = re.compile(
    r"(?P<code>^ *(?P<fence>```+|~~~+).*?^ *(?P=fence)|`[^`\n]+`)|(?<=\]\()(?P<target>[^)\s#:]+)",
    re.MULTILINE | re.DOTALL,
)
ITEM = re.compile(r"(?:[-*+]|\d+\.) +")
FENCE = re.compile(r" *(```+|~~~+)")
# A paragraph "Before: ..." with its code, and then one "After: ...".
BEFORE_AND_AFTER = re.compile(
    r"^Before: (?P<before>(?:[^\n]+\n)+\n```\w+\n.*?^```\n)\n"
    r"After: (?P<after>(?:[^\n]+\n)+\n```\w+\n.*?^```\n)",
    re.MULTILINE | re.DOTALL,
)
# A search for an error's text shows the page of errors first. This factor brings
# 76 of its 87 messages to the top, 32 brings 65, and 1 none.
BOOSTS = {"errors.md": 300.0}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sbatch": "bash"}
PICTURES = (".svg", ".png", ".jpg", ".gif")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give headings GitHub's anchors, and find the pages and titles of the navigation."""
    config.mdx_configs["toc"]["slugify"] = github_anchor
    module = (ROOT / "kerasps" / "__init__.py").read_text("utf-8")
    config.extra["release"] = re.search(r'^__version__ = "(.+)"$', module, re.MULTILINE)[1]
    config.nav = expanded(config.nav)
    return config


def github_anchor(heading: str, separator: str = "-") -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def expanded(entry: Any) -> Any:
    """Return an entry of the navigation with titles and paths of the site, a folder as pages."""
    if isinstance(entry, list):
        # A folder without pages is left out.
        return [found for found in map(expanded, entry) if found != []]
    if isinstance(entry, dict):
        ((title, value),) = entry.items()
        if isinstance(value, str) and not value.endswith("/"):
            return {title: site_path(repository_of(value))}
        value = expanded(value)
        return {title: value} if value != [] else []
    path = repository_of(entry)
    if not entry.endswith("/"):
        return {title_of(ROOT / path): site_path(path)}
    pages = sorted((ROOT / path).glob("*.md")) or sorted((ROOT / path).glob("*/README.md"))
    return [{title_of(page): site_path(page.relative_to(ROOT).as_posix())} for page in pages]


def repository_of(entry: str) -> str:
    """Return the path in the repository of an entry of the navigation."""
    return posixpath.normpath(posixpath.join("docs", entry))


def title_of(page: Path) -> str:
    """Return the first heading of a page, without its marks."""
    (heading,) = re.findall(r"\A(?:---.*?---)?\s*# (.+)", page.read_text("utf-8"))
    return heading.replace("`", "")


def site_path(path: str) -> str:
    """Return the path on the site, as that of a source, of a file of the repository."""
    if (ROOT / path).is_dir():
        path = f"{path}/index.md"
    elif not path.endswith((".md", *PICTURES)):
        path = f"{path}.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{FOLDER}/{path}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the repository that pages link to, or that the navigation names."""
    named = re.findall(rf"'{FOLDER}/([^']+)'", str(config.nav))
    pending = [f"docs/{f.src_uri}" for f in files.documentation_pages()] + named
    seen = set()
    while pending:
        path = pending.pop()
        if path in seen or path.startswith("../") or not (ROOT / path).exists():
            continue
        seen.add(path)
        if files.get_file_from_path(site_path(path)) is None:
            files.append(added(path, config))
        text = "" if path.endswith(PICTURES) else text_of(path)
        pending += [resolved(path, m["target"]) for m in LINK.finditer(text) if m["target"]]
    return files


def added(path: str, config: MkDocsConfig) -> File:
    """Return a file of the repository as one of the site."""
    if path.endswith(PICTURES):
        return File.generated(config, site_path(path), abs_src_path=str(ROOT / path))
    level = InclusionLevel.INCLUDED if path.endswith(".md") else InclusionLevel.NOT_IN_NAV
    return File.generated(config, site_path(path), content=text_of(path), inclusion=level)


def text_of(path: str) -> str:
    """Return a file of the repository as Markdown."""
    file = ROOT / path
    if file.is_dir():
        names = sorted(f"{f.name}/" if f.is_dir() else f.name for f in file.iterdir())
        shown = [name for name in names if name[0] not in "._"]
        return f"# {path}\n\n" + "\n".join(f"- [{name}]({name})" for name in shown)
    text = file.read_text("utf-8")
    if file.suffix == ".md":
        return text
    if file.suffix == ".ipynb":
        return "\n\n".join(map(cell_text, json.loads(text)["cells"]))
    return f"# {path}\n\n````{LANGUAGES.get(file.suffix, 'text')}\n{text}\n````\n"


def cell_text(cell: dict[str, Any]) -> str:
    """Return a cell of a notebook as Markdown, without its outputs."""
    source = "".join(cell["source"])
    return source if cell["cell_type"] == "markdown" else f"````python\n{source}\n````"


def resolved(path: str, target: str) -> str:
    """Return the path in the repository that a link on a page leads to."""
    folder = path if (ROOT / path).is_dir() else posixpath.dirname(path)
    path = posixpath.normpath(posixpath.join(folder, target))
    homes = [posixpath.normpath(f"{path}/{name}") for name in ("README.md", "index.md")]
    return next((home for home in homes if (ROOT / home).is_file()), path)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    uri = page.file.src_uri
    path = repository_path(uri)
    if (ROOT / path).is_file():
        page.edit_url = f"{config.repo_url}/edit/main/{path}"
    boost = next((value for start, value in BOOSTS.items() if uri.startswith(start)), 1.0)
    page.meta["search"] = {"boost": boost}

    def on_the_site(match: re.Match[str]) -> str:
        target = match["target"] and resolved(path, match["target"])
        if not target or files.get_file_from_path(site_path(target)) is None:
            return match[0]
        return posixpath.relpath(site_path(target), posixpath.dirname(uri) or ".")

    return LINK.sub(on_the_site, BEFORE_AND_AFTER.sub(in_tabs, indented(markdown)))


def in_tabs(match: re.Match[str]) -> str:
    """Return two paragraphs, each with its code, as two tabs."""
    texts = {name: text[0].upper() + text[1:] for name, text in match.groupdict().items()}
    tabs = [f'=== "{name.title()}"\n\n{indent(text, " " * 4)}' for name, text in texts.items()]
    return "\n".join(tabs)


def indented(markdown: str) -> str:
    """Indent by four the text below an item of a list; GitHub reads two or three spaces too."""
    lines: list[str] = []
    width, shift, fence, apart = 0, 0, "", False
    for line in markdown.splitlines():
        depth = len(line) - len(line.lstrip(" "))
        marks = FENCE.match(line)
        if not fence:
            item = ITEM.match(line)
            if item or (line and not depth):
                width = len(item[0]) if item else 0
            shift = depth // width * (4 - width) if width else 0
            if item and apart:  # Python-Markdown would not end the paragraph before
                lines.append("")
            if item or not lines or not lines[-1]:
                apart = bool(depth)
            fence = marks[1] if marks else ""
        elif marks and line.strip() == fence:
            fence = ""
        lines.append(" " * shift + line if line else line)
    return "\n".join(lines) + "\n"


def repository_path(uri: str) -> str:
    """Return the file or folder of the repository that a page of the site shows."""
    path = uri.removeprefix(f"{FOLDER}/") if uri.startswith(f"{FOLDER}/") else f"docs/{uri}"
    if (ROOT / path).exists():
        return path
    return path.removesuffix("/index.md" if path.endswith("/index.md") else ".md")
