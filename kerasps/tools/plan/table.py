"""Prints a `Plan` as tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from kerasps.tools.plan.report import Plan, PSPlan, VariablePlan
from kerasps.words import count, num_bytes, times

# The last row sums up all further variables.
MAX_VARIABLES = 20


def print_plan(plan: Plan, console: Console) -> None:
    """Print a plan."""
    optimizer = f", {plan.optimizer}" if plan.optimizer else ""
    console.print(
        f"{plan.script}: {plan.method} of model '{plan.model}'{optimizer}, on {plan.num_workers} "
        f"workers and {plan.num_ps} ps",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    for table in (_ps(plan), _variables(plan)):
        console.print(table)
    for line in (*_lines(plan), *plan.notes):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print()
    nothing = (
        "Nothing to change, as far as is known." if plan.sample.unknown else "Nothing to change."
    )
    console.print("What would help:" if plan.advice else nothing, highlight=False)
    for advice in plan.advice:
        console.print(f"- {advice.text}", markup=False, highlight=False, soft_wrap=True)


def _table(title: str, columns: Iterable[str], texts: Iterable[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    of_text = set(texts)
    for column in columns:
        table.add_column(column, justify="left" if column in of_text else "right", overflow="fold")
    return table


def _ps(plan: Plan) -> Table:
    columns = ("ps", "variables", "bytes", "slots", "memory", "rows", "pulled", "pushed", "msgs")
    table = _table("What each ps holds, and what each step moves", columns)
    for ps in plan.ps:
        table.add_row(
            str(ps.index),
            count(ps.num_variables),
            num_bytes(ps.variable_bytes),
            num_bytes(ps.slot_bytes),
            num_bytes(ps.memory_bytes),
            *_moved(ps),
        )
    if len(plan.ps) > 1:
        table.add_section()
        step = plan.step
        table.add_row(
            "all",
            count(sum(ps.num_variables for ps in plan.ps)),
            num_bytes(sum(ps.variable_bytes for ps in plan.ps)),
            num_bytes(sum(ps.slot_bytes for ps in plan.ps)),
            num_bytes(sum(ps.memory_bytes for ps in plan.ps)),
            count(step.rows_per_step),
            num_bytes(step.pulled_bytes),
            num_bytes(step.pushed_bytes),
            count(step.messages),
        )
    return table


def _moved(ps: PSPlan) -> tuple[str, ...]:
    return (
        count(ps.rows_per_step),
        num_bytes(ps.pulled_bytes),
        num_bytes(ps.pushed_bytes),
        count(ps.messages),
    )


def _variables(plan: Plan) -> Table:
    columns = ("variable", "shape", "bytes", "slots", "read", "rows per step", "shards on ps")
    table = _table("Variables", columns, ("variable", "read", "shards on ps"))
    for variable in plan.variables[:MAX_VARIABLES]:
        table.add_row(
            variable.path,
            " x ".join(f"{size:,}" if size else "any" for size in variable.shape) or "scalar",
            num_bytes(variable.num_bytes),
            num_bytes(variable.slot_bytes),
            variable.read,
            _rows(variable),
            _shards(variable),
        )
    others = plan.variables[MAX_VARIABLES:]
    if others:
        table.add_section()
        table.add_row(
            f"{len(others):,} others",
            "",
            num_bytes(sum(variable.num_bytes for variable in others)),
            num_bytes(sum(variable.slot_bytes for variable in others)),
        )
    return table


def _rows(variable: VariablePlan) -> str:
    if variable.read != "rows":
        return ""
    return f"{count(variable.rows_per_step)} of {count(variable.ids_per_step)} ids"


def _shards(variable: VariablePlan) -> str:
    ps = [shard.ps for shard in variable.shards]
    if len(ps) <= 4:
        return ", ".join(str(index) for index in ps)
    return f"{len(ps)} on {len(set(ps))} ps"


def _lines(plan: Plan) -> list[str]:
    step, memory, sample = plan.step, plan.worker_memory, plan.sample
    moved = (
        f"A step pulls {num_bytes(step.pulled_bytes)} and pushes {num_bytes(step.pushed_bytes)}, "
        f"in {times(step.messages, 'message')} and {times(step.rounds, 'round trip')} of its pull; "
        f"{step.steps_per_execution} per execution."
    )
    batches = "an unknown number of" if step.num_batches is None else count(step.num_batches)
    data = f"The {step.data_read_by} read{'s' if step.data_read_by == 'coordinator' else ''} " + (
        f"{batches} batches for each pass"
    )
    size = "" if sample.batch_bytes is None else f", of {num_bytes(sample.batch_bytes)}"
    seen = f"{data}{size}. Rows are means over {sample.num_batches} of them."
    needed = (
        f"A worker needs {num_bytes(memory.num_bytes)}: weights {num_bytes(memory.weight_bytes)}, "
        f"gradients {num_bytes(memory.gradient_bytes)}, rows {num_bytes(memory.row_bytes)}, batch "
        f"{num_bytes(memory.batch_bytes)}; and what its layers compute, which is not counted."
    )
    if step.batches_per_step > 1:
        needed += (
            f" A step takes {step.batches_per_step} batches, one for each device; rows and batch "
            "are of one of them."
        )
    return [moved, seen, needed, *([sample.unknown] if sample.unknown else [])]
