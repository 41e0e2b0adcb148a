"""Checks of an evaluator's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kerasps.evaluator.best_model import SidecarEvaluatorModelExport


def check_list(argument: str, value: object, kind: type) -> None:
    """Raise `TypeError` if an argument is not a list of objects of a class."""
    public = "kerasps" if kind.__module__.startswith("kerasps") else "keras.callbacks"
    name = f"`{public}.{kind.__name__}`"
    advice = ""
    if isinstance(value, str) or not isinstance(value, Sequence):
        advice = f"Put it into a list: `{argument}=[...]`."
    else:
        wrong = next((item for item in value if not isinstance(item, kind)), None)
        if wrong is None and None not in value:
            return
        advice = (
            f"Make an object of it: `{wrong.__name__}(...)`."
            if isinstance(wrong, type)
            else f"Remove {wrong!r} from it."
        )
    raise TypeError(
        f"Argument `{argument}` is not a list of {name}. Expected: a list of objects of this "
        f"class. Received: {argument}={value!r}. {advice}"
    )


def check_exports(
    exports: Sequence[SidecarEvaluatorModelExport],
    directory: Path,
    *,
    argument: str = "checkpoint_dir",
) -> None:
    """Raise `ValueError` if a model would be exported among the checkpoints."""
    for export in exports:
        if export.directory.resolve() == directory.resolve():
            raise ValueError(
                "A model would be exported among the checkpoints, and then be evaluated. "
                f"Expected: an `export_filepath` outside of `{argument}`. Received: both in "
                f"{str(directory)!r}. Export elsewhere, such as "
                f"{str(directory / 'best' / 'model.keras')!r}."
            )
