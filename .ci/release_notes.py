"""Print the section of the CHANGELOG for a tag, with links that work outside of the repository.

    python .ci/release_notes.py v0.1.0

It ends with 1 where a release must not be made: the tag is not `v` and `kerasps.__version__`, or
the CHANGELOG has no section with a date for it.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]


def section_of(changelog: str, version: str) -> str:
    """Return what is below the heading of a version.

    Raises:
        SystemExit: it has no section, an empty one, or no date in its heading.
    """
    heading = rf"^## {re.escape(version)} \(([^)\n]+)\)\n(.*?)(?=^## |\Z)"
    found = re.search(heading, changelog, re.MULTILINE | re.DOTALL)
    if found is None or not found[2].strip():
        raise SystemExit(f"CHANGELOG.md has no section on {version}.")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", found[1]):
        raise SystemExit(
            f"CHANGELOG.md has no date for {version}. Expected: `## {version} (2026-12-31)`. "
            f"Received: `({found[1]})`."
        )
    return found[2].strip() + "\n"


def main(arguments: list[str]) -> None:
    """Print the section for the tag that is the argument."""
    (tag,) = arguments
    module = (CHECKOUT / "kerasps" / "__init__.py").read_text()
    version = re.search(r'^__version__ = "(.+)"$', module, re.MULTILINE)[1]
    if tag != f"v{version}":
        raise SystemExit(f"The tag is not the version. Expected: v{version}. Received: {tag}.")
    section = section_of((CHECKOUT / "CHANGELOG.md").read_text(), version)
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    source = f"{project['urls']['Source']}/blob/{tag}/"
    print(re.sub(r"\]\((?!\w+:|#)", f"]({source}", section), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
