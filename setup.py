"""Everything but the README stands in `pyproject.toml`.

Links of the README lead to files of the repository. PyPI shows the README elsewhere, so there they
lead to the files of the tag `v<version>`.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent


def readme_for_pypi() -> str:
    """Return the README with links that work on every page."""
    source = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    module = (HERE / "kerasps" / "__init__.py").read_text()
    version = re.search(r'^__version__ = "(.+)"$', module, re.MULTILINE)[1]
    return re.sub(
        r"\]\((?!\w+:|#)([^)]+)\)",
        rf"]({source}/blob/v{version}/\1)",
        (HERE / "README.md").read_text(encoding="utf-8"),
    )


setup(long_description=readme_for_pypi(), long_description_content_type="text/markdown")
