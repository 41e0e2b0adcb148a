"""Parses the `kerasps` command: `launch` a script, `serve` a task, describe the `env`ironment."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from kerasps import __version__
from kerasps.checks import count, seconds
from kerasps.cluster.description.tf_config import read_tf_config
from kerasps.cluster.processes.restarts import DEFAULT_MAX_RESTARTS
from kerasps.errors import ClusterConfigError, KeraspsError

_T = TypeVar("_T")

MODES = ("coordinator", "worker")

_LAUNCH_HELP = """\
Runs a training script with worker and ps processes around it, all on this machine.

The script is the coordinator. It finds the cluster in TF_CONFIG, which is what
`kerasps.ParameterServerStrategy()` reads when it gets no arguments.
It has this terminal for itself; each worker and ps writes to its own log file.

What dies is started again, up to --max-restarts times within an hour: a worker
while the training goes on; and all tasks with the script where a ps is lost, or
where a signal ended the script. The script then begins anew, with the same
arguments. With a `keras.callbacks.BackupAndRestore` in its `fit` it goes on from
the last backup. A script that fails by an error of its own is not restarted.

With --mode worker the script runs once for each worker, and there is no
coordinator: `kerasps.WorkerDrivenStrategy()` reads TF_CONFIG in each. Worker 0 is
the chief and has this terminal; the others write to log files. A worker that a
signal ends is started again and goes on with the others. Where a ps is lost, or
the chief's script fails, the run ends.

An evaluator is a script beside the training that evaluates checkpoints, with a
`kerasps.SidecarEvaluator`. It is not part of the cluster; what it prints appears
here behind "[evaluator]". It ends after the last checkpoint."""

_LAUNCH_EPILOG = """\
exit code:
  That of the script, or 128 + N when signal N ended it; 1 when the cluster could
  not start, or the script ended well and the evaluator failed; 2 when the command
  line is wrong. After a restart that of the last script counts.

signals:
  Ctrl-C reaches the script, and the cluster is closed when the script has ended.
  SIGTERM and SIGHUP are passed on to the script. After any of them nothing is
  started again. Whatever ends this command, SIGKILL too, no process is left behind.

environment variables:
  An option on the command line beats its environment variable.
  KERASPS_FULL_IMPORT      1: workers and ps import all of TensorFlow, not only its
                           server; or names of modules to import besides, for
                           their custom ops, with commas between them
  KERASPS_CPU_DEVICES      the CPU devices of each worker (default: 1), to try
                           `worker_devices` without GPUs
  KERASPS_CONNECT_TIMEOUT  seconds that the script waits for a task (default: 60)
  KERASPS_HANG_TIMEOUT     seconds without an answer after which a task counts as lost
                           (default: 10)
  KERASPS_CHIEF_TIMEOUT    seconds that other workers wait for the chief, with
                           --mode worker (default: 600)
  CUDA_VISIBLE_DEVICES     the GPUs to use; several are split among the workers

example:
  kerasps launch --num-workers 4 --num-ps 2 train.py --epochs 3
  kerasps launch --evaluator "evaluate.py --steps 100" train.py"""

_SERVE_HELP = """\
Runs the server of one worker or ps task, until SIGTERM or SIGINT (exit code 0).

Start it on each machine of a cluster, or let a scheduler start it. TF_CONFIG says
which task this is and where all the others are; the task listens on the port that
TF_CONFIG gives for it. The script runs as the chief, with the same TF_CONFIG but
for its "task". A task whose chief was killed starts anew, without what it held
for it. Where each worker drives its own steps (`kerasps.WorkerDrivenStrategy`) only
ps are served: say --mode worker, or list no chief, and the ps keeps what it holds.

