"""The command `kerasps trace`: traces a training that runs, on all its tasks."""

from __future__ import annotations

import argparse

from kerasps.cli.commands.options import Commands, as_count, as_seconds

_HELP = """\
Records for some seconds what all tasks of a running training do, and says in a
sentence what limits it. It writes one file for Perfetto (https://ui.perfetto.dev), and
files for the profile page of TensorBoard.

The training is the one in TF_CONFIG, else the one whose script runs on this machine.
Where several run here, the process id says which. Steps take somewhat longer while it
records."""


def add_parser(commands: Commands) -> None:
    """Add the command to the parser."""
    trace = commands.add_parser(
        "trace",
        help="trace a training that runs",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    trace.set_defaults(parser=trace)
    trace.add_argument(
        "pid",
        nargs="?",
        type=as_count,
        metavar="pid",
        help="the process of a script on this machine (default: the only one of this user)",
    )
    trace.add_argument(
        "--log-dir", default="logs", metavar="DIR", help="directory for the files (default: logs)"
    )
    trace.add_argument(
        "--seconds",
        type=as_seconds,
        default=2.0,
        metavar="SECONDS",
        help="how long to record, 60 at most (default: 2)",
    )


def run(args: argparse.Namespace) -> int:
    """Trace a training.

    Args:
        args: what the parser has found.

    Returns:
        The exit code.
    """
    from kerasps.cli.live.trace_running import trace_running

    return trace_running(args.log_dir, args.seconds, args.pid)
