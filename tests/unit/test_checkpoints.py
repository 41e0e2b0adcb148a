"""Sharded variables in checkpoints: what the saver behind TensorFlow's own writes and reads."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from kerasps.saving import checkpoints
from kerasps.saving.checkpoints import ShardedSaver
from kerasps.variables.rows import chunks as pieces
from kerasps.variables.rows.sharding import LAYOUTS, ShardedStorage, WholeValue

VALUE = np.random.default_rng(0).normal(size=(301, 4)).astype("float32")
# Made to look like what is searched for.
KEY = "model/a\nkey (DT_FLOAT) [7]/.ATTRIBUTES/VARIABLE_VALUE"


@pytest.fixture(params=[64, 1000, 1 << 20], ids=lambda size: f"pieces of {size}", autouse=True)
def small_pieces(request, monkeypatch):
    for module in (pieces, checkpoints):
        monkeypatch.setattr(module, "CHUNK_BYTES", request.param)


def storage_of(value, num_shards, layout):
    sharding = LAYOUTS[layout](len(value), num_shards)
    shards = [tf.Variable(sharding.rows_in(value, shard)) for shard in range(num_shards)]
    return ShardedStorage(shards, sharding, "table")


def saver_of(storages):
    return ShardedSaver({key: WholeValue(storage) for key, storage in storages.items()})


def write(prefix, storages):
    saver = saver_of(storages)
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=saver.save(prefix, None), destination_prefix=prefix
    )


def read(prefix, storages):
    saver_of(storages).restore(prefix, None)


@pytest.mark.parametrize("written", [("mod", 2), ("div", 5)], ids=str)
@pytest.mark.parametrize("restored", [("mod", 3), ("div", 4)], ids=str)
def test_a_checkpoint_holds_one_tensor_that_any_number_of_shards_reads(tmp_path, written, restored):
    prefix = f"{tmp_path}/saved"
    (layout, num_shards), (other_layout, other_num_shards) = written, restored
    write(
        prefix,
        {
            KEY: storage_of(VALUE, num_shards, layout),
            "other": storage_of(-VALUE[:9], num_shards, layout),
        },
    )
    reader = tf.train.load_checkpoint(prefix)
    assert reader.get_variable_to_shape_map() == {KEY: [301, 4], "other": [9, 4]}
    np.testing.assert_array_equal(reader.get_tensor(KEY), VALUE)
    storages = {
        KEY: storage_of(np.zeros_like(VALUE), other_num_shards, other_layout),
        "other": storage_of(np.zeros([9, 4], "float32"), other_num_shards, other_layout),
    }
    read(prefix, storages)
    np.testing.assert_array_equal(storages[KEY].numpy(), VALUE)
    np.testing.assert_array_equal(storages["other"].numpy(), -VALUE[:9])


@pytest.mark.parametrize(
    "slices", [[""], ["301 4 0,200:-", "301 4 200,101:-"]], ids=["whole", "two slices"]
)
def test_what_others_wrote_is_read(tmp_path, slices):
    prefix = f"{tmp_path}/saved"
    parts = [VALUE] if slices == [""] else [VALUE[:200], VALUE[200:]]
    tf.raw_ops.SaveV2(
        prefix=prefix, tensor_names=[KEY] * len(parts), shape_and_slices=slices, tensors=parts
    )
    storage = storage_of(np.zeros_like(VALUE), 3, "mod")
    read(prefix, {KEY: storage})
    np.testing.assert_array_equal(storage.numpy(), VALUE)


def test_the_largest_piece_of_a_tensor_is_known(tmp_path):
    prefix = f"{tmp_path}/saved"
    tf.raw_ops.SaveV2(
        prefix=prefix,
        tensor_names=[KEY, KEY, f"{KEY}/whole", "row"],
        shape_and_slices=["301 4 0,10:-", "301 4 10,291:-", "", ""],
        tensors=[VALUE[:10], VALUE[10:], VALUE, VALUE[0]],
    )
    content = tf.train.load_checkpoint(prefix).debug_string()
    assert [checkpoints._stored_rows(content, key) for key in (KEY, f"{KEY}/whole", "row")] == [
        291,
        301,
        4,
    ]
