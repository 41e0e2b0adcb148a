"""Build the package as a release does, look into it, install it, and run the quickstart from it.

    python tests/package/check.py
    python tests/package/check.py --no-install      # builds and looks
    python tests/package/check.py --dist dist       # takes these files, and builds nothing

`tox -e package` has what this script imports. It builds in a copy of the checkout, with litter in
it as a checkout has that people have worked in. The environment that it installs into is of the
Python that runs this script.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

from contents import (
    CHECKOUT,
    LITTER,
    problems_of_metadata,
    problems_of_sdist,
    problems_of_wheel,
    tracked_files,
)

# Run where no checkout is near, by the Python of the new environment.
PROBE = """
import importlib.metadata, json, pathlib, sys
import kerasps
at_once = sorted({"keras", "numpy", "tensorflow"} & set(sys.modules))
missing = [name for name in kerasps.__all__ if not hasattr(kerasps, name)]
found = {
    "at_once": at_once,
    "missing": missing,
    "is_inside": pathlib.Path(kerasps.__file__).is_relative_to(sys.prefix),
    "versions_agree": kerasps.__version__ == importlib.metadata.version("kerasps"),
}
print(json.dumps(found))
"""
SOUND = {"at_once": [], "missing": [], "is_inside": True, "versions_agree": True}


def copied(folder: Path, litter: Sequence[str] = ()) -> Path:
    """Copy what is committed into a folder, and put litter beside it, which no package may hold."""
    for name in tracked_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((CHECKOUT / name).read_bytes())
    for name in litter:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("not for the package\n")
    return folder


def built(folder: Path) -> tuple[Path, Path]:
    """Build both files, and the wheel once more without the other one; return wheel and sdist."""
    dist, straight = folder / "dist", folder / "straight"
    worked_in, clean = copied(folder / "worked_in", LITTER), copied(folder / "clean")
    # Without `--wheel`, the wheel is made from the source distribution, where no litter is.
    for options in (
        ["--outdir", str(dist), str(worked_in)],
        ["--wheel", "--outdir", str(straight), str(clean)],
    ):
        run([sys.executable, "-m", "build", *options], quiet=True)
    wheel, sdist = files_in(dist)
    (other,) = straight.glob("*.whl")
    first, second = (
        {entry.filename: entry.CRC for entry in zipfile.ZipFile(path).infolist()}
        for path in (wheel, other)
    )
    if first != second:
        raise SystemExit(
            "The wheel from the source distribution and the one from the checkout differ in: "
            f"{sorted(name for name in first | second if first.get(name) != second.get(name))}."
        )
    return wheel, sdist


def files_in(folder: Path) -> tuple[Path, Path]:
    """Return the wheel and the source distribution in a folder that holds nothing else."""
    names = sorted(path.name for path in folder.iterdir())
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    if len(names) != 2 or len(wheels) != 1 or len(sdists) != 1:
        raise SystemExit(f"Expected one wheel and one .tar.gz in {folder}. Received: {names}.")
    return wheels[0], sdists[0]


def look_into(wheel: Path, sdist: Path) -> None:
    """End the script where one of the files is not what it should be."""
    run([sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)])
    problems = [
        *problems_of_wheel(wheel),
        *problems_of_sdist(sdist),
        *problems_of_metadata(wheel, sdist),
    ]
    if problems:
        raise SystemExit("\n".join(problems))


def run(command: list[str], *, quiet: bool = False, cwd: Path | None = None) -> str:
    """Run a command outside of every cluster and checkout; return what it printed."""
    print("$", " ".join(command), flush=True)
    hidden = ("KERASPS_", "PYTHON", "TF_CONFIG", "VIRTUAL_ENV")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    started = time.monotonic()
    done = subprocess.run(
        command,
        env=environment,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode or not quiet:
        print(done.stdout, end="")
    print(f"# {time.monotonic() - started:.0f} s", flush=True)
    if done.returncode:
        raise SystemExit(f"{command} ended with {done.returncode}.")
    return done.stdout


def install_and_use(wheel: Path, sdist: Path, folder: Path) -> None:
    """Install the wheel with what the examples need; use it from a folder of no checkout."""
    environment, elsewhere = folder / "environment", folder / "elsewhere"
    elsewhere.mkdir()
    run([sys.executable, "-m", "venv", str(environment)], quiet=True)
    python, kerasps = str(environment / "bin/python"), str(environment / "bin/kerasps")
    # Few of the modules are imported, and those compile then.
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
    run([*pip, f"{wheel}[examples,monitor]"])
    run([python, "-m", "pip", "check"])
    found = json.loads(run([python, "-c", PROBE], cwd=elsewhere).splitlines()[-1])
    if found != SOUND:
        raise SystemExit(f"The installed package is not sound. Expected: {SOUND}.")
    version = wheel.name.split("-")[1]
    for command, words in (
        ([kerasps, "env"], f"kerasps: {version}"),
        ([python, "-m", "kerasps", "--help"], "launch"),
    ):
        printed = run(command, cwd=elsewhere)
        if words not in " ".join(printed.split()):
            raise SystemExit(f"{command} does not print {words!r}.")
    # The examples are those of the source distribution: whoever has no checkout has these.
    with tarfile.open(sdist) as archive:
        archive.extractall(elsewhere, filter="data")
    (example,) = elsewhere.glob("*/examples/movielens.py")
    away = elsewhere / "run"
    away.mkdir()
    printed = run([python, str(example), "--epochs", "1", "--max-steps", "200"], cwd=away)
    if "test RMSE: " not in printed:
        raise SystemExit("The quickstart does not print its test error.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dist", type=Path, help="a folder with a wheel and a .tar.gz")
    parser.add_argument("--no-install", action="store_true", help="build and look, no more")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kerasps-package-") as name:
        folder = Path(name)
        if arguments.dist:
            wheel, sdist = files_in(arguments.dist.resolve())
        else:
            wheel, sdist = built(folder)
        look_into(wheel, sdist)
        if not arguments.no_install:
            install_and_use(wheel, sdist, folder)
    print(f"{wheel.name} and {sdist.name} are sound, on Python {sys.version.split()[0]}.")


if __name__ == "__main__":
    main()
