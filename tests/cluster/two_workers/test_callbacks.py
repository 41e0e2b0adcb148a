"""Every callback that Keras ships, with two workers and a table in two shards."""

from __future__ import annotations

import http.server
import json
import threading

import keras
import numpy as np
import pytest

import kerasps
from support.matrix import with_matrix
from support.models import (
    TOUCHED,
    counting_model,
    descending_model,
    endless,
    ids_data,
    prediction_itself,
    touches,
)

RATE = 0.5
CUSTOM = {"prediction_itself": prediction_itself}


def descending(strategy, **compile_arguments):
    """Return a model whose touched rows go down by RATE in each step: they tell the updates."""
    with strategy.scope():
        return descending_model(keras.optimizers.SGD(RATE), 3, **compile_arguments)


def fit(model, callbacks, epochs=2, steps=60, **arguments):
    creator = kerasps.DatasetCreator(lambda context: touches())
    return model.fit(
        creator, epochs=epochs, steps_per_epoch=steps, verbose=0, callbacks=callbacks, **arguments
    )


def num_updates(model):
    """By the touched rows, which must all say the same, and by the optimizer."""
    rows = model.layers[0].get_weights()[0][TOUCHED]
    assert np.all(rows == rows[0, 0])
    return float(rows[0, 0]) / -RATE, int(model.optimizer.iterations.numpy())


def plain_from(path):
    model = descending_model(keras.optimizers.SGD(RATE), 3)
    model.optimizer.build(model.trainable_variables)
    model.load_weights(path)
    return model


