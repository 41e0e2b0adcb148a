"""Checks that a step uses no operation that synchronous updates do not support."""

from __future__ import annotations

from collections.abc import Sequence

from kerasps.errors import UnsupportedError
from kerasps.step.contract.inventory import Inventory
from kerasps.step.updates.update import Update


def check_no_update(updates: Sequence[Update]) -> None:
    """Check that a function that a custom loop schedules applies no optimizer.

    Raises UnsupportedError if it applies one.
    """
    for update in updates:
        raise _unsupported(
            f"optimizer {update.optimizer.name!r} is applied in a function that a custom loop "
            "schedules, and no ps knows which workers to wait for",
            "Train with `model.fit`",
        )


def check_synchronous(method: str, updates: Sequence[Update], inventory: Inventory) -> None:
    """Check that an update by the mean of several workers' gradients is exact.

    Raises UnsupportedError if it is not.
    """
    for update in updates:
        reason = _reason_against(update)
        if reason is not None:
            what, instead = reason
            raise _unsupported(f"optimizer {update.optimizer.name!r} {what}", instead)
    ahead = [variable.path for variable in inventory.ahead]
    if ahead:
        raise _unsupported(
            f"{method} reads {', '.join(map(repr, ahead))} after an update of it, and no worker "
            "knows the new value before all gradients have arrived",
            "Read it before the update",
        )


def _reason_against(update: Update) -> tuple[str, str] | None:
    """Return why an update is unsupported, and what to do instead; None if it is supported."""
    optimizer = update.optimizer
    for argument in ("clipnorm", "global_clipnorm", "clipvalue"):
        if getattr(optimizer, argument, None) is not None:
            return (
                f"has {argument}={getattr(optimizer, argument)!r}, by which each worker would clip "
                "its own gradients and not their mean",
                f"Leave `{argument}` out",
            )
    if update.tensors.applied is not None:
        return (
            "is applied inside a condition, as that of a loss scale is, on which workers may "
            "differ",
            "Apply it in each step: `bfloat16` needs no loss scale",
        )
    return None


def _unsupported(what: str, instead: str) -> UnsupportedError:
    return UnsupportedError(
        "With update_mode='sync', the ps apply the mean of all workers' gradients. Expected: an "
        f"update that follows from the mean alone. Received: {what}. {instead}, or train with "
        "update_mode='async'."
    )
