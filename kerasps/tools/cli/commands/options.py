"""Converts, checks and describes the options that several commands share."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

from kerasps.checks import count, seconds

MODES = ("coordinator", "worker")
# The object to which a command adds its parser.
Commands: TypeAlias = "argparse._SubParsersAction[Any]"


class CommandParser(argparse.ArgumentParser):
    """A parser whose options have environment variables, with a helpful error without a script."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # For each option with a variable: how to convert its text, and its default.
        self._settings: dict[str, tuple[Callable[[str], object], object]] = {}

    def add_setting(
        self,
        option: str,
        convert: Callable[[str], object],
        default: object,
        metavar: str,
        text: str,
        *,
        shown: object = None,
    ) -> None:
        """Add an option; `KERASPS_` and its name is the environment variable for it.

        Args:
            text: its help, without the default and the variable.
            shown: the default as the help shows it; None for `default`.
        """
        name = option.removeprefix("--").replace("-", "_")
        self._settings[name] = convert, default
        shown = ("none" if default is None else default) if shown is None else shown
        told = f"{text} (default: {shown}; environment: {_variable(name)})"
        self.add_argument(option, type=convert, metavar=metavar, help=told)

    def fill_in(self, args: argparse.Namespace) -> None:
        """Set the options that are not given: from the environment, else to their defaults."""
        for name, (convert, default) in self._settings.items():
            text = os.environ.get(_variable(name))
            if getattr(args, name) is None:
                try:
                    setattr(args, name, convert(text) if text else default)
                except argparse.ArgumentTypeError as exc:
                    self.error(f"environment variable {_variable(name)}: {exc}")

    def error(self, message: str) -> NoReturn:
        """End the process with exit code 2, and the message."""
        if message == "the following arguments are required: script.py, args":
            message = (
                "No script is named. Expected: the training script, after the options. Received: "
                f"none. Give one like `{self.prog} train.py`; `{self.prog} --help` lists the "
                "options."
            )
        super().error(message)


def _variable(name: str) -> str:
    return f"KERASPS_{name.upper()}"


def add_command(
    commands: Commands,
    name: str,
    *,
    summary: str,
    description: str,
    epilog: str | None = None,
    runs_script: bool = False,
) -> CommandParser:
    """Add a command, and return its parser, which the parsed arguments have as `parser`."""
    command: CommandParser = commands.add_parser(
        name,
        help=summary,
        usage=f"kerasps {name} [options] script.py [args ...]" if runs_script else None,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # An unknown option belongs to the script, and must not count as an abbreviation of one of
        # ours.
        allow_abbrev=not runs_script,
    )
    command.set_defaults(parser=command)
    return command


def add_numbers(command: CommandParser) -> None:
    """Add the options for the numbers of tasks."""
    command.add_setting("--num-workers", as_count, 2, "N", "worker processes")
    command.add_setting("--num-ps", as_count, 1, "M", "ps processes")


def add_script(command: CommandParser, text: str = "the training script") -> None:
    """Add the script and its arguments, after all options."""
    command.add_argument("script", metavar="script.py", help=text)
    command.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="args", help="arguments of the script"
    )


def add_mode(command: CommandParser, what: str) -> None:
    """Add the option that selects the process that drives the steps."""
    command.add_setting("--mode", as_mode, MODES[0], "|".join(MODES), what)


def add_evaluator_timeout(command: CommandParser) -> None:
    """Add the option for the end of an evaluator."""
    command.add_setting(
        *("--evaluator-timeout", as_seconds, 600.0, "SECONDS"),
        "time for the evaluator to end after the training",
        shown=600,
    )


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
    """Convert the text of a count."""
    value: object = text
    with contextlib.suppress(ValueError):
        value = int(text)
    try:
        return count(
            "Not a count", value, least=least, received=repr(text), advice="Give one like 2."
        )
    except (TypeError, ValueError) as exc:
        # The only error whose text argparse prints.
        raise argparse.ArgumentTypeError(str(exc)) from None


def as_evaluator(text: str) -> list[str]:
    """Convert the text of `--evaluator`; its script must exist."""
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
    """End the process if the script is not a file; warn of our options after it."""
    if not os.path.isfile(script):
        what, fix = "There is no such script", "Correct the path."
        if os.path.isdir(script):
            what, fix = "The script is a directory", "Name the file in it."
        elif os.path.basename(script).startswith("python"):
            fix = f"Leave {script} out, and name only the script."
        parser.error(f"{what}. Expected: a Python file. Received: {script!r}. {fix}")
    ours = _options_of(parser)
    behind = [arg for arg in args if arg.partition("=")[0] in ours]
    if behind:
        print(
            f"{parser.prog}: {' '.join(behind)} after the script is passed to the script; put "
            f"options of {parser.prog} before it",
            file=sys.stderr,
            flush=True,
        )


def _options_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the options of a parser, except `--help`."""
    return re.findall(r"^  (--[\w-]+)", parser.format_help(), re.MULTILINE)


def refuse(parser: argparse.ArgumentParser, others: Sequence[str]) -> NoReturn:
    """End the process, because `parser` does not know some arguments."""
    like = difflib.get_close_matches(others[0].partition("=")[0], _options_of(parser), 1)
    hint = f" Did you mean {like[0]}?" if like else ""
    script = (
        " Options of the script go after it."
        if parser.prog.endswith(("launch", "plan", "run"))
        else ""
    )
    parser.error(
        f"unrecognized arguments: {' '.join(others)}. Expected: those that `{parser.prog} --help` "
        f"lists.{hint}{script}"
    )
