"""What the arguments of a strategy may be, and which of them go together."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, Literal, get_args

from kerasps import checks

# The values of the arguments that are one of a few names, for type checkers and for the checks.
ShardLayout = Literal["mod", "div"]
SparseUpdates = Literal["lazy", "dense"]
UpdateMode = Literal["async", "sync"]


def check_tables(arguments: MutableMapping[str, Any]) -> None:
    """Check what says how variables are split and tables updated.

    Leaves `table_min_bytes` as an `int`.
    """
    checks.choice("shard_layout", arguments["shard_layout"], get_args(ShardLayout))
    checks.choice("sparse_updates", arguments["sparse_updates"], get_args(SparseUpdates))
    arguments["table_min_bytes"] = checks.count(
        "Argument `table_min_bytes` is not a number of bytes",
        arguments["table_min_bytes"],
        least=0,
        received=f"table_min_bytes={arguments['table_min_bytes']!r}",
        advice="Give the bytes from which on a variable that is read by rows is a table, or 0 for "
        "all of them.",
    )
    variable_partitioner = arguments["variable_partitioner"]
    is_class = isinstance(variable_partitioner, type)
    if variable_partitioner is not None and (is_class or not callable(variable_partitioner)):
        advice = (
            f"Make an object of it: `{variable_partitioner.__name__}(...)`."
            if is_class
            else "Make one of kerasps's, or leave it out: every variable is whole then."
        )
        raise TypeError(
            "Argument `variable_partitioner` must be a callable of `shape` and `dtype`. Expected: "
            "one such as `kerasps.MinSizePartitioner()`. Received: "
            f"variable_partitioner={variable_partitioner!r}. {advice}"
        )


def checked_staleness(max_staleness: Any) -> int | None:
    """Return how many steps a worker may be ahead of the slowest; None for any number."""
    if max_staleness is None:
        return None
    return checks.count(
        "Argument `max_staleness` is not a number of steps",
        max_staleness,
        received=f"max_staleness={max_staleness!r}",
        advice="Give the steps that a worker may be ahead of the slowest: 1 has all go step by "
        "step. Leave it out, and no worker waits.",
    )


def check_overlap(overlap: Any) -> None:
    """Check what says whether pulls and pushes overlap."""
    if not isinstance(overlap, bool):
        raise TypeError(
            "Argument `overlap` must say whether a worker pulls while its push is on the way. "
            f"Expected: True or False. Received: overlap={overlap!r}. Leave it out where one "
            "worker is to equal plain Keras."
        )


def check_update_mode(arguments: Mapping[str, Any], num_workers: int) -> None:
    """Check what says when updates are made, and that nothing else says otherwise."""
    update_mode = arguments["update_mode"]
    checks.choice("update_mode", update_mode, get_args(UpdateMode))
    num_backups = checks.count(
        "Argument `num_backup_workers` is not a number of workers",
        arguments["num_backup_workers"],
        least=0,
        received=f"num_backup_workers={arguments['num_backup_workers']!r}",
        advice="Give how many workers an update does not wait for; 0 waits for all.",
    )
    if num_backups and update_mode != "sync":
        raise ValueError(
            "Argument `num_backup_workers` says whom synchronous updates do not wait for, and "
            "others wait for nobody. Expected: 0, or update_mode='sync'. Received: "
            f"num_backup_workers={num_backups!r} with update_mode={update_mode!r}. Leave one out."
        )
    if num_backups >= num_workers:
        raise ValueError(
            "Argument `num_backup_workers` leaves no worker to wait for. Expected: less than the "
            f"{num_workers} workers of the cluster. Received: num_backup_workers={num_backups!r}. "
            "Give fewer."
        )
    if update_mode == "sync":
        for name, default in (("max_staleness", None), ("overlap", False)):
            if arguments[name] != default:
                raise ValueError(
                    f"Argument `{name}` is about updates that workers make each by itself. "
                    f"Expected: {name}={default!r} with update_mode='sync', where all workers "
                    f"start from the same values. Received: {name}={arguments[name]!r}. Leave one "
                    "out."
                )
