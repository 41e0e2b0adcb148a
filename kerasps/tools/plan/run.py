"""Runs a script up to its first step, without tasks, and prints its plan."""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Console

from kerasps import strategy
from kerasps.hooks.patch import check_patched, install
from kerasps.tools.plan.advice import advice_for
from kerasps.tools.plan.dry_run import FirstStepReached, PlanError
from kerasps.tools.plan.host import FirstStep, PlannedHost
from kerasps.tools.plan.measure import plan_of
from kerasps.tools.plan.patches import PATCHES
from kerasps.tools.plan.report import Plan
from kerasps.tools.plan.table import print_plan

# No task listens there, and nothing connects to it.
_HOST = "127.0.0.1"
# The width of the tables, for output that goes to a file.
_WIDTH = 120


def plan(
    script: str,
    args: Sequence[str],
    *,
    num_workers: int,
    num_ps: int,
    sample_batches: int,
    as_json: bool,
) -> int:
    """Run a script up to its first step, and print its plan.

    Call once in a process, before it has a strategy. The process is then a dry run until it ends.

    Args:
        as_json: whether to print only JSON on stdout; the script's stdout then goes to stderr.
    """
    _prepare(num_workers, num_ps)
    plans: list[Plan | Exception] = []

    def measure(first: FirstStep) -> None:
        if plans:  # the script handled the exception that should have ended it
            return
        try:
            plans.append(_advised(plan_of(first, script, sample_batches), first))
        except Exception as exc:  # kept here, since the script might handle it
            plans.append(exc)

    PlannedHost.at_first_step = measure
    out = _reserve_stdout() if as_json else sys.stdout
    error = _run(script, args)
    found = plans[0] if plans else PlanError(error)
    if isinstance(found, Exception):
        traceback.print_exception(found)
        found = PlanError("The first step cannot be measured. This is a defect: please report it.")
    if isinstance(found, PlanError):
        print(f"kerasps plan: error: {found}", file=sys.stderr, flush=True)
        return 1
    found = _noted(found, num_workers, num_ps)
    if as_json:
        print(json.dumps(found.as_dict(), indent=2), file=out, flush=True)
    else:
        console = Console(file=out, width=None if out.isatty() else _WIDTH)
        print_plan(found, console)
    return 0


def _prepare(num_workers: int, num_ps: int) -> None:
    """Make this process a dry run."""
    install(PATCHES, check_patched(PATCHES))
    vars(strategy)["CoordinatorHost"] = PlannedHost
    ports = iter(range(1, 2 + num_workers + num_ps))
    jobs = {"chief": 1, "worker": num_workers, "ps": num_ps}
    cluster = {job: [f"{_HOST}:{next(ports)}" for _ in range(n)] for job, n in jobs.items()}
    config = {"cluster": cluster, "task": {"type": "chief", "index": 0}}
    os.environ["TF_CONFIG"] = json.dumps(config)


def _reserve_stdout() -> TextIO:
    """Return this process's stdout, and redirect all other output for stdout to stderr."""
    sys.stdout.flush()
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return stdout


def _run(script: str, args: Sequence[str]) -> str:
    """Run a script up to its first step; return the reason if it does not reach one."""
    sys.argv = [script, *args]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except FirstStepReached:
        pass
    except PlanError as exc:
        return str(exc)
    except SystemExit as exc:
        return f"{script} ended with exit code {_code_of(exc)} before it ran a step. {_advice()}"
    except BaseException as exc:
        traceback.print_exception(type(exc), exc, _of_script(exc.__traceback__, script))
        return f"{script} failed before it ran a step; its error is above."
    return f"{script} ended and ran no step. {_advice()}"


def _code_of(exc: SystemExit) -> object:
    return 0 if exc.code is None else exc.code


def _advice() -> str:
    received = "such a strategy, and no such call" if PlannedHost.num_made else "no such strategy"
    return (
        "Expected: a script that makes a `kerasps.ParameterServerStrategy`, makes and compiles a "
        "model in its scope, and calls `fit`, `evaluate`, `predict` or `train_on_batch`. Received: "
        f"{received}. Give the script the arguments with which it trains."
    )


def _of_script(trace: TracebackType | None, script: str) -> TracebackType | None:
    """Return the part of a traceback that begins in the script; None if no part does."""
    current = trace
    while current is not None and current.tb_frame.f_code.co_filename != script:
        current = current.tb_next
    return current


def _advised(found: Plan, first: FirstStep) -> Plan:
    options = first.host.options
    advice = advice_for(
        found,
        is_split=options.variable_partitioner is not None,
        is_16_bits=options.wire_dtype is not None,
        overlaps=options.overlap,
    )
    return dataclasses.replace(found, advice=advice)


def _noted(found: Plan, num_workers: int, num_ps: int) -> Plan:
    """Return a plan with a note if the script names its cluster."""
    if (found.num_workers, found.num_ps) == (num_workers, num_ps):
        return found
    note = (
        f"The script names a cluster of {found.num_workers} workers and {found.num_ps} ps, and not "
        f"the {num_workers} and {num_ps} of this command."
    )
    return dataclasses.replace(found, notes=(*found.notes, note))
