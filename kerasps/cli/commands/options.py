"""Converts, checks and describes the options that commands have in common."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias, TypeVar

from kerasps.checks import count, seconds

_T = TypeVar("_T")

MODES = ("coordinator", "worker")
# What a command adds its parser to.
Commands: TypeAlias = "argparse._SubParsersAction[Any]"


class CommandParser(argparse.ArgumentParser):
    """A parser that says what to do where no script is named."""

    def error(self, message: str) -> NoReturn:
        """End the process with exit code 2, and the message."""
        if message == "the following arguments are required: script.py, args":
            message = (
                "No script is named. Expected: the training script, behind the options. Received: "
                f"none. Say `{self.prog} train.py`, or `{self.prog} --help` for the options."
            )
        super().error(message)


def add_numbers(command: argparse.ArgumentParser) -> None:
    """Add the options that say how many tasks there are."""
    command.add_argument(
        "--num-workers",
        type=as_count,
        metavar="N",
        help="worker processes (default: 2; environment: KERASPS_NUM_WORKERS)",
    )
    command.add_argument(
        "--num-ps",
        type=as_count,
        metavar="M",
        help="ps processes (default: 1; environment: KERASPS_NUM_PS)",
    )


def numbers(parser: argparse.ArgumentParser, args: argparse.Namespace) -> tuple[int, int]:
    """Return how many workers and ps there are to be."""
    num_workers = setting(parser, args.num_workers, "KERASPS_NUM_WORKERS", as_count, 2)
    return num_workers, setting(parser, args.num_ps, "KERASPS_NUM_PS", as_count, 1)


def add_script(command: argparse.ArgumentParser) -> None:
    """Add the script and its arguments, behind all options."""
    command.add_argument("script", metavar="script.py", help="the training script")
    command.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="args", help="arguments of the script"
    )


def add_mode(command: argparse.ArgumentParser, what: str) -> None:
    """Add the option that says who drives the steps."""
    command.add_argument(
        "--mode",
        type=as_mode,
        metavar="|".join(MODES),
        help=f"{what} (default: {MODES[0]}; environment: KERASPS_MODE)",
    )


def setting(
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


def as_mode(text: str) -> str:
    """Convert the text of `--mode`."""
    if text not in MODES:
        raise argparse.ArgumentTypeError(
            f"Not a mode. Expected: {' or '.join(MODES)}. Received: {text!r}. Give one of these."
        )
    return text


def as_count_or_zero(text: str) -> int:
    """Convert the text of a number that may be 0."""
    return as_count(text, least=0)


def as_count(text: str, least: int = 1) -> int:
    """Convert the text of a number of things."""
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


def as_evaluator(text: str) -> list[str]:
    """Convert the text of `--evaluator`; the script in it must be there."""
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


def as_seconds(text: str) -> float:
    """Convert the text of a time limit."""
    value: object = text
    with contextlib.suppress(ValueError):
        value = float(text)
    try:
        return seconds("Not a time limit", value, received=repr(text), advice="Give one like 60.")
    except (TypeError, ValueError) as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def check_script(parser: argparse.ArgumentParser, script: str, args: Sequence[str]) -> None:
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
            f"{parser.prog}: {' '.join(behind)} behind the script goes to the script; options of "
            f"{parser.prog} go before it",
            file=sys.stderr,
            flush=True,
        )


def _options_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the options of a parser, but for `--help`."""
    return re.findall(r"^  (--[\w-]+)", parser.format_help(), re.MULTILINE)


def refuse(parser: argparse.ArgumentParser, others: Sequence[str]) -> NoReturn:
    """End the process: there are arguments that `parser` does not know."""
    like = difflib.get_close_matches(others[0].partition("=")[0], _options_of(parser), 1)
    hint = f" Did you mean {like[0]}?" if like else ""
    script = (
        " Options of the script go behind it."
        if parser.prog.endswith(("launch", "plan", "run"))
        else ""
    )
    parser.error(
        f"unrecognized arguments: {' '.join(others)}. Expected: those that `{parser.prog} --help` "
        f"lists.{hint}{script}"
    )
