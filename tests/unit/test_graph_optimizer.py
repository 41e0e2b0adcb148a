"""How much of TensorFlow's optimizer of graphs is done to what tasks run."""

from __future__ import annotations

import pytest
import tensorflow as tf

from kerasps import _compat
from kerasps.runtime.graph_optimizer import optimizing


def rewrite_options():
    options = _compat.eager_context().function_call_options
    config = tf.compat.v1.ConfigProto.FromString(options.config_proto_serialized)
    return config.graph_options.rewrite_options


@pytest.fixture
def user_options():
    """Sets options as a user does, and takes them back."""
    before = dict(_compat.eager_context()._optimizer_experimental_options)
    yield tf.config.optimizer.set_experimental_options
    _compat.eager_context()._optimizer_experimental_options.clear()
    tf.config.optimizer.set_experimental_options(before)


def test_passes_that_are_about_gpus_are_left_out():
    before = rewrite_options()
    with optimizing():
        options = rewrite_options()
    expected = type(before)()
    expected.CopyFrom(before)
    expected.layout_optimizer = before.OFF
    expected.memory_optimization = before.NO_MEM_OPT
    assert options == expected
    assert rewrite_options() == before


def test_all_is_left_out():
    with optimizing(is_on=False):
        assert rewrite_options().disable_meta_optimizer
    assert not rewrite_options().disable_meta_optimizer


def test_what_the_user_has_set_stays(user_options):
    user_options({"layout_optimizer": True, "constant_folding": False})
    with optimizing():
        options = rewrite_options()
    assert options.layout_optimizer == options.ON
    assert options.constant_folding == options.OFF


def test_an_error_leaves_the_options_as_they_were():
    before = rewrite_options()
    with pytest.raises(RuntimeError, match="in between"), optimizing(is_on=False):
        raise RuntimeError("in between")
    assert rewrite_options() == before


@pytest.mark.parametrize("is_on", [True, False])
def test_functions_return_what_they_did(is_on):
    function = tf.function(lambda x: tf.nn.relu(x @ x + 1.0)).get_concrete_function(
        tf.TensorSpec([3, 3])
    )
    x = tf.random.stateless_normal([3, 3], [1, 2])
    expected = function(x).numpy()
    with optimizing(is_on=is_on):
        assert (function(x).numpy() == expected).all()
