"""Of a dataset that writes files each worker writes its own; an epoch visits each example once."""

import numpy as np
import pytest
import tensorflow as tf

import kerasps
from kerasps.inputs.make_input import _tell_of_endless_data
from support.models import counting_model, ids_data

NUM_EXAMPLES = 203
EACH_ONCE = (NUM_EXAMPLES, sum(range(NUM_EXAMPLES)), sum(i * i for i in range(NUM_EXAMPLES)))


def examples():
    return tf.data.Dataset.from_tensor_slices(ids_data(NUM_EXAMPLES))


@pytest.fixture
def model(strategy):
    return counting_model(strategy)


def seen(history):
    logs = history.history
    return [
        tuple(map(int, epoch))
        for epoch in zip(logs["examples"], logs["ids"], logs["squares"], strict=True)
    ]


def nested(path):
    def part(index):
        return (
            examples().shard(7, index).cache(tf.strings.join([path, tf.strings.as_string(index)]))
        )

    return tf.data.Dataset.range(7).interleave(part, cycle_length=3)


WRITERS = {
    "cache": lambda path: examples().cache(path).batch(10),
    "cache after shuffle": lambda path: examples().shuffle(100).cache(path).shuffle(50).batch(10),
    "cache of batches": lambda path: examples().batch(10).cache(path),
    "cache in an interleave": lambda path: nested(path).batch(10),
    "snapshot": lambda path: examples().shuffle(100).snapshot(path).batch(10),
}


@pytest.mark.parametrize("name", WRITERS)
def test_an_epoch_visits_each_example_once(model, tmp_path, name):
    dataset = WRITERS[name](str(tmp_path / "written"))
    assert seen(model.fit(dataset, epochs=3, verbose=0)) == [EACH_ONCE] * 3
    assert seen(model.fit(dataset, epochs=1, verbose=0)) == [EACH_ONCE]
    assert model.evaluate(dataset, verbose=0, return_dict=True)["examples"] == NUM_EXAMPLES
    # Another object with the same files, as in a script that runs again.
    again = WRITERS[name](str(tmp_path / "written"))
    assert seen(model.fit(again, epochs=2, verbose=0)) == [EACH_ONCE] * 2


def test_the_same_data_are_evaluated_within_a_pass(model, tmp_path):
    dataset = examples().cache(str(tmp_path / "written")).batch(10)
    model.fit(dataset.repeat(), steps_per_epoch=3, epochs=3, validation_data=dataset, verbose=0)


def test_a_half_written_cache_is_left_alone(model, tmp_path):
    path = tmp_path / "written"
    for worker in range(2):
        for suffix in ("_0.lockfile", "_0.data-00000-of-00001.tempstate1"):
            (tmp_path / f"written.worker-{worker}{suffix}").write_text("of a killed process")
    dataset = examples().cache(str(path)).batch(10)
    assert seen(model.fit(dataset, epochs=2, verbose=0)) == [EACH_ONCE] * 2
    assert (tmp_path / "written.worker-0_0.lockfile").read_text() == "of a killed process"


@pytest.mark.parametrize("is_named", [False, True])
def test_a_function_of_datasets_that_write_files(model, tmp_path, is_named):
    def dataset_fn(context):
        name = f"written-{context.input_pipeline_id}" if is_named else "written"
        shard = examples().shard(context.num_input_pipelines, context.input_pipeline_id)
        return shard.cache(str(tmp_path / name)).batch(10)

    data = kerasps.DatasetCreator(dataset_fn)
    assert seen(model.fit(data, epochs=3, verbose=0)) == [EACH_ONCE] * 3
    # `predict` reads the data of one process, in order, so its files hold other data.
    predicted = model.predict(data, verbose=0)
    assert len(predicted) == NUM_EXAMPLES
    assert seen(model.fit(data, epochs=1, verbose=0)) == [EACH_ONCE]
    assert np.isfinite(predicted).all()


def test_it_is_said_once_that_workers_read_endless_data_at_their_pace(model, caplog):
    _tell_of_endless_data.cache_clear()
    for _ in range(2):
        model.fit(examples().batch(10).repeat().shuffle(3), steps_per_epoch=3, verbose=0)
    (text,) = [text for text in caplog.messages if "never ends" in text]
    assert "leave out `.repeat()` and `steps_per_epoch`" in text
