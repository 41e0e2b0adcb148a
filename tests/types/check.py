"""Compares what mypy says of `users_script.py` with its comments; `tox -e types` runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("users_script.py")
CHECKOUT = SCRIPT.parents[2]


def expected() -> set[tuple[int, str]]:
    """The number of each line that is wrong, and the code of its error."""
    return {
        (number, found[1])
        for number, line in enumerate(SCRIPT.read_text().splitlines(), 1)
        if (found := re.search(r"# error: ([\w-]+)$", line))
    }


def reported() -> set[tuple[int, str]]:
    """The same, as mypy says it."""
    command = [sys.executable, "-m", "mypy", str(SCRIPT.relative_to(CHECKOUT))]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if ": error: " in line]
    if done.returncode not in (0, 1) or not lines:
        raise SystemExit(f"mypy did not check the script:\n{done.stdout}{done.stderr}")
    found = set()
    for line in lines:
        match = re.fullmatch(r"(.+):(\d+): error: .* \[([\w-]+)\]", line)
        if match is None or Path(match[1]).name != SCRIPT.name:
            raise SystemExit(f"mypy reports an error elsewhere: {line}")
        found.add((int(match[2]), match[3]))
    return found


if __name__ == "__main__":
    wrong, found = expected(), reported()
    missed, unexpected = wrong - found, found - wrong
    if missed or unexpected:
        raise SystemExit(f"not reported: {sorted(missed)}; unexpected: {sorted(unexpected)}")
    print(f"{len(wrong)} wrong uses are reported, and no right one")
