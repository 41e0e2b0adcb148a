"""The command `kerasps plan`: prints the needs of a training, without running it."""

from __future__ import annotations

import argparse

from kerasps.tools.cli.commands.options import (
    Commands,
    add_command,
    add_numbers,
    add_script,
    as_count_or_zero,
    check_script,
)

_HELP = """\
Plans a training in seconds, without a cluster and without a step.

Runs the script up to its first `fit`, `evaluate`, `predict` or `train_on_batch`, in
one process, and prints the needs of the training: the variables, slots and bytes of
each ps; the bytes and messages of each step; the rows of embedding tables that a step
reads, counted in a sample of the data; the memory of a worker; and advice. Variables
of more than 1 MiB get no memory, so any machine can plan tables that it could not
hold."""

_EPILOG = """\
exit code:
  0 with a plan; 1 if the script fails, or runs no step of a model of a
  `kerasps.ParameterServerStrategy`; 2 if the command line is wrong.

example:
  kerasps plan --num-workers 8 --num-ps 4 train.py --epochs 3
  kerasps plan --json train.py > plan.json"""


def add_parser(commands: Commands) -> None:
    """Add the command to the parser."""
    plan = add_command(
        commands,
        "plan",
        summary="print the needs of a training, without running it",
        description=_HELP,
        epilog=_EPILOG,
        runs_script=True,
    )
    add_numbers(plan)
    plan.add_argument("--json", action="store_true", help="print JSON, and nothing else on stdout")
    plan.add_argument(
        "--sample-batches",
        type=as_count_or_zero,
        default=20,
        metavar="N",
        help="most batches in which to count rows; 0: read none (default: 20)",
    )
    add_script(plan)


def run(args: argparse.Namespace) -> int:
    """Print the plan of a script."""
    check_script(args.parser, args.script, args.args)
    from kerasps.tools.plan import plan

    return plan(
        args.script,
        args.args,
        num_workers=args.num_workers,
        num_ps=args.num_ps,
        sample_batches=args.sample_batches,
        as_json=args.json,
    )
