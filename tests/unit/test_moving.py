"""The pages on moving: what they say of feature columns, of errors, and of a TFJob."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from support.documentation import CHECKOUT, errors_of_page

# Feature columns


def feature_columns():
    """Rows of the table of feature columns of which the page says that both sides are equal."""
    text = (CHECKOUT / "docs" / "moving_from_estimator.md").read_text()
    rows = re.findall(r"^\| `(.+)` \| `(.+)` \| equal \|$", text, re.MULTILINE)
    assert len(rows) == text.count("| equal |")
    return rows


PEOPLE = {
    "age": tf.constant([[3.0], [18.0], [34.0], [35.0], [90.0]]),
    "day": tf.constant([[0], [6], [3], [2], [1]]),
    "color": tf.constant([["red"], ["green"], ["blue"], ["red"], ["blue"]]),
    "city": tf.constant([["Rome"], ["Oslo"], ["Lima"], ["Bonn"], ["Nice"]]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("before", "after"), feature_columns(), ids=lambda side: side.partition("(")[0]
)
def test_a_layer_computes_what_a_feature_column_does(before, after):
    tf_keras = pytest.importorskip("tf_keras", reason="tf_keras has the layer of feature columns")
    column = eval(before, {"fc": tf.feature_column})
    expected = tf_keras.layers.DenseFeatures([column])(PEOPLE)
    found = eval(after, {"layers": keras.layers, "x": PEOPLE})
    np.testing.assert_allclose(found, expected, rtol=1e-6)


# Errors


def test_errors_of_the_page_on_estimators():
    def dataset():
        return tf.data.Dataset.range(3)

    messages = []
    for call in (
        lambda: tf.estimator,
        lambda: kerasps.TrainSpec(dataset, hooks=[]),
        lambda: kerasps.TrainSpec(dataset()),
    ):
        with pytest.raises((AttributeError, TypeError)) as caught:
            call()
        messages.append(str(caught.value))
    quoted = errors_of_page("moving_from_estimator")
    assert len(quoted) == len(messages)
    for quote, message in zip(quoted, messages, strict=True):
        assert quote in message
