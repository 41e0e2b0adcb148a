"""What the wheel and the source distribution hold, and what their metadata says."""

from __future__ import annotations

import re
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

CHECKOUT = Path(__file__).resolve().parents[2]
# What lies in a checkout in which people have worked.
LITTER = (
    ".coverage",
    ".hypothesis/examples/0",
    ".mypy_cache/0.json",
    ".pytest_cache/README.md",
    ".tox/py/bin/python",
    ".venv/bin/python",
    "NOTES.md",
    "benchmarks/results/today.json",
    "build/lib/kerasps/stale.py",
    "dist/kerasps-0.0.1.tar.gz",
    "kerasps/__pycache__/strategy.cpython-311.pyc",
    "kerasps/step/notes.txt",
    "model.weights.h5",
    "notes/today.md",
    "shared/STYLE.md",
    "site/index.html",
    "tests/__pycache__/run.cpython-311.pyc",
    "tests/processes/training.log",
)
URLS = {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
EXTRAS = {"gpu", "monitor", "examples"}


def tracked_files() -> list[str]:
    """Return what is committed, or about to be, relative to the checkout.

    In an unpacked source distribution that is all that it was made of.
    """
    if (CHECKOUT / ".git").exists():
        command = ["git", "-C", str(CHECKOUT), "ls-files", "-z"]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        names = [name for name in listed.split("\0") if name]
    else:
        sources = CHECKOUT / "kerasps.egg-info" / "SOURCES.txt"
        names = [name for name in sources.read_text().splitlines() if not is_generated(name)]
    return sorted(name for name in names if (CHECKOUT / name).is_file())


def is_generated(name: str) -> bool:
    """Return whether setuptools writes this file of a source distribution."""
    return name in ("PKG-INFO", "setup.cfg") or name.startswith("kerasps.egg-info/")


def differences(what: str, expected: set[str], received: set[str]) -> list[str]:
    """Return a line for what is missing, and one for what does not belong there."""
    return [
        f"{what} {verb}: {sorted(names)}."
        for verb, names in (("lacks", expected - received), ("holds also", received - expected))
        if names
    ]


def problems_of_wheel(wheel: Path) -> list[str]:
    """Return in what the wheel is not the committed modules, `py.typed` and its metadata."""
    modules = {
        name
        for name in tracked_files()
        if name.startswith("kerasps/") and name.endswith((".py", "/py.typed"))
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        entries = archive.read(f"{info}/entry_points.txt").decode().split()
        pure = b"Root-Is-Purelib: true" in archive.read(f"{info}/WHEEL")
    about = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
    problems = differences("The wheel", modules | {f"{info}/{name}" for name in about}, names)
    if "kerasps/py.typed" not in names:
        problems.append("The wheel has no py.typed.")
    if entries != ["[console_scripts]", "kerasps", "=", "kerasps.tools.cli.main:main"]:
        problems.append(f"The wheel has other commands than `kerasps`: {entries}.")
    if not pure or not wheel.name.endswith("-py3-none-any.whl"):
        problems.append(f"The wheel is not for every platform: {wheel.name}.")
    return problems


def problems_of_sdist(sdist: Path) -> list[str]:
    """Return in what the source distribution is not what is committed."""
    with tarfile.open(sdist) as archive:
        members = [member for member in archive.getmembers() if not member.isdir()]
    names = {str(PurePosixPath(*PurePosixPath(member.name).parts[1:])) for member in members}
    problems = differences(
        "The source distribution (MANIFEST.in says what it holds)",
        set(tracked_files()),
        {name for name in names if not is_generated(name)},
    )
    if not all(member.isfile() for member in members):
        problems.append("The source distribution holds links or devices.")
    return problems


def metadata_of(wheel: Path) -> bytes:
    """Return the metadata of a wheel as it is written; it ends with the README."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name)


def problems_of_metadata(wheel: Path, sdist: Path) -> list[str]:
    """Return in what the metadata differs from `pyproject.toml` and from what PyPI knows."""
    from packaging.metadata import Metadata
    from trove_classifiers import classifiers as known

    written = metadata_of(wheel)
    # It raises an error for each field that the standard does not allow.
    metadata = Metadata.from_email(written, validate=True)
    with tarfile.open(sdist) as archive:
        in_sdist = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO").read()
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    module = (CHECKOUT / "kerasps" / "__init__.py").read_text()
    version = re.search(r'^__version__ = "(.+)"$', module, re.MULTILINE)[1]
    extras = set(metadata.provides_extra)
    expectations = {
        "name": (metadata.name, "kerasps"),
        "version": (str(metadata.version), version),
        "summary": (metadata.summary, project["description"]),
        "license": (metadata.license_expression, "Apache-2.0"),
        "files of the license": (metadata.license_files, ["LICENSE"]),
        "Python": (str(metadata.requires_python), ">=3.11"),
        "keywords": (metadata.keywords, project["keywords"]),
        "classifiers": (set(metadata.classifiers), set(project["classifiers"])),
        "addresses": (metadata.project_urls, project["urls"]),
        "names of addresses": (URLS, URLS & set(metadata.project_urls)),
        "extras": (extras, set(project["optional-dependencies"])),
        "extras for users": (EXTRAS, EXTRAS & extras),
        "classifiers that PyPI does not know": (set(metadata.classifiers) - known, set()),
        "metadata of the source distribution": (in_sdist, written),
    }
    return [
        f"Metadata, {what}. Expected: {expected}. Received: {received}."
        for what, (received, expected) in expectations.items()
        if received != expected
    ]
