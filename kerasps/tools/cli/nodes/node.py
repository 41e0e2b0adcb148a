"""Serves, trains or evaluates on a node of `kerasps run`, until the run ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from kerasps.cluster.description.cluster_description import ClusterDescription
from kerasps.cluster.members.reachability import CONNECT_TIMEOUT_VARIABLE
from kerasps.cluster.processes.process import end_with_parent
from kerasps.cluster.processes.restarts import DEFAULT_MAX_RESTARTS
from kerasps.cluster.serving.listen_address import (
    BIND_VARIABLE,
    coordinator_listen_address,
    leads_here,
    listen_address,
)
from kerasps.cluster.serving.ports import check_port
from kerasps.cluster.serving.run_end import (
    CODE_OF_LOST,
    RunEndAnnouncer,
    RunEndWatch,
)
from kerasps.errors import ClusterConfigError, TaskStartError
from kerasps.evaluator.process import END_OF_TRAINING_ON_STDIN
from kerasps.runtime.addresses import split_address
from kerasps.tools.cli.nodes.served_task import chief_of, end_of_run, say_as, serve_task
from kerasps.tools.cli.scripts.driven_script import DrivenScript
from kerasps.tools.cli.scripts.run_state import RunState
from kerasps.tools.cli.scripts.script_process import idle_tasks
from kerasps.tools.cli.scripts.script_run import ScriptRun, script_environment
from kerasps.tools.cli.scripts.signals import Signals, signal_handlers

# The time that the chief waits for tasks to ask for the end of the run. A task that is restarting
# takes a few seconds to ask; a lost one never does.
_ANNOUNCE_S = 15.0
# A scheduler kills 30 s after SIGTERM, of which a script that meets a silent ps needs 15 to 20.
# Each task asks once a second.
_ANNOUNCE_AFTER_SIGNAL_S = 5.0
_POLL_INTERVAL_S = 0.05
# A scheduler's name service gets a task's name, or new address, some time after the task's start.
_RENAME_S = 60.0
_RESOLVE_INTERVAL_S = 0.5
_SAY_AFTER_S = 2.0
# The system frees the port of a killed script within a second or two, also of one with much memory.
_PORT_S = 10.0
NAME = "kerasps run"


@dataclass(frozen=True)
class NodeOptions:
    """The settings of a node, whatever its role.

    Args:
        mode: `"coordinator"` or `"worker"`: the process that drives the steps.
        start_timeout: the seconds to wait for other tasks, and for names.
    """

    mode: str = "coordinator"
    bind: str | None = None
    start_timeout: float = 600.0
    max_restarts: int = DEFAULT_MAX_RESTARTS
    evaluator_timeout: float = 600.0


def say(text: str) -> None:
    """Print a line of this command."""
    say_as(NAME, text)


def serve(description: ClusterDescription, options: NodeOptions) -> NoReturn:
    """Serve a ps or worker until the run ends, and end with its exit code."""
    wait_for_name(description, options)
    chief = chief_of(description)
    until = None
    if chief is None:
        say("the addresses given do not include the chief's, so this task serves until a signal")
    else:
        until = end_of_run(
            NAME, description, chief[1], options.mode, timeout_s=options.start_timeout
        )
    serve_task(
        description,
        name=NAME,
        bind=options.bind,
        mode=options.mode,
        until=until,
        restarts=True,
        signal_sets_code=True,
    )


def train(command: Sequence[str], description: ClusterDescription, options: NodeOptions) -> int:
    """Run the script as the chief, announce its end to the tasks, and return its exit code."""
    received: list[signal.Signals] = []
    with signal_handlers(lambda number, frame: received.append(signal.Signals(number))):
        wait_for_name(description, options)
        wait_for_port(description, options, received)
        # No grace period: tasks that hear nothing from the chief restart.
        state = RunState(options.max_restarts, code_of_lost=CODE_OF_LOST, death_grace_s=0.0)
        run = ScriptRun(command, description, state, NAME, _script_variables(options))
        with contextlib.closing(run):
            code = run.until_the_end(received)
            if signal.SIGINT in received and code != 0:
                code = 128 + signal.SIGINT
            run.end_forks_of_script()
        return _announce(description, options, code, received)


def end_without_script(description: ClusterDescription, options: NodeOptions, code: int) -> None:
    """Announce to the tasks that the run has ended, if this node is its chief and has no script."""
    chief = chief_of(description)
    if chief is None or chief[0] != description.task:
        return
    say(f"the run ends with exit code {code}; telling the tasks")
    received: list[signal.Signals] = []
    with signal_handlers(lambda number, frame: received.append(signal.Signals(number))):
        _announce(description, options, code, received)


def _script_variables(options: NodeOptions) -> dict[str, str]:
    variables = {}
    if CONNECT_TIMEOUT_VARIABLE not in os.environ:
        variables[CONNECT_TIMEOUT_VARIABLE] = f"{options.start_timeout:g}"
    if options.bind is not None:
        variables[BIND_VARIABLE] = options.bind
    return variables


def _announce(
    description: ClusterDescription,
    options: NodeOptions,
    code: int,
    received: list[signal.Signals],
) -> int:
    """Announce the end of the run to the tasks, and return its exit code.

    A signal during the announcement cuts it short.
    """
    this = description.task
    others = [
        task for task in description.addresses if task != this and task[0] in ("worker", "ps")
    ]
    drivers = [task for task in others if task[0] == "worker" and options.mode == "worker"]
    before = len(received)
    try:
        announcer = RunEndAnnouncer(
            listen_address(description, options.bind),
            split_address(str(description.address))[1],
            code,
            others,
            waits_for=drivers,
        )
    except (OSError, ClusterConfigError) as exc:
        say(f"cannot tell the tasks that the run has ended: {exc}")
        return code
    with contextlib.closing(announcer):
        limit = _ANNOUNCE_AFTER_SIGNAL_S if received else _ANNOUNCE_S
        missing = announcer.finish(limit, is_hurried=lambda: len(received) > before)
    if missing:
        names = ", ".join(f"{job} {index}" for job, index in sorted(missing))
        say(f"these tasks did not ask for the end of the run: {names}")
    return announcer.code


def drive(command: Sequence[str], description: ClusterDescription, options: NodeOptions) -> int:
    """Run the script as a worker that drives its own steps; return the exit code of this node.

    It restarts a script that a signal ends. If the chief's script fails, it ends this one.
    """
    chief = chief_of(description)
    is_chief = chief is not None and chief[0] == description.task
    received: list[signal.Signals] = []
    with signal_handlers(lambda number, frame: received.append(signal.Signals(number))):
        wait_for_name(description, options)
        wait_for_port(description, options, received)
        env = script_environment(description, {**os.environ, **_script_variables(options)})
        watch = None if is_chief else _watch(description, options)
        script = DrivenScript(command, env, options.max_restarts, say)
        with contextlib.closing(script):
            code = script.until_the_end(received, watch)
            idle = idle_tasks(script.strategies, description, driven=True)
            # A late one, which the end of the run ended, had nothing to do.
            if code == 0 and idle is not None and not script.was_late:
                say(idle)
        return _announce(description, options, code, received) if is_chief else code


def _watch(description: ClusterDescription, options: NodeOptions) -> RunEndWatch | None:
    """Return a watch for the end of the run, for a node without a server; None without a chief."""
    chief = chief_of(description)
    if chief is None:
        return None
    return RunEndWatch(chief[1], description.task, timeout_s=options.start_timeout, say=say)


def evaluate(command: Sequence[str], description: ClusterDescription, options: NodeOptions) -> int:
    """Run the script as the evaluator, and tell it when the training is over."""
    received: list[signal.Signals] = []
    watch = _watch(description, options)
    env = script_environment(description, os.environ)
    if watch is not None:
        env[END_OF_TRAINING_ON_STDIN] = "1"
    with (
        signal_handlers(lambda number, frame: received.append(signal.Signals(number))),
        subprocess.Popen(
            command,
            env=env,
            stdin=None if watch is None else subprocess.PIPE,
            preexec_fn=end_with_parent(),
        ) as process,
    ):
        code = _evaluate_until_the_end(process, watch, received, options.evaluator_timeout)
    run_code = 0 if watch is None else watch.exit_code or 0
    return (128 - code if code < 0 else code) or run_code


def _evaluate_until_the_end(
    process: subprocess.Popen[bytes],
    watch: RunEndWatch | None,
    received: list[signal.Signals],
    timeout_s: float,
) -> int:
    signals = Signals(received)
    end_at = None
    while process.poll() is None:
        for number in signals.to_pass_on(signals.new()):
            process.send_signal(number)
        if watch is not None and end_at is None and watch.is_over():
            end_at = time.monotonic() + timeout_s
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        if end_at is not None and time.monotonic() > end_at:
            say(
                f"the evaluator did not end within {timeout_s:g} s after the training, and is "
                "killed. Allow more time with --evaluator-timeout."
            )
            process.kill()
            process.wait()
            return 1
        time.sleep(_POLL_INTERVAL_S)
    return process.returncode


def wait_for_name(description: ClusterDescription, options: NodeOptions) -> None:
    """Wait until the name of this task resolves to this machine, up to a time limit.

    A scheduler's name service gets a name only some time after the task's start, and at first may
    return the address of the task's last machine. If the name stays wrong, this returns, and the
    code that listens later raises the error.
    """
    if options.bind is not None or os.environ.get(BIND_VARIABLE):
        return
    host, _ = split_address(str(description.address))
    began = time.monotonic()
    is_said = False
    while not (is_here := leads_here(host)):
        waited = time.monotonic() - began
        if waited > (options.start_timeout if is_here is None else _RENAME_S):
            return
        if not is_said and waited > _SAY_AFTER_S:
            is_said = True
            what = "has no address yet" if is_here is None else "resolves to another machine"
            say(f"the name {host!r} {what}; waiting")
        time.sleep(_RESOLVE_INTERVAL_S)


def wait_for_port(
    description: ClusterDescription, options: NodeOptions, received: Sequence[signal.Signals]
) -> None:
    """Wait until the port of this task is free, for a few seconds.

    The script of the same task may have ended just now. If it runs on, such as where the command
    was given twice, this script must not start beside it.
    """
    address = str(description.address)
    try:
        listens_on = coordinator_listen_address(
            description, {**os.environ, **_script_variables(options)}
        )
    except ClusterConfigError:
        return  # the strategy raises it
    began = time.monotonic()
    is_said = False
    while True:
        try:
            check_port(address, listens_on, description.task)
        except TaskStartError:
            waited = time.monotonic() - began
            if waited > _PORT_S or received:
                raise
            if not is_said and waited > _SAY_AFTER_S:
                is_said = True
                say(f"the port of {address} is in use by another process; waiting")
        else:
            return
        time.sleep(_RESOLVE_INTERVAL_S)
