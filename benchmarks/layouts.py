"""Measures how evenly the layouts "div" and "mod" spread lookups over shards, with NumPy only.

    python benchmarks/layouts.py
    python benchmarks/layouts.py --rows 4000000 --exponent 1.2

The vocabulary follows a power law. A shard serves each distinct row of a batch once, so the measure
is the number of distinct rows per shard and batch. "div" gives each shard a range of ids. "mod"
gives shard s the ids with id % shards == s. Prints the busiest shard over the mean shard: 1.00 is
even; if it equals the number of shards, one shard serves all rows. A step waits for the busiest
shard.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from models import EMBEDDING_BATCH_SIZE, IDS_PER_EXAMPLE, zipf_ids


def hashed(ids: np.ndarray, rows: int) -> np.ndarray:
    """Return ids as a hashing layer computes them: splitmix64 modulo `rows`.

    Ids of similar frequency are then far apart.
    """
    mixed = ids.astype("uint64") + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) % np.uint64(rows)).astype("int64")


def div(ids: np.ndarray, rows: int, shards: int) -> np.ndarray:
    """Return the shard of each id: ranges of ids, the first `rows % shards` one longer."""
    sizes = np.full(shards, rows // shards) + (np.arange(shards) < rows % shards)
    return np.searchsorted(np.cumsum(sizes), ids, side="right")


def mod(ids: np.ndarray, rows: int, shards: int) -> np.ndarray:
    """Return the shard of each id: the shards take ids in turn."""
    return ids % shards


LAYOUTS: dict[str, Callable[[np.ndarray, int, int], np.ndarray]] = {"div": div, "mod": mod}


def imbalance(batches: list[np.ndarray], layout: str, rows: int, shards: int) -> float:
    """Return the busiest shard's distinct rows over the mean shard's, averaged over batches."""
    counts = np.stack(
        [np.bincount(LAYOUTS[layout](batch, rows, shards), minlength=shards) for batch in batches]
    )
    return float((counts.max(axis=1) / counts.mean(axis=1)).mean())


def main() -> None:
    """Draw batches, count, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument(
        "--exponent",
        type=float,
        default=1.05,
        help="id k is drawn in proportion to 1 / (k + 1) ** exponent",
    )
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--shards", nargs="+", type=int, default=[2, 3, 4, 8])
    options = parser.parse_args()

    shape = (options.batches, EMBEDDING_BATCH_SIZE * IDS_PER_EXAMPLE)
    ranks = zipf_ids(np.random.default_rng(0), options.rows, shape, options.exponent)
    batches = {
        "sorted by frequency": [np.unique(batch) for batch in ranks],
        "hashed": [np.unique(hashed(batch, options.rows)) for batch in ranks],
    }
    print("| ids | shards | distinct rows per batch | div: max / mean | mod: max / mean |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, unique in batches.items():
        distinct = np.mean([len(batch) for batch in unique])
        for shards in options.shards:
            cells = [f"{imbalance(unique, layout, options.rows, shards):.2f}" for layout in LAYOUTS]
            print(f"| {name} | {shards} | {distinct:,.0f} | {' | '.join(cells)} |")
    print(
        f"\n{options.rows:,} rows, exponent {options.exponent}, {options.batches} batches of "
        f"{shape[1]:,} ids."
    )


if __name__ == "__main__":
    main()
