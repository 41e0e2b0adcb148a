"""Which cases of a long matrix are in the ordinary run."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def with_matrix(cases: Iterable[Any], at_length: Collection[Any]) -> list[Any]:
    """Return the cases for `pytest.mark.parametrize`, where `tox -e matrix` runs those `at_length`.

    The ordinary run has the others: of each kind one, with one shard and with several, with and
    without slots, with one step per execution and with more.
    """
    cases = list(cases)
    unknown = [case for case in at_length if case not in cases]
    if unknown:
        raise ValueError(f"No such cases: {unknown}. Expected: some of {cases}.")
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=pytest.mark.matrix if case in at_length else (),
        )
        for case in cases
    ]
