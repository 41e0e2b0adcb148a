"""Callbacks that watch a training do not end it, whatever happens to their files and ports."""

import contextlib
import logging
import resource
import socket
import warnings

import keras
import numpy as np
import pytest

import kerasps
from kerasps.tools.monitoring.sockets import StatusSocket

X, Y = np.ones((64, 4), "float32"), np.ones(64, "float32")


@contextlib.contextmanager
def full_disk(directory):
    """In this context, no file of this process can grow."""
    del directory
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def no_directory(directory):
    """In this context, there is a file in the place of the directory."""
    directory.write_text("a file")
    yield


def fitted(strategy, callbacks, epochs=3):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    history = model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0, callbacks=callbacks)
    assert len(history.history["loss"]) == epochs
    return int(model.optimizer.iterations.numpy())


@pytest.mark.parametrize("fault", [full_disk, no_directory])
@pytest.mark.parametrize(
    ("name", "watch"),
    [
        ("ClusterMonitor", kerasps.ClusterMonitor),
        ("ClusterMonitor", lambda logs: kerasps.ClusterMonitor(logs, update_freq=1)),
        ("StalenessLogger", kerasps.StalenessLogger),
    ],
)
def test_a_file_that_cannot_be_written_is_one_warning(strategy, tmp_path, fault, name, watch):
    directory = tmp_path / "logs"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with fault(directory):
            assert fitted(strategy, [watch(directory)]) == 24
    (text,) = [str(warning.message) for warning in caught if name in str(warning.message)]
    assert text.startswith(f"{name} writes no more events for TensorBoard; the training goes on.")
    assert f"Expected: a directory with room at {directory}" in text


def test_a_directory_that_vanishes(strategy, tmp_path):
    directory = tmp_path / "logs"

    def remove(epoch, logs):
        for path in sorted(directory.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()

    vanish = keras.callbacks.LambdaCallback(on_epoch_begin=remove)
    with warnings.catch_warnings():
        # TensorFlow makes the file again, or it is the warning above.
        warnings.filterwarnings("ignore", message="ClusterMonitor writes no more events")
        assert fitted(strategy, [vanish, kerasps.ClusterMonitor(directory)]) == 24


def test_a_port_that_is_in_use_is_a_warning(strategy):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monitor = kerasps.ClusterMonitor(port=taken.getsockname()[1])
        with pytest.warns(UserWarning, match=r"does not listen at 127\.0\.0\.1:\d+; the training"):
            assert fitted(strategy, [monitor]) == 24
    assert monitor.address is None


def test_a_trace_that_cannot_be_written_is_a_warning(strategy, tmp_path):
    directory = tmp_path / "logs"
    directory.write_text("a file")
    trace = kerasps.Trace(directory, first_step=0, num_steps=1)
    with pytest.warns(UserWarning, match="The trace was not written"):
        assert fitted(strategy, [trace]) == 24
    assert trace.report is None


def test_no_directory_for_the_status_socket(monkeypatch, tmp_path, caplog):
    def no_temporary_directory():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", no_temporary_directory)
    monkeypatch.setattr("kerasps.tools.monitoring.sockets._is_private", lambda directory: False)
    status = StatusSocket(dict)
    with caplog.at_level(logging.INFO, "kerasps"):
        status.start()
    assert status.path is None
    assert "`kerasps top` cannot find this process" in caplog.text
