"""The arguments of strategies: their values, and checks of single ones and of combinations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeVar, get_args

from kerasps import checks

# The values of arguments that take one of a few names, for type checkers and for the checks.
ShardLayout = Literal["mod", "div"]
SparseUpdates = Literal["lazy", "dense"]
UpdateMode = Literal["async", "sync"]
WireDtype = Literal["bfloat16", "float16"]

# Given `shape` and `dtype`, returns the number of shards per axis.
Partitioner = Callable[..., Iterable[int]]


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """The constructor's arguments by which two strategies for the same cluster may differ.

    With the defaults, each worker pushes its updates without waiting for others, and computes on
    all devices that it has.

    Args:
        variable_partitioner: splits variables; None leaves each whole.
        shard_layout: the rule that assigns the rows of a variable to shards.
        sparse_updates: the rows of a table that an update covers.
        table_min_bytes: the size in bytes from which a variable that steps read by rows is a table.
        max_staleness: the number of steps by which a worker may lead the slowest; None for no
            limit.
        overlap: whether a worker pulls for its next step while its last push is in flight.
        update_mode: the moment of an update.
        num_backup_workers: the number of workers that a synchronous update does not wait for.
        worker_devices: the names of the devices that compute on each worker; None for all that it
            has.
        wire_dtype: the dtype in which float32 variables are sent, by parts of their paths, or for
            all; None for float32.
        jit_compile_updates: whether XLA compiles the updates of large values.
    """

    variable_partitioner: Partitioner | None
    shard_layout: ShardLayout
    sparse_updates: SparseUpdates
    table_min_bytes: int
    max_staleness: int | None = None
    overlap: bool = False
    update_mode: UpdateMode = "async"
    num_backup_workers: int = 0
    worker_devices: tuple[str, ...] | None = None
    wire_dtype: WireDtype | Mapping[str, WireDtype | None] | None = None
    jit_compile_updates: bool = True

    def check_alike(self, expected: StrategyOptions) -> None:
        """Check that a further call of the constructor has the arguments of the first one.

        Args:
            expected: the options of the first call.

        Raises:
            ValueError: one of them differs.
        """
        for field in fields(self):
            value, before = getattr(self, field.name), getattr(expected, field.name)
            if not checks.are_alike(value, before):
                raise ValueError(
                    f"Argument `{field.name}` differs from that of the strategy which this process "
                    f"has for this cluster. Expected: {field.name}={before!r}, which gives that "
                    f"strategy back. Received: {field.name}={value!r}. Give the first value, or "
                    "restart the process to use another."
                )


# The arguments of each update mode, with their values in other modes. `FitSurroundings.update_rule`
# gives them to the mode's rule, and the rule's `admission` to the training.
ARGUMENTS_OF_MODE: Mapping[UpdateMode, Mapping[str, object]] = {
    "async": {"max_staleness": None, "overlap": False},
    "sync": {"num_backup_workers": 0},
}


@dataclass(frozen=True, kw_only=True)
class AdmissionTerms:
    """The terms on which an update rule lets workers have steps (`training/epoch/admission.py`).

    Attributes:
        max_ahead: how many batches a worker may be ahead of the slowest; None for any number.
        joins: whether each update waits for the steps of the workers that take part.
        num_backups: the number of workers that such an update does not wait for.
    """

    max_ahead: int | None = None
    joins: bool = False
    num_backups: int = 0


_Options = TypeVar("_Options", bound=StrategyOptions)


def checked_tables(options: _Options) -> _Options:
    """Return the options with `table_min_bytes` as an `int`.

    Raises TypeError or ValueError if an argument about splitting or tables is not one of its
    values.
    """
    checks.choice("shard_layout", options.shard_layout, get_args(ShardLayout))
    checks.choice("sparse_updates", options.sparse_updates, get_args(SparseUpdates))
    table_min_bytes = checks.count(
        "Argument `table_min_bytes` is not a number of bytes",
        options.table_min_bytes,
        least=0,
        received=f"table_min_bytes={options.table_min_bytes!r}",
        advice="Give the size in bytes from which a variable that is read by rows is a table, or 0 "
        "for all of them.",
    )
    _check_partitioner(options.variable_partitioner)
    return replace(options, table_min_bytes=table_min_bytes)


def _check_partitioner(variable_partitioner: object) -> None:
    is_class = isinstance(variable_partitioner, type)
    if variable_partitioner is not None and (is_class or not callable(variable_partitioner)):
        advice = (
            f"Make an object of it: `{variable_partitioner.__name__}(...)`."
            if isinstance(variable_partitioner, type)
            else "Make one of kerasps's, or leave it out to keep every variable whole."
        )
        raise TypeError(
            "Argument `variable_partitioner` must be a callable of `shape` and `dtype`. Expected: "
            "one such as `kerasps.MinSizePartitioner()`. Received: "
            f"variable_partitioner={variable_partitioner!r}. {advice}"
        )


def checked_staleness(max_staleness: object) -> int | None:
    """Return the number of steps by which a worker may lead the slowest; None for no limit."""
    if max_staleness is None:
        return None
    return checks.count(
        "Argument `max_staleness` is not a number of steps",
        max_staleness,
        received=f"max_staleness={max_staleness!r}",
        advice="Give the number of steps by which a worker may lead the slowest: with 1, all "
        "workers go step by step. Leave it out, and no worker waits.",
    )


def checked_wire_dtype(
    wire_dtype: WireDtype | Mapping[str, WireDtype | None] | None,
) -> WireDtype | dict[str, WireDtype | None] | None:
    """Return `wire_dtype`, the dtype in which variables are sent; copies a dictionary.

    Raises TypeError or ValueError if it does not name dtypes.
    """
    for part, dtype in wire_choices(wire_dtype):
        if not isinstance(part, str) or not (dtype is None or isinstance(dtype, str)):
            raise TypeError(
                "Argument `wire_dtype` must name dtypes. Expected: 'bfloat16', 'float16', None, or "
                "a dictionary from parts of variables' paths to these. Received: "
                f"wire_dtype={wire_dtype!r}. Give one such as {{'embedding': 'bfloat16'}}."
            )
        if dtype is not None:
            checks.choice("wire_dtype", dtype, get_args(WireDtype))
    return dict(wire_dtype) if isinstance(wire_dtype, Mapping) else wire_dtype


def wire_choices(
    wire_dtype: WireDtype | Mapping[str, WireDtype | None] | None,
) -> tuple[tuple[str, WireDtype | None], ...]:
    """Return the dtypes in which variables are sent, as pairs of a part of their paths and one."""
    if wire_dtype is None:
        return ()
    return tuple(wire_dtype.items()) if isinstance(wire_dtype, Mapping) else (("", wire_dtype),)


def check_jit_compile_updates(jit_compile_updates: object) -> None:
    """Check the argument that says if XLA compiles updates."""
    if not isinstance(jit_compile_updates, bool):
        raise TypeError(
            "Argument `jit_compile_updates` must say if XLA compiles the updates of large "
            "values. Expected: True or False. Received: "
            f"jit_compile_updates={jit_compile_updates!r}. Leave it out, or give False for updates "
            "that equal Keras's to the last bit."
        )


def check_overlap(overlap: object) -> None:
    """Check the argument that says if pulls and pushes overlap."""
    if not isinstance(overlap, bool):
        raise TypeError(
            "Argument `overlap` must say if a worker pulls while its last push is in flight. "
            f"Expected: True or False. Received: overlap={overlap!r}. Leave it out if one "
            "worker has to equal plain Keras."
        )


def checked_updates(options: _Options, num_workers: int) -> _Options:
    """Return the options with `num_backup_workers` as an `int`.

    Raises TypeError or ValueError if an argument about updates is not one of its values, or cannot
    be combined with another.
    """
    update_mode = options.update_mode
    checks.choice("update_mode", update_mode, get_args(UpdateMode))
    num_backups = checks.count(
        "Argument `num_backup_workers` is not a number of workers",
        options.num_backup_workers,
        least=0,
        received=f"num_backup_workers={options.num_backup_workers!r}",
        advice="Give the number of workers that an update does not wait for; 0 waits for all.",
    )
    for mode, arguments in ARGUMENTS_OF_MODE.items():
        for name, default in arguments.items():
            value = getattr(options, name)
            if mode != update_mode and value != default:
                raise ValueError(
                    f"Argument `{name}` is for update_mode={mode!r}. Expected: {name}={default!r} "
                    f"with update_mode={update_mode!r}. Received: {name}={value!r}. Leave one out."
                )
    if num_backups >= num_workers:
        raise ValueError(
            "Argument `num_backup_workers` leaves no worker to wait for. Expected: less than the "
            f"{num_workers} workers of the cluster. Received: num_backup_workers={num_backups!r}. "
            "Give fewer."
        )
    return replace(options, num_backup_workers=num_backups)
