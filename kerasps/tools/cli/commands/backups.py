"""The command `kerasps backups`: lists the backups in a directory, and checks them."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass

from kerasps.tools.cli.commands.options import Commands, add_command

_HELP = """\
Lists the backups of a training in the directory of its `BackupAndRestore`, the last
one first: the place in the training, whether it is whole or a delta and on which
backup, its bytes, when it was written, and whether it can be used. Each file is read
and compared with its checksum. A delta needs all backups that it is on.

It may run beside the training: a backup that is replaced meanwhile is not listed."""

_EPILOG = """\
exit code:
  0 if all backups can be used, also if there are none; 1 if one cannot; 2 if the
  command line is wrong.

example:
  kerasps backups backup"""


@dataclass(frozen=True)
class _Row:
    """A backup, as the command tells it."""

    number: int
    epoch: int | None
    step: int | None
    on: int | None  # the backup that it is a delta on
    bytes: int | None
    written: float | None  # seconds since 1970
    problem: str | None  # why it cannot be used


def add_parser(commands: Commands) -> None:
    """Add the command to the parser."""
    backups = add_command(
        commands,
        "backups",
        summary="list the backups in a directory, and check them",
        description=_HELP,
        epilog=_EPILOG,
    )
    backups.add_argument("directory", metavar="DIR", help="the directory of the backups")
    backups.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """List backups."""
    from kerasps.saving.backup_files import BackupDirectory

    directory = BackupDirectory(args.directory)
    rows = []
    for number, found in directory.checked():
        written = directory.modified_at(number)
        if written is None:
            continue  # it was replaced meanwhile
        if isinstance(found, Exception):
            rows.append(_Row(number, None, None, None, None, written, _first_line(found)))
            continue
        on = None if found.previous is None else found.previous[0]
        epoch, step = found.record["epoch"] + 1, found.record["loop"]["steps"]
        rows.append(_Row(number, epoch, step, on, found.num_bytes, written, None))
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        _show(rows, directory.path)
    return int(any(row.problem is not None for row in rows))


def _show(rows: list[_Row], path: str) -> None:
    if not rows:
        print(f"There are no backups in {path}.")
        return
    print(f"{'backup':>8}  {'epoch':>5}  {'step':>9}  {'kind':<14}  {'bytes':>15}  written")
    for row in rows:
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.written))
        if row.problem is not None:
            print(f"{row.number:>8}  {'':5}  {'':9}  {'':14}  {'':15}  {written}  ", end="")
            print(f"cannot be used: {row.problem}")
            continue
        kind = "whole" if row.on is None else f"delta on {row.on}"
        print(
            f"{row.number:>8}  {row.epoch:>5}  {row.step:>9,}  {kind:<14}  {row.bytes:>15,}  "
            f"{written}  valid"
        )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__
