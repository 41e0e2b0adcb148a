"""How many executions are sent as one."""

from __future__ import annotations

import pytest

from kerasps.training.loop import _executions_at_once


@pytest.mark.parametrize(
    ("most", "in_epoch", "num_workers", "expected"),
    [
        (0, 20, 1, 1),  # executions are longer than what overlaps
        (1, None, 1, 1),
        (4, None, 3, 4),
        (4, 20, 1, 4),
        (4, 21, 1, 3),  # without a shorter one at the end
        (4, 23, 1, 4),  # there is one in any case
        (4, 20, 4, 2),  # two for each worker
        (4, 3, 4, 1),
    ],
)
def test_executions_are_sent_as_one_while_each_worker_has_its_share(
    most, in_epoch, num_workers, expected
):
    assert _executions_at_once(most, in_epoch, num_workers) == expected
