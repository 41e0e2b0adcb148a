"""The command `kerasps run`: runs one node; the same command runs on every node."""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from kerasps.cluster.description.cluster_description import (
    EVALUATOR,
    TASK_TYPES,
    ClusterDescription,
)
from kerasps.cluster.description.platforms import Sizes
from kerasps.cluster.description.tf_config import CHIEF_VARIABLE
from kerasps.cluster.processes.restarts import DEFAULT_MAX_RESTARTS
from kerasps.tools.cli.commands.options import (
    MODES,
    CommandParser,
    Commands,
    add_command,
    add_evaluator_timeout,
    add_mode,
    add_script,
    as_count,
    as_count_or_zero,
    as_seconds,
    check_script,
)
from kerasps.tools.cli.nodes.role import DEFAULT_PORT, RoleOptions, find_role, this_hostname

_HELP = """\
Runs one node of a training. Start the same command on every node, by any scheduler.

Each node finds its task in the first of these sources that is set: the options --role,
--index and --hosts; TF_CONFIG; CLUSTER_SPEC (Vertex AI); the variables of JobSet, of
Slurm, and of SageMaker. Its first line of output names the task and the source.

A ps or worker serves. The chief runs the script, which finds the cluster in TF_CONFIG. An
evaluator runs the script, or that of --evaluator, beside the training. All nodes end when
the chief's script has ended, with its exit code.

If a signal ends the script, or it loses a ps, the script begins again when all tasks are
reachable, up to --max-restarts times within an hour. With a
`keras.callbacks.BackupAndRestore` in its `fit` it resumes from the last backup. The
scheduler restarts a worker that ends, and the worker takes part again. A script that ends
with another error is not restarted.

With --mode worker each worker runs the script, for `kerasps.WorkerDrivenStrategy()`, and
only ps serve. The chief, or worker 0 if there is no chief, ends the run.

Everyone who can connect to the port of a task can read and write files as this user: see
`kerasps serve --help`."""

_EPILOG = """\
hosts:
  "chief=h0;ps=h1,h2;worker=h3,h4" or the same as JSON: the hosts of each job.
  "h0,h1,h2,h3,h4" with --num-ps 2: the chief, the ps, the workers.
  A host without a port gets that of --port; if it is listed again, the next port.
  Without --role, this node is the task whose host is this machine.

exit code:
  That of the script, on every node; 128 + N if signal N ended it; 138 if a task was lost
  and did not come back, or the chief did not; 2 if the command line or the cluster's
  description is wrong. After 137, 138 and 143 another try may succeed.

environment variables:
  An option on the command line overrides its environment variable.
  KERASPS_NUM_WORKERS, KERASPS_NUM_PS   as the options; JobSet needs the first
  KERASPS_CHIEF            as --chief
  KERASPS_MODE, KERASPS_BIND, KERASPS_EVALUATOR, KERASPS_EVALUATOR_TIMEOUT,
  KERASPS_MAX_RESTARTS     as the options
  KERASPS_START_TIMEOUT    as --start-timeout; the script has KERASPS_CONNECT_TIMEOUT from it

example:
  kerasps run --hosts "chief=h0;ps=h1;worker=h2,h3" train.py --epochs 3
  srun kerasps run --num-ps 2 train.py"""


def add_parser(commands: Commands) -> None:
    """Add the command to the parser."""
    run = add_command(
        commands,
        "run",
        summary="run one node of a training, the same command on every node",
        description=_HELP,
        epilog=_EPILOG,
        runs_script=True,
    )
    run.add_argument(
        "--role",
        choices=(*TASK_TYPES, EVALUATOR),
        help="the type of task that this node is (default: from the environment)",
    )
    run.add_argument("--index", type=as_count_or_zero, metavar="N", help="its index (default: 0)")
    run.add_argument(
        "--hosts", metavar="HOSTS", help="the hosts of all tasks, see below (default: none)"
    )
    run.add_setting(
        *("--num-workers", as_count, None, "N"),
        "workers, if the platform lists nodes without roles",
        shown="all other nodes",
    )
    run.add_setting("--num-ps", as_count, 1, "M", "ps, likewise")
    run.add_argument(
        "--port",
        type=as_count,
        metavar="PORT",
        help=f"the port of tasks for which none is given (default: {DEFAULT_PORT}; with Slurm one "
        "computed from the job)",
    )
    run.add_argument(
        "--chief",
        metavar="worker:N",
        help="the worker that is the chief, if no chief is listed; the same on every node "
        "(default: none; environment: KERASPS_CHIEF)",
    )
    _add_settings(run)
    add_script(run, "the training script; ps and workers do not read it")


def _add_settings(run: CommandParser) -> None:
    """Add the options for the behaviour of a node in its role."""
    add_mode(run, "the process that drives the steps")
    run.add_setting(
        *("--bind", str, None, "ADDRESS"),
        "the address of this machine to listen on, 0.0.0.0 for all",
        shown="the host of the task's entry",
    )
    run.add_setting(
        *("--start-timeout", as_seconds, 600.0, "SECONDS"),
        "time that a node waits for the others, and a task for a lost chief",
        shown=600,
    )
    run.add_setting(
        *("--max-restarts", as_count_or_zero, DEFAULT_MAX_RESTARTS, "N"),
        "restarts of the script within an hour, because of each ps and of itself; 0: none",
    )
    run.add_setting(
        *("--evaluator", str, None, "COMMAND"),
        "the script of an evaluator, in quotes if it has arguments",
        shown="the training script",
    )
    add_evaluator_timeout(run)


def run(args: argparse.Namespace) -> int:
    """Run this node, and return its exit code."""
    mode = args.mode
    if args.chief is not None:
        # A task that restarts its process reads it from there too.
        os.environ[CHIEF_VARIABLE] = args.chief
    sizes = Sizes(num_ps=args.num_ps, num_workers=args.num_workers, port=args.port)
    role = find_role(
        RoleOptions(args.role, args.index, args.hosts, sizes, needs_chief=mode == MODES[0]),
        os.environ,
        this_hostname(),
    )
    # Imported late, so that an error about the role appears before TensorFlow is imported.
    from kerasps.tools.cli.nodes import node

    node.say(str(role))
    options = node.NodeOptions(
        mode=mode,
        bind=args.bind,
        start_timeout=args.start_timeout,
        max_restarts=args.max_restarts,
        evaluator_timeout=args.evaluator_timeout,
    )
    description = role.description
    drives = description.task_type == "worker" and mode == "worker"
    if description.task_type in ("ps", "worker") and not drives:
        node.serve(description, options)
    try:
        command = _command(args, description)
    except SystemExit:
        node.end_without_script(description, options, 2)
        raise
    if description.task_type == EVALUATOR:
        return node.evaluate(command, description, options)
    if mode == "worker":
        return node.drive(command, description, options)
    return node.train(command, description, options)


def _command(args: argparse.Namespace, description: ClusterDescription) -> list[str]:
    """Return the command line of this node's script; end the process with 2 if there is none."""
    command = [args.script, *args.args]
    if description.task_type == EVALUATOR and args.evaluator:
        command = shlex.split(args.evaluator)
    check_script(args.parser, command[0], command[1:])
    return [sys.executable, *command]
