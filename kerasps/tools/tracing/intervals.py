"""Sets of points in time, as sorted lists of intervals that do not touch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the points that are in at least one of the intervals."""
    joined: list[Interval] = []
    for begin, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def both(one: Iterable[Interval], other: Iterable[Interval]) -> list[Interval]:
    """Return the points that are in both sets."""
    others = list(other)
    found, start = [], 0
    for begin, end in one:
        while start < len(others) and others[start][1] <= begin:
            start += 1
        for index in range(start, len(others)):
            if others[index][0] >= end:
                break
            found.append((max(begin, others[index][0]), min(end, others[index][1])))
    return found


def without(one: Iterable[Interval], other: Iterable[Interval]) -> list[Interval]:
    """Return the points of `one` that are not in `other`."""
    edges = [float("-inf"), *itertools.chain.from_iterable(other), float("inf")]
    return both(one, zip(edges[::2], edges[1::2], strict=True))


def length(intervals: Iterable[Interval]) -> float:
    """Return the total length of the intervals."""
    return sum(end - begin for begin, end in intervals)
