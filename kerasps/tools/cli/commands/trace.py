"""The command `kerasps trace`: traces a running training, on all its tasks."""

from __future__ import annotations

import argparse

from kerasps.tools.cli.commands.options import Commands, add_command, as_count, as_seconds

_HELP = """\
Records all tasks of a running training for some seconds, and prints a sentence about
what limits it. It writes one file for Perfetto (https://ui.perfetto.dev), and files for
the profile page of TensorBoard.

The training is the one in TF_CONFIG, else the one whose script runs on this machine. If
several run here, give the process id of one. Steps take slightly longer during the
recording."""


def add_parser(commands: Commands) -> None:
    """Add the command to the parser."""
    trace = add_command(
        commands,
        "trace",
        summary="trace a running training",
        description=_HELP,
    )
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
        help="time to record, 60 at most (default: 2)",
    )


def run(args: argparse.Namespace) -> int:
    """Trace a training."""
    from kerasps.tools.cli.live.trace_running import trace_running

    return trace_running(args.log_dir, args.seconds, args.pid)
