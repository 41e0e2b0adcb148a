"""What a load report says of the steps that were counted."""

from __future__ import annotations

import numpy as np
import pytest

from kerasps.step.tracing import traffic as load
from kerasps.step.tracing.traffic import StepTraffic, TableTraffic, TrafficMeter

TRAFFIC = StepTraffic(
    {0: 400, 1: 100},
    {0: 40},
    [
        TableTraffic(0, "users", 128, True),
        TableTraffic(1, "users", 128, True),
        TableTraffic(1, "movies", 4, False),
    ],
)


class Clock:
    """Tells the time that a test sets."""

    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(load, "time", clock)
    return clock


def counted(clock, seconds=2.0):
    meter = TrafficMeter(2)
    meter.start(TRAFFIC)
    meter.resume()
    meter.add(3, [np.array([6, 4, 20])])
    meter.add(1, [np.array([2, 0, 0])])
    clock.now += seconds
    meter.pause()
    return meter


def test_rows_and_bytes_are_per_second_and_ps(clock):
    report = counted(clock).report()
    first, second = report
    assert (report.steps, report.seconds) == (4, 2.0)
    assert (first.rows_read_per_second, second.rows_read_per_second) == (4.0, 12.0)
    assert (first.rows_written_per_second, second.rows_written_per_second) == (4.0, 2.0)
    assert first.bytes_read_per_second == (8 * 128 + 4 * 400) / 2
    assert second.bytes_read_per_second == (4 * 128 + 20 * 4 + 4 * 100) / 2
    assert first.bytes_written_per_second == (8 * 128 + 4 * 40) / 2
    assert second.bytes_written_per_second == 4 * 128 / 2
    assert second.hottest_tables == (("movies", 10.0), ("users", 2.0))


def test_time_between_epochs_does_not_count(clock):
    meter = counted(clock)
    clock.now += 50
    assert meter.report().seconds == 2.0
    meter.resume()
    clock.now += 1
    assert meter.report().seconds == 3.0


def test_a_report_prints_as_a_table(clock):
    report = counted(clock).report()
    lines = str(report).splitlines()
    assert len(lines) == 3
    assert lines[0].endswith("hottest tables (rows read/s)")
    assert lines[2].split() == ["1", "12", "0.00", "2", "0.00", "movies", "(10),", "users", "(2)"]
    assert repr(report) == "<LoadReport of 4 steps in 2.0 s on 2 ps>"
    assert report[:1] == (report[0],)
