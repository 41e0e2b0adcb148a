"""Parses the `kerasps` command, and calls the module of each command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from kerasps import __version__
from kerasps.cluster.processes.restarts import DEFAULT_MAX_RESTARTS
from kerasps.errors import ClusterConfigError, KeraspsError
from kerasps.tools.cli.commands import backups, plan, run, serve, top, trace
from kerasps.tools.cli.commands.options import (
    CommandParser,
    Commands,
    add_command,
    add_evaluator_timeout,
    add_mode,
    add_numbers,
    add_script,
    as_count_or_zero,
    as_evaluator,
    as_seconds,
    check_script,
    refuse,
)
from kerasps.tools.monitoring.sockets import remove_stale_sockets

_LAUNCH_HELP = """\
Runs a training script with worker and ps processes around it, all on this machine.

The script is the coordinator. It finds the cluster in TF_CONFIG, which
`kerasps.ParameterServerStrategy()` reads when it gets no arguments.
Only the script uses this terminal; each worker and ps writes to a log file.

The command restarts processes that die, up to --max-restarts times within an
hour. A lost worker restarts while the training goes on. If a ps is lost, or a
signal ends the script, all tasks and the script restart. The script then begins
again with the same arguments, and with a `keras.callbacks.BackupAndRestore` in
its `fit` it resumes from the last backup. A script that ends with an error is not
restarted, unless the cause is a lost task.

With --mode worker the script runs once for each worker, and there is no
coordinator: `kerasps.WorkerDrivenStrategy()` reads TF_CONFIG in each. Worker 0 is
the chief and uses this terminal; the others write to log files. A worker that a
signal ends restarts and takes part again. If a ps is lost, or the chief's script
fails, the run ends.

An evaluator is a script beside the training that evaluates checkpoints, with a
`kerasps.SidecarEvaluator`. It is not part of the cluster. Its output appears here
after "[evaluator]". It ends after the last checkpoint."""

_LAUNCH_EPILOG = """\
exit code:
  That of the script, or 128 + N if signal N ended it; 1 if the cluster could not
  start, or the script succeeded and the evaluator failed; 2 if the command line is
  wrong. After a restart, the exit code of the last script counts.

signals:
  Ctrl-C reaches the script, and the cluster closes when the script has ended.
  SIGTERM and SIGHUP are passed on to the script. After any of them nothing
  restarts. However this command ends, also by SIGKILL, no process is left behind.

environment variables:
  An option on the command line overrides its environment variable.
  KERASPS_FULL_IMPORT      1: workers and ps import all of TensorFlow, not only its
                           server; or names of further modules to import, for
                           their custom ops, with commas between them
  KERASPS_CPU_DEVICES      the CPU devices of each worker (default: 1), to try
                           `worker_devices` without GPUs
  KERASPS_CONNECT_TIMEOUT  seconds that the script waits for a task (default: 60)
  KERASPS_HANG_TIMEOUT     seconds without an answer after which a task counts as lost
                           (default: 10)
  KERASPS_CHIEF_TIMEOUT    seconds that other workers wait for the chief, with
                           --mode worker (default: 600)
  CUDA_VISIBLE_DEVICES     the GPUs to use, which are split among the workers

example:
  kerasps launch --num-workers 4 --num-ps 2 train.py --epochs 3
  kerasps launch --evaluator "evaluate.py --steps 100" train.py"""

_ENV_HELP = """\
Prints the facts for a bug report: versions, platform, devices, the environment
variables of kerasps, and a check of TF_CONFIG and of the connections to its tasks.
The exit code is 1 if TF_CONFIG is set and wrong, else 0."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `kerasps` command."""
    parser = _parser()
    args, others = parser.parse_known_args(argv)
    if others:
        refuse(getattr(args, "parser", parser), others)
    args.parser.fill_in(args)
    try:
        return _HANDLERS[args.command](args)
    except (KeraspsError, RuntimeError, OSError) as exc:
        print(f"kerasps {args.command}: error: {exc}", file=sys.stderr)
        return 2 if isinstance(exc, ClusterConfigError) else 1


def _launch(args: argparse.Namespace) -> int:
    from kerasps.tools.cli.commands.launch import launch

    check_script(args.parser, args.script, args.args)
    try:
        return launch(
            [sys.executable, args.script, *args.args],
            num_workers=args.num_workers,
            num_ps=args.num_ps,
            mode=args.mode,
            log_dir=args.log_dir,
            start_timeout=args.start_timeout,
            max_restarts=args.max_restarts,
            evaluator=None if args.evaluator is None else [sys.executable, *args.evaluator],
            evaluator_timeout=args.evaluator_timeout,
        )
    finally:
        remove_stale_sockets()  # a killed script leaves its socket


def _env(args: argparse.Namespace) -> int:
    from kerasps.tools.cli.commands.env import report_environment

    return report_environment()


# Each command imports its modules when it runs, so that none waits for another's imports.
_HANDLERS: dict[str, Callable[[argparse.Namespace], int]] = {
    "launch": _launch,
    "plan": plan.run,
    "run": run.run,
    "serve": serve.run,
    "top": top.run,
    "trace": trace.run,
    "backups": backups.run,
    "env": _env,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kerasps",
        description="Parameter-server training for Keras 3.",
        epilog="`kerasps COMMAND --help` explains each command.",
    )
    parser.add_argument("--version", action="version", version=f"kerasps {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=CommandParser
    )
    _add_launch(commands)
    plan.add_parser(commands)
    run.add_parser(commands)
    serve.add_parser(commands)
    top.add_parser(commands)
    trace.add_parser(commands)
    backups.add_parser(commands)
    add_command(commands, "env", summary="print the facts for a bug report", description=_ENV_HELP)
    return parser


def _add_launch(commands: Commands) -> None:
    launch = add_command(
        commands,
        "launch",
        summary="run a script with a cluster around it, on this machine",
        description=_LAUNCH_HELP,
        epilog=_LAUNCH_EPILOG,
        runs_script=True,
    )
    add_numbers(launch)
    add_mode(launch, "the process that drives the steps")
    launch.add_setting(
        *("--log-dir", str, None, "DIR", "directory for one log file per process"),
        shown="a temporary one, which is kept if a task dies",
    )
    launch.add_setting(
        *("--start-timeout", as_seconds, 60.0, "SECONDS"),
        "time limit for all processes to be ready",
        shown=60,
    )
    launch.add_setting(
        *("--max-restarts", as_count_or_zero, DEFAULT_MAX_RESTARTS, "N"),
        "restarts within an hour of each worker, and of the whole run because of each ps and of "
        "the script; 0: none",
    )
    launch.add_setting(
        *("--evaluator", as_evaluator, None, "COMMAND"),
        "a script that evaluates checkpoints during the training, in quotes if it has arguments",
    )
    add_evaluator_timeout(launch)
    add_script(launch)
