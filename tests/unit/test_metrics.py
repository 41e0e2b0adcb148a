"""The metrics of recommenders in plain Keras, against NumPy and scikit-learn."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.metrics import log_loss, roc_auc_score

from kerasps.metrics import Calibration, GroupedAUC, NormalizedEntropy
from support.documentation import CHECKOUT, code_blocks

NUM_GROUPS = 12


def examples(num=600, seed=0):
    """Labels, predictions, weights and groups. Predictions are midway between thresholds, so that
    those of one bucket are a tie for scikit-learn too.
    """
    generator = np.random.default_rng(seed)
    predictions = ((generator.integers(0, 199, num) + 0.5) / 199).astype("float32")
    labels = (generator.random(num) < 0.2 + 0.6 * predictions).astype("float32")
    groups = generator.integers(0, NUM_GROUPS - 1, num)  # the last one has no examples
    labels[groups == 3] = 1
    weights = generator.integers(1, 5, num).astype("float32")
    return labels, predictions, weights, groups


def logits_of(predictions):
    return np.log(predictions / (1 - predictions.astype("float64"))).astype("float32")


def expected_entropy(labels, predictions, weights=None):
    mean = np.average(labels, weights=weights)
    baseline = -mean * np.log(mean) - (1 - mean) * np.log(1 - mean)
    return log_loss(labels, predictions, sample_weight=weights) / baseline


def expected_calibration(labels, predictions, weights=None):
    weights = np.ones_like(labels) if weights is None else weights
    return (weights * predictions).sum(dtype="float64") / (weights * labels).sum()


def expected_grouped_auc(labels, predictions, groups, weights=None, weighting="impressions"):
    weights = np.ones_like(labels) if weights is None else weights
    found = []
    for group in set(groups.tolist()):
        its = groups == group
        if len(set(labels[its])) == 2:
            auc = roc_auc_score(labels[its], predictions[its], sample_weight=weights[its])
            shares = {
                "impressions": weights[its].sum(),
                "clicks": (weights * labels)[its].sum(),
                "equal": 1,
            }
            found.append((auc, shares[weighting]))
    return np.average([auc for auc, _ in found], weights=[share for _, share in found])


def batches(*arrays, size=64):
    for start in range(0, len(arrays[0]), size):
        yield [None if a is None else a[start : start + size] for a in arrays]


SIMPLE = {
    "NormalizedEntropy": (NormalizedEntropy, expected_entropy),
    "Calibration": (Calibration, expected_calibration),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize("name", SIMPLE)
def test_entropy_and_calibration_are_those_of_all_examples(name, from_logits, weighted):
    cls, expected = SIMPLE[name]
    labels, predictions, weights, _ = examples()
    weights = weights if weighted else None
    metric = cls(from_logits=from_logits)
    given = logits_of(predictions) if from_logits else predictions
    for y_true, y_pred, sample_weight in batches(labels, given, weights):
        metric.update_state(y_true, y_pred, sample_weight)
    assert float(metric.result()) == pytest.approx(expected(labels, predictions, weights), rel=1e-6)


@pytest.mark.parametrize("weighting", ["impressions", "clicks", "equal"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("from_logits", [False, True])
def test_grouped_auc_is_that_of_scikit_learn(from_logits, weighted, weighting):
    labels, predictions, weights, groups = examples()
    weights = weights if weighted else None
    metric = GroupedAUC(NUM_GROUPS, weighting=weighting, from_logits=from_logits)
    given = logits_of(predictions) if from_logits else predictions
    for y_true, y_pred, sample_weight, its in batches(labels, given, weights, groups):
        metric.update_state(y_true, y_pred, sample_weight, groups=its)
    expected = expected_grouped_auc(labels, predictions, groups, weights, weighting)
    assert float(metric.result()) == pytest.approx(expected, rel=1e-12)


def test_one_group_has_the_auc_of_keras():
    labels, _, weights, _ = examples()
    predictions = np.random.default_rng(1).random(600).astype("float32")
    ours, keras_auc = GroupedAUC(1, thresholds=40), keras.metrics.AUC(num_thresholds=40)
    ours.update_state(labels, predictions, weights, groups=np.zeros(600, int))
    keras_auc.update_state(labels, predictions, weights)
    assert float(ours.result()) == pytest.approx(float(keras_auc.result()), rel=1e-5)


def test_thresholds_where_the_predictions_are_tell_small_ones_apart():
    labels, predictions, _, groups = examples()
    small = predictions / 1000
    expected = expected_grouped_auc(labels, predictions, groups)
    results = []
    for thresholds in (200, np.arange(1, 199) / 199 / 1000):
        metric = GroupedAUC(NUM_GROUPS, thresholds=thresholds)
        metric.update_state(labels, small, groups=groups)
        results.append(float(metric.result()))
    # All lie below the first of those at equal distances: ties.
    assert results == [0.5, pytest.approx(expected, rel=1e-12)]


def test_groups_are_a_second_column_of_the_labels_too():
    labels, predictions, weights, groups = examples()
    one, other = GroupedAUC(NUM_GROUPS), GroupedAUC(NUM_GROUPS)
    one.update_state(labels, predictions, weights, groups=groups)
    columns = np.stack([labels, groups], 1)
    for dtype in ("float32", "int64"):
        other.reset_state()
        other.update_state(columns.astype(dtype), predictions[:, None], weights)
        assert float(one.result()) == float(other.result())


def test_hashed_ids_are_any_integers_and_stay_apart_where_there_is_room():
    labels, predictions, _, groups = examples()
    ids = np.random.default_rng(2).integers(-(2**62), 2**62, NUM_GROUPS)
    metric = GroupedAUC(10_000, hash_groups=True, thresholds=200)
    metric.update_state(labels, predictions, groups=ids[groups])
    expected = expected_grouped_auc(labels, predictions, groups)
    assert float(metric.result()) == pytest.approx(expected, rel=1e-12)
    # Ids that follow each other, or are multiples of a power of two, fill most rows.
    for step in (1, 2**10, 2**33):
        metric = GroupedAUC(1000, hash_groups=True, thresholds=3)
        ones = np.ones(1000)
        metric.update_state(ones, ones, groups=np.arange(1000) * step)
        filled = np.count_nonzero(metric.variables[0].numpy().sum(1))
        assert filled > 600, step


METRICS = [NormalizedEntropy, Calibration, lambda **options: GroupedAUC(NUM_GROUPS, **options)]
EACH = pytest.mark.parametrize("make", METRICS, ids=["entropy", "calibration", "grouped_auc"])


def update(metric, labels, predictions, weights, groups):
    more = {"groups": groups} if isinstance(metric, GroupedAUC) else {}
    metric.update_state(labels, predictions, weights, **more)
    return metric


@EACH
def test_shapes_dtypes_and_batches_change_nothing(make):
    data = examples()
    labels, predictions, weights, groups = data
    expected = float(update(make(), *data).result())
    assert np.isfinite(expected)
    batch_by_batch = make()
    for batch in batches(*data, size=7):
        update(batch_by_batch, *batch)
    assert float(batch_by_batch.result()) == expected
    column = np.s_[:, None]
    for given in [
        (labels[column], predictions, weights, groups),
        (labels, predictions[column], weights[column], groups[column]),
        (labels.astype(bool), predictions, weights.astype("int32"), groups.astype("int32")),
        (labels.astype("int64"), predictions.astype("float64"), weights.astype("float16"), groups),
        tuple(a.reshape(200, 3) for a in data),
    ]:
        assert float(update(make(), *given).result()) == pytest.approx(expected, rel=1e-7)
    # Half of the bits of a prediction: between other thresholds it may be, and far off it is not.
    rounded = tf.cast(predictions, "bfloat16")
    assert float(update(make(), labels, rounded, weights, groups).result()) == pytest.approx(
        expected, rel=2e-2
    )


@EACH
def test_weights_broadcast(make):
    labels, predictions, weights, groups = examples()
    in_rows = [a.reshape(200, 3) for a in (labels, predictions, groups)]
    of_rows = update(make(), *in_rows[:2], weights[:200], in_rows[2])
    one_by_one = update(make(), labels, predictions, np.repeat(weights[:200], 3), groups)
    assert float(of_rows.result()) == float(one_by_one.result())
    doubled = update(make(), labels, predictions, 2.0, groups)
    plain = update(make(), labels, predictions, None, groups)
    assert float(doubled.result()) == pytest.approx(float(plain.result()), rel=1e-12)


@EACH
def test_nothing_and_an_empty_batch_are_nan_and_a_reset_forgets(make):
    metric, data = make(), examples()
    assert np.isnan(float(metric.result()))
    update(metric, *(a[:0] for a in data))
    assert np.isnan(float(metric.result()))
    assert float(update(metric, *data).result()) == float(update(make(), *data).result())
    before = float(metric.result())
    update(metric, *(a[:0] for a in data))
    assert float(metric.result()) == before
    metric.reset_state()
    assert np.isnan(float(metric.result()))


@EACH
@pytest.mark.parametrize("label", [0, 1])
def test_one_label_alone_has_no_entropy_and_no_auc(make, label):
    _, predictions, weights, groups = examples()
    result = float(update(make(), np.full(600, label), predictions, weights, groups).result())
    assert np.isnan(result) == (label == 0 or make is not Calibration)


@EACH
def test_a_prediction_that_is_nan_is_seen(make):
    labels, predictions, weights, groups = examples()
    predictions[100] = np.nan
    assert np.isnan(float(update(make(), labels, predictions, weights, groups).result()))


@EACH
def test_a_graph_and_xla_give_the_same(make):
    data = examples()
    expected = float(update(make(), *data).result())
    for jit_compile in (False, True):
        metric = make()
        specs = [tf.TensorSpec([None], a.dtype) for a in data]
        compiled = tf.function(
            lambda *batch, metric=metric: update(metric, *batch).result(),
            specs,
            jit_compile=jit_compile,
        )
        compiled(*(a[:350] for a in data))
        result = compiled(*(a[350:] for a in data))
        assert float(result) == pytest.approx(expected, rel=1e-6)


def test_a_sigmoid_in_a_graph_is_clipped_as_elsewhere():
    logits, labels = np.array([40.0, -3.0], "float32"), np.array([0.0, 1.0])

    def entropy(metric):
        metric.update_state(labels, tf.sigmoid(logits))
        return float(metric.variables[0])

    eager, graph = NormalizedEntropy(), NormalizedEntropy()
    tf.function(lambda: graph.update_state(labels, tf.sigmoid(logits)))()
    assert float(graph.variables[0]) == pytest.approx(entropy(eager), rel=1e-6)
    # It was 40 from the logits.
    assert float(eager.variables[0]) == pytest.approx(np.log(1e7) + np.log1p(np.exp(3)), rel=0.02)


def test_sums_go_on_where_those_of_float32_stand_still():
    metric = Calibration()
    metric.update_state([1.0], [1.0], [2.0**25])
    metric.update_state([1.0, 0.0], [1.0, 1.0])
    assert [v.dtype for v in metric.variables] == ["float64"] * 2
    assert [float(v) for v in metric.variables] == [2**25 + 2, 2**25 + 1]
    assert Calibration(dtype="float32").variables[0].dtype == "float32"


# Keras


def test_a_model_that_was_compiled_with_them_is_saved_and_loaded(tmp_path):
    labels, predictions, _, _ = examples()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(
        "sgd",
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[NormalizedEntropy(from_logits=True), Calibration(from_logits=True, name="ctr")],
    )
    x, y = predictions[:, None], labels[:, None]
    model.fit(x, y, verbose=0)
    expected = model.evaluate(x, y, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.evaluate(x, y, verbose=0) == expected


@pytest.mark.parametrize(
    "metric",
    [
        NormalizedEntropy(from_logits=True, name="ne", dtype="float32"),
        Calibration(),
        GroupedAUC(
            np.int64(7), thresholds=np.array([0.1, 0.5]), weighting="clicks", hash_groups=True
        ),
        GroupedAUC(3, thresholds=np.int32(5), from_logits=True),
    ],
    ids=lambda metric: metric.name,
)
def test_a_metric_is_made_again_from_its_config(metric):
    config = keras.saving.serialize_keras_object(metric)
    assert (config["module"], config["registered_name"].partition(">")[0]) == (
        "kerasps.metrics",
        "kerasps",
    )
    again = keras.saving.deserialize_keras_object(config)
    assert type(again) is type(metric)
    assert again.get_config() == metric.get_config()
    assert [v.shape for v in again.variables] == [v.shape for v in metric.variables]
    assert [v.dtype for v in again.variables] == [v.dtype for v in metric.variables]


PAGE = (CHECKOUT / "docs" / "metrics.md").read_text()


@pytest.mark.parametrize("number", range(len(code_blocks(PAGE))))
def test_examples_of_the_page_run(number):
    namespace = {"__name__": "example"}
    exec(compile(code_blocks(PAGE)[number], "docs/metrics.md", "exec"), namespace)
    results = {name: values[0] for name, values in namespace["history"].items()}
    assert {"normalized_entropy", "grouped_auc"} & results.keys()
    assert all(np.isfinite(value) for value in results.values()), results


# What is wrong


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Calibration(dtype="int32"), ValueError, r"'float64'. Received: dtype='int32'"),
        (lambda: Calibration(dtype="float16"), ValueError, r"Received: dtype='float16'"),
        (lambda: NormalizedEntropy(from_logits=1), TypeError, r"Received: from_logits=1\."),
        (lambda: GroupedAUC(0), ValueError, r"at least 1\. Received: num_groups=0\."),
        (lambda: GroupedAUC(2.5), TypeError, r"Received: num_groups=2.5\."),
        (lambda: GroupedAUC(True), TypeError, r"Received: num_groups=True\."),
        (lambda: GroupedAUC(2, thresholds=2), ValueError, r"Received: thresholds=2\."),
        (lambda: GroupedAUC(2, thresholds=[]), ValueError, r"Received: thresholds=\[\]\."),
        (lambda: GroupedAUC(2, thresholds=[0.5, 0.2]), ValueError, r"ascending order\. Received"),
        (lambda: GroupedAUC(2, thresholds=[0.0, 0.2]), ValueError, r"between 0 and 1"),
        (lambda: GroupedAUC(2, thresholds=[np.nan]), ValueError, r"between 0 and 1"),
        (lambda: GroupedAUC(2, thresholds="many"), TypeError, r"Received: thresholds='many'\."),
        (lambda: GroupedAUC(2, thresholds=True), TypeError, r"Received: thresholds=True\."),
        (lambda: GroupedAUC(2, thresholds=0.5), TypeError, r"Received: thresholds=0.5\."),
        (lambda: GroupedAUC(2, weighting="views"), ValueError, r"'clicks' or 'equal'. Received"),
        (lambda: GroupedAUC(2, hash_groups="yes"), TypeError, r"Received: hash_groups='yes'\."),
    ],
)
def test_a_wrong_argument_says_what_is_expected(make, error, message):
    with pytest.raises(error, match=message):
        make()


ONES = np.ones(4, "float32")


@EACH
@pytest.mark.parametrize(
    ("shapes", "wrong"),
    [
        (((3,), (4,), None), "y_true"),
        (((4, 2), (4,), None), "y_true"),
        (((4,), (4, 2), None), "y_true"),
        (((4,), (4,), (3,)), "sample_weight"),
        (((4,), (4,), (4, 2)), "sample_weight"),
    ],
)
def test_shapes_that_do_not_go_together_are_refused(make, shapes, wrong):
    labels, predictions, weights = (None if s is None else np.ones(s, "float32") for s in shapes)
    metric = make()
    with pytest.raises(ValueError, match=f"`{metric.name}` .* value of `{wrong}` for each"):
        update(metric, labels, predictions, weights, np.zeros(predictions.shape, int))
    assert not any(v.numpy().any() for v in metric.variables)


def test_groups_that_are_missing_or_no_numbers_are_refused():
    metric = GroupedAUC(3)
    with pytest.raises(ValueError, match=r"was given no groups\. .*Received: y_true.shape=\(4,\)"):
        metric.update_state(ONES, ONES)
    with pytest.raises(ValueError, match="value of `groups` for each"):
        metric.update_state(ONES, ONES, groups=[1, 2])
    with pytest.raises(TypeError, match=r"Received: string\. Use `keras.layers.StringLookup`"):
        metric.update_state(ONES, ONES, groups=["a", "b", "c", "d"])
    with pytest.raises(TypeError, match="Received: bool"):
        metric.update_state(ONES, ONES, groups=[True] * 4)


@pytest.mark.parametrize("wrong", [-1, 3])
def test_an_id_that_is_out_of_range_is_an_error_and_nan_under_xla(wrong):
    metric, groups = GroupedAUC(3), np.array([0, wrong, 2, 1])
    labels = np.array([0.0, 1.0, 0.0, 1.0])
    call = tf.function(lambda: metric.update_state(labels, ONES, groups=groups))
    for update_state in (lambda: metric.update_state(labels, ONES, groups=groups), call):
        with pytest.raises(
            tf.errors.InvalidArgumentError,
            match=r"`GroupedAUC` are out of range. Expected: 0 to 2",
        ):
            update_state()
        assert not any(v.numpy().any() for v in metric.variables)
    compiled = tf.function(
        lambda: metric.update_state(labels, ONES, groups=groups), jit_compile=True
    )
    compiled()
    metric.update_state([0.0, 1.0], [0.1, 0.2], groups=[0, 0])
    assert np.isnan(float(metric.result()))
