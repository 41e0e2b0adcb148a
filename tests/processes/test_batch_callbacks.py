"""How far three workers are ahead of batch callbacks (see cluster/two_workers for more)."""

from __future__ import annotations

from pathlib import Path

from support.batch_callbacks import NUM_BATCHES
from support.process_checks import run_and_report

SCRIPT = Path(__file__).with_name("batch_callbacks.py")


def test_synchronous_updates_are_whole_whatever_callbacks_do():
    report = run_and_report(SCRIPT)
    assert report["rates"] == [step - step % 3 for step in range(NUM_BATCHES)]
    assert report["updates"] == NUM_BATCHES // 3
    # The update of the batch at whose end the stop came.
    assert report["stopped"] == [3, 8]
    # Splits of 6, 5 and 5: who has no more data is not waited for.
    assert report["uneven"] == [6, 16]