The server has no access control: whoever reaches its port can read and write files
as this user. It listens on one address, the host of its entry in TF_CONFIG, and so
can be reached from the network of that address alone. Keep that to machines that
you trust. Where the host is no address of this machine (a service's name, or a
network behind a translation of addresses), it does not start unless --bind says
where to listen."""

_SERVE_EPILOG = """\
environment variables:
  An option on the command line beats its environment variable.
  TF_CONFIG                the cluster and this task (required)
  KERASPS_BIND             as --bind; the script heeds it too, for its own server
  KERASPS_FULL_IMPORT      1: import all of TensorFlow, not only its server; or
                           names of modules to import besides, for their custom
                           ops, with commas between them
  KERASPS_CPU_DEVICES      the CPU devices of a worker (default: 1), to try
                           `worker_devices` without GPUs

example:
  TF_CONFIG='{"cluster": {"chief": ["host0:2222"], "worker": ["host1:2222"],
    "ps": ["host2:2222"]}, "task": {"type": "ps", "index": 0}}' kerasps serve"""

_ENV_HELP = """\
Prints what a bug report needs: versions, platform, devices, the environment
variables of kerasps, and whether TF_CONFIG is right and its tasks can be reached.
The exit code is 1 when TF_CONFIG is set and wrong, else 0."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `kerasps` command.

    Args:
        argv: the arguments after the program's name. None (default) takes those of this process.

    Returns:
        The exit code.
    """
    parser = _parser()
    args, others = parser.parse_known_args(argv)
    if others:
        _refuse(getattr(args, "parser", parser), others)
    try:
        if args.command == "launch":
            return _launch(args)
        if args.command == "serve":
            return _serve(args)
        # Each command imports its own, so that none waits for another's.
        from kerasps.cli.env import report_environment

        return report_environment()
    except (KeraspsError, RuntimeError, OSError) as exc:
        print(f"kerasps {args.command}: error: {exc}", file=sys.stderr)
        return 2 if isinstance(exc, ClusterConfigError) else 1


def _launch(args: argparse.Namespace) -> int:
    from kerasps.cli.launch import launch

    parser: argparse.ArgumentParser = args.parser
    num_workers = _setting(parser, args.num_workers, "KERASPS_NUM_WORKERS", _count, 2)
    num_ps = _setting(parser, args.num_ps, "KERASPS_NUM_PS", _count, 1)
    start_timeout = _setting(parser, args.start_timeout, "KERASPS_START_TIMEOUT", _seconds, 60.0)
    max_restarts = _setting(
        parser, args.max_restarts, "KERASPS_MAX_RESTARTS", _count_or_zero, DEFAULT_MAX_RESTARTS
    )
    evaluator = _setting(parser, args.evaluator, "KERASPS_EVALUATOR", _command, None)
    evaluator_timeout = _setting(
        parser, args.evaluator_timeout, "KERASPS_EVALUATOR_TIMEOUT", _seconds, 600.0
    )
    log_dir = args.log_dir or os.environ.get("KERASPS_LOG_DIR") or None
    _check_script(parser, args.script, args.args)
    return launch(
        [sys.executable, args.script, *args.args],
        num_workers=num_workers,
        num_ps=num_ps,
        mode=_setting(parser, args.mode, "KERASPS_MODE", _mode, MODES[0]),
        log_dir=log_dir,
        start_timeout=start_timeout,
        max_restarts=max_restarts,
        evaluator=None if evaluator is None else [sys.executable, *evaluator],
        evaluator_timeout=evaluator_timeout,
    )


def _check_script(parser: argparse.ArgumentParser, script: str, args: Sequence[str]) -> None:
    """End the process where a script is no file, and say which options behind it may be ours."""
    if not os.path.isfile(script):
        what, fix = "There is no such script", "Correct the path."
        if os.path.isdir(script):
            what, fix = "The script is a directory", "Name the file in it."
        elif os.path.basename(script).startswith("python"):
            fix = f"Leave {script} out: name the script alone."
        parser.error(f"{what}. Expected: a Python file. Received: {script!r}. {fix}")
    ours = _options_of(parser)
    behind = [arg for arg in args if arg.partition("=")[0] in ours]
    if behind:
        print(
            f"kerasps launch: {' '.join(behind)} behind the script goes to the script; options of "
            "kerasps launch go before it",
            file=sys.stderr,
            flush=True,
        )