class During(keras.callbacks.Callback):
    """Calls a function of the model and the batch at the end of each execution."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def on_train_batch_end(self, batch, logs=None):
        self.function(self.model, batch)


def test_weights_are_at_rest_in_a_callback(strategy):
    seen = []
    model = descending(strategy)
    fit(
        model,
        [
            During(
                lambda model, batch: (
                    seen.append((batch, *num_updates(model))) if batch % 4 == 0 else None
                )
            )
        ],
    )
    assert len(seen) > 5
    for batch, by_rows, by_counter in seen:
        assert by_rows == by_counter > batch % 60
    assert num_updates(model) == (120, 120)


def test_weights_set_in_a_callback_are_where_training_goes_on(strategy):
    def reset(model, batch):
        if batch >= 29 and not done:
            model.layers[0].set_weights([np.zeros([1000, 32], "float32")])
            done.append(int(model.optimizer.iterations.numpy()))

    done = []
    model = descending(strategy)
    fit(model, [During(reset)], epochs=1)
    by_rows, by_counter = num_updates(model)
    assert by_counter == 60
    assert by_rows == 60 - done[0]


def test_the_model_can_evaluate_predict_and_fit_in_a_callback(strategy):
    def look(model, batch):
        if batch >= 29 and not seen:
            ids = np.array([TOUCHED] * 5)
            iterations = int(model.optimizer.iterations.numpy())
            seen.append(
                (
                    iterations,
                    model.evaluate(ids, np.zeros(5), verbose=0),
                    model.predict(ids, verbose=0),
                )
            )

    seen = []
    model = descending(strategy)
    history = fit(model, [During(look)], epochs=1)
    ((iterations, loss, predicted),) = seen
    value = -RATE * iterations * len(TOUCHED) * 32
    assert loss == pytest.approx(value)
    np.testing.assert_allclose(predicted, [value] * 5)
    assert num_updates(model) == (60, 60)
    assert len(history.history["loss"]) == 1


@pytest.mark.parametrize("weights_only", with_matrix([False, True], at_length=[True]))
def test_model_checkpoint_in_batches(strategy, tmp_path, weights_only):
    model = descending(strategy)
    name = "at-{batch}.weights.h5" if weights_only else "at-{batch}.keras"
    callback = keras.callbacks.ModelCheckpoint(
        str(tmp_path / name), save_freq=20, save_weights_only=weights_only
    )
    fit(model, [callback], epochs=1)
    saved = sorted(tmp_path.iterdir())
    assert [path.name.split(".")[0] for path in saved] == ["at-21", "at-42"]
    for path in saved:
        loaded = (
            plain_from(path)
            if weights_only
            else keras.models.load_model(path, CUSTOM, safe_mode=False)
        )
        by_rows, by_counter = num_updates(loaded)
        assert by_rows == by_counter > 0


def test_model_checkpoint_of_the_best_and_early_stopping(strategy, tmp_path):
    class Scripted(keras.callbacks.Callback):
        """A validation loss of which the second is the best."""

        def on_epoch_end(self, epoch, logs=None):
            logs["val_loss"] = [2.0, 1.0, 3.0, 4.0, 5.0][epoch]

    model = descending(strategy)
    path = str(tmp_path / "best.weights.h5")
    callbacks = [
        Scripted(),
        keras.callbacks.ModelCheckpoint(path, save_best_only=True, save_weights_only=True),
        keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True),
    ]
    history = fit(model, callbacks, epochs=5)
    assert history.epoch == [0, 1, 2, 3]
    assert num_updates(plain_from(path)) == (120, 120)
    assert num_updates(model) == (
        120,
        240,
    )  # weights are restored, the optimizer's state is not: as in plain Keras


@pytest.mark.parametrize("save_freq", with_matrix(["epoch", 20], at_length=[20]))
def test_backup_and_restore_goes_on_where_it_was(strategy, tmp_path, save_freq):
    class Interrupt(keras.callbacks.Callback):
        def __init__(self, epoch, batch):
            super().__init__()
            self.at = epoch, batch

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            if (self.epoch, batch) >= self.at:
                raise KeyboardInterrupt

    backup = str(tmp_path / "backup")
    first = descending(strategy)
    with pytest.raises(KeyboardInterrupt):
        fit(
            first,
            # Keras counts on from where it asked, up to 3 steps late each time: the fifth backup by
            # batches is of step 115 at the latest.
            [keras.callbacks.BackupAndRestore(backup, save_freq=save_freq), Interrupt(1, 57)],
            epochs=3,
        )
    again, at_start = descending(strategy), []
    start = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: at_start.append(num_updates(again))
    )
    history = fit(
        again, [keras.callbacks.BackupAndRestore(backup, save_freq=save_freq), start], epochs=3
    )
    ((by_rows, by_counter),) = at_start
    assert by_rows == by_counter
    assert by_counter == 60 if save_freq == "epoch" else by_counter >= 100
    assert history.epoch == [1, 2]
    assert num_updates(again) == (180, 180)


def test_learning_rates(strategy):
    model = descending(strategy)
    rates = [0.5, 0.25, 0.125]
    fit(model, [keras.callbacks.LearningRateScheduler(lambda epoch: rates[epoch])], epochs=3)
    assert model.layers[0].get_weights()[0][0, 0] == -60 * sum(rates)
    plateau = keras.callbacks.ReduceLROnPlateau(
        monitor="loss", factor=0.5, patience=1, mode="max", cooldown=0
    )
    history = fit(model, [plateau], epochs=3)  # the loss goes down, and so is worse each time
    assert history.history["learning_rate"] == [0.125, 0.125, 0.0625]


def test_logs_reach_files_and_functions(strategy, tmp_path, capsys):
    seen = []
    callbacks = [
        keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: seen.append(logs["batches"])
        ),
    ]
    model = counting_model(strategy, 3)
    model.fit(
        kerasps.DatasetCreator(endless),
        epochs=2,
        steps_per_epoch=12,
        verbose=1,
        callbacks=callbacks,
    )
    assert seen == [12.0, 12.0]
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert lines[0].split(",")[:2] == ["epoch", "batches"]
    assert [line.split(",")[1] for line in lines[1:]] == ["12.0", "12.0"]
    shown = capsys.readouterr().out
    assert "Epoch 2/2" in shown
    assert "12/12" in shown


def test_terminate_on_nan(strategy):
    model = counting_model(strategy, 1)
    x, y = ids_data(400)
    y[200:] = np.nan
    history = model.fit(
        x,
        y,
        batch_size=4,
        shuffle=False,
        epochs=3,
        verbose=0,
        callbacks=[keras.callbacks.TerminateOnNaN()],
    )
    assert len(history.history["loss"]) == 1
    assert history.history["batches"][0] < 100


def test_swap_ema_weights(strategy, tmp_path):
    with strategy.scope():
        model = descending_model(keras.optimizers.SGD(RATE, use_ema=True, ema_momentum=0.5), 3)
    seen = []

    def both():
        average = model.optimizer._model_variables_moving_average[0]
        return model.get_weights()[0][0, 0], float(average.numpy()[0, 0])

    watch = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(both()))
    fit(model, [keras.callbacks.SwapEMAWeights(swap_on_epoch=True), watch], epochs=2)
    # The average of weights that go down by RATE in each step, each of which counts twice what the
    # one before it does, lags behind by RATE. At the end of an epoch the two change places, and
    # back at the beginning of the next. After the last, Keras has both be the average.
    assert seen == [(-RATE * 59, -RATE * 60), (-RATE * 119, -RATE * 119)]
    assert both() == seen[-1]


def test_tensorboard(strategy, tmp_path):
    model = counting_model(strategy, 3)
    callback = keras.callbacks.TensorBoard(
        str(tmp_path),
        histogram_freq=1,
        update_freq="batch",
        write_graph=False,
        profile_batch=(2, 6),
    )
    model.fit(
        kerasps.DatasetCreator(endless),
        epochs=2,
        steps_per_epoch=12,
        validation_data=ids_data(20),
        verbose=0,
        callbacks=[callback],
    )
    text = b"".join(path.read_bytes() for path in (tmp_path / "train").rglob("events*"))
    for tag in (b"epoch_loss", b"batch_loss", b"kernel/histogram"):
        assert tag in text
    assert any((tmp_path / "validation").rglob("events*"))
    assert any(tmp_path.rglob("*.xplane.pb"))


def test_remote_monitor(strategy):
    received = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            """Says nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monitor = keras.callbacks.RemoteMonitor(
        f"http://127.0.0.1:{server.server_port}", send_as_json=True
    )
    model = counting_model(strategy, 3)
    model.fit(
        kerasps.DatasetCreator(endless),
        epochs=2,
        steps_per_epoch=12,
        verbose=0,
        callbacks=[monitor],
    )
    server.shutdown()
    server.server_close()
    assert [logs["batches"] for logs in received] == [12.0, 12.0]
