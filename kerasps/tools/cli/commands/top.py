"""The command `kerasps top`: shows a run in the terminal, live."""

from __future__ import annotations

import argparse

from kerasps.tools.cli.commands.options import Commands, add_command, as_seconds

_HELP = """\
Shows a run until it ends or you press Ctrl-C: steps per second, executions in flight,
staleness, losses and waits of each worker; bytes, rows and tables of each ps; memory
and CPU of the processes on this machine.

Without an argument it finds this user's run on this machine. The script needs no
setting for that. For a run on another machine, give the host:port of its
kerasps.ClusterMonitor(port=...). docs/monitoring.md explains each column."""


def add_parser(commands: Commands) -> None:
    """Add the command to the parser."""
    top = add_command(
        commands,
        "top",
        summary="show a run in the terminal, live",
        description=_HELP,
    )
    top.add_argument(
        "target",
        nargs="?",
        metavar="pid|host:port",
        help="the process of a run on this machine, or the address of a kerasps.ClusterMonitor "
        "(default: the only run of this user on this machine)",
    )
    top.add_argument("--once", action="store_true", help="print one table, and end")
    top.add_argument("--json", action="store_true", help="print one status as JSON, and end")
    top.add_argument(
        "--interval",
        type=as_seconds,
        default=1.0,
        metavar="SECONDS",
        help="seconds between two updates (default: 1)",
    )


def run(args: argparse.Namespace) -> int:
    """Show a run."""
    from kerasps.tools.cli.live.top_live import show

    return show(args.target, once=args.once, as_json=args.json, interval_s=args.interval)