def _options_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the options of a parser, but for `--help`."""
    return re.findall(r"^  (--[\w-]+)", parser.format_help(), re.MULTILINE)


def _refuse(parser: argparse.ArgumentParser, others: Sequence[str]) -> NoReturn:
    """End the process: there are arguments that `parser` does not know."""
    like = difflib.get_close_matches(others[0].partition("=")[0], _options_of(parser), 1)
    hint = f" Did you mean {like[0]}?" if like else ""
    script = " Options of the script go behind it." if parser.prog.endswith("launch") else ""
    parser.error(
        f"unrecognized arguments: {' '.join(others)}. Expected: those that `{parser.prog} --help` "
        f"lists.{hint}{script}"
    )


def _serve(args: argparse.Namespace) -> int:
    from kerasps.cluster.server import serve
    from kerasps.cluster.serving.renewal import start_anew

    bind = _setting(args.parser, args.bind, "KERASPS_BIND", str, None)
    mode = _setting(args.parser, args.mode, "KERASPS_MODE", _mode, MODES[0])
    description = read_tf_config(needs_chief=False, may_be_sparse=True)
    has_coordinator = mode == "coordinator" and "chief" in description.jobs

    def ready(port: int, address: str | None) -> None:
        print(
            f"kerasps serve: {description.task_type} {description.task_index} listens on port "
            f"{port} of {address or 'every network interface'}",
            file=sys.stderr,
            flush=True,
        )

    def coordinator_gone(port: int) -> NoReturn:
        print(
            f"kerasps serve: the coordinator at {description.jobs['chief'][0]} is gone; "
            f"{description.task_type} {description.task_index} starts anew, without what it held "
            "for it",
            file=sys.stderr,
            flush=True,
        )
        start_anew(port)

    with warnings.catch_warnings():
        warnings.showwarning = _print_warning
        serve(
            description,
            bind=bind,
            on_ready=ready,
            on_coordinator_gone=coordinator_gone if has_coordinator else None,
        )


def _print_warning(message: Warning | str, *where: object, **more: object) -> None:
    """Print a warning as this command's errors are, without the line of code that gives it."""
    print(f"kerasps serve: warning: {message}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kerasps",
        description="Parameter-server training for Keras 3.",
        epilog="`kerasps COMMAND --help` explains each command.",
    )
    parser.add_argument("--version", action="version", version=f"kerasps {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=_Parser
    )
    raw = argparse.RawDescriptionHelpFormatter
    _add_launch(commands)
    _add_serve(commands)
    commands.add_parser(
        "env", help="print what a bug report needs", description=_ENV_HELP, formatter_class=raw
    )
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser that says what to do where no script is named."""

    def error(self, message: str) -> NoReturn:
        """End the process with exit code 2, and the message."""
        if message == "the following arguments are required: script.py, args":
            message = (
                "No script is named. Expected: the training script, behind the options. Received: "
                f"none. Say `{self.prog} train.py`, or `{self.prog} --help` for the options."
            )
        super().error(message)


def _add_launch(commands: Any) -> None:
    launch: argparse.ArgumentParser = commands.add_parser(
        "launch",
        help="run a script with a cluster around it, on this machine",
        usage="kerasps launch [options] script.py [args ...]",
        description=_LAUNCH_HELP,
        epilog=_LAUNCH_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # An option that is not ours belongs to the script, and must not be taken for the
        # abbreviation of one that is.
        allow_abbrev=False,
    )
    launch.set_defaults(parser=launch)
    launch.add_argument(
        "--num-workers",
        type=_count,
        metavar="N",
        help="worker processes (default: 2; environment: KERASPS_NUM_WORKERS)",
    )
    launch.add_argument(
        "--num-ps",
        type=_count,
        metavar="M",
        help="ps processes (default: 1; environment: KERASPS_NUM_PS)",
    )
    _add_mode(launch, "who drives the steps")
    launch.add_argument(
        "--log-dir",
        metavar="DIR",
        help="directory for one log file per process (default: a temporary one, which is kept "
        "when a task died; environment: KERASPS_LOG_DIR)",
    )
    launch.add_argument(
        "--start-timeout",
        type=_seconds,
        metavar="SECONDS",
        help="time limit for all processes to be ready (default: 60; environment: "
        "KERASPS_START_TIMEOUT)",
    )
    launch.add_argument(
        "--max-restarts",
        type=_count_or_zero,
        metavar="N",
        help="restarts within an hour of each worker, and of the whole run for each ps and for the "
        f"script; 0: none (default: {DEFAULT_MAX_RESTARTS}; environment: KERASPS_MAX_RESTARTS)",
    )
    _add_evaluator(launch)
    launch.add_argument("script", metavar="script.py", help="the training script")
    launch.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="args", help="arguments of the script"
    )


def _add_evaluator(launch: argparse.ArgumentParser) -> None:
    """Add the options of an evaluator that runs beside the script."""
    launch.add_argument(
        "--evaluator",
        type=_command,
        metavar="COMMAND",
        help="a script that evaluates checkpoints meanwhile, in quotes where it has arguments "
        "(default: none; environment: KERASPS_EVALUATOR)",
    )
    launch.add_argument(
        "--evaluator-timeout",
        type=_seconds,
        metavar="SECONDS",
        help="time for the evaluator to end when the training has (default: 600; environment: "
        "KERASPS_EVALUATOR_TIMEOUT)",
    )


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="run the server of the worker or ps task in TF_CONFIG",
        description=_SERVE_HELP,
        epilog=_SERVE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.set_defaults(parser=serve)
    _add_mode(serve, "who drives the steps; with worker, the chief may go and come back")
    serve.add_argument(
        "--bind",
        metavar="ADDRESS",
        help="the address of this machine to listen on, 0.0.0.0 for all (default: the host of the "
        "task's own entry in TF_CONFIG; environment: KERASPS_BIND)",
    )


def _add_mode(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument(
        "--mode",
        type=_mode,
        metavar="|".join(MODES),
        help=f"{what} (default: {MODES[0]}; environment: KERASPS_MODE)",
    )


def _setting(
    parser: argparse.ArgumentParser,
    argument: _T | None,
    variable: str,
    convert: Callable[[str], _T],
    default: _T,
) -> _T:
    """Return an explicit argument, else an environment variable, else a default."""
    if argument is not None:
        return argument
    text = os.environ.get(variable)
    if not text:
        return default
    try:
        return convert(text)
    except argparse.ArgumentTypeError as exc:
        parser.error(f"environment variable {variable}: {exc}")


def _mode(text: str) -> str:
    if text not in MODES:
        raise argparse.ArgumentTypeError(
            f"Not a mode. Expected: {' or '.join(MODES)}. Received: {text!r}. Give one of these."
        )
    return text


def _count_or_zero(text: str) -> int:
    return _count(text, least=0)


def _count(text: str, least: int = 1) -> int:
    value: object = text
    with contextlib.suppress(ValueError):
        value = int(text)
    try:
        return count(
            "Not a count", value, least=least, received=repr(text), advice="Give one like 2."
        )
    except (TypeError, ValueError) as exc:
        # The one error of which argparse prints the text.
        raise argparse.ArgumentTypeError(str(exc)) from None


def _command(text: str) -> list[str]:
    try:
        command = shlex.split(text)
    except ValueError:
        command = []
    if not command or not os.path.isfile(command[0]):
        raise argparse.ArgumentTypeError(
            "Not an evaluation script. Expected: a Python file, and its arguments in the same "
            f"quotes. Received: {text!r}. Give one like 'evaluate.py --steps 100'."
        )
    return command


def _seconds(text: str) -> float:
    value: object = text
    with contextlib.suppress(ValueError):
        value = float(text)
    try:
        return seconds("Not a time limit", value, received=repr(text), advice="Give one like 60.")
    except (TypeError, ValueError) as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None
