"""Builds, trains and scores many models, keeps the best on disk, loads and trains it again."""

import itertools
import json
import pathlib

import keras
from sklearn.datasets import load_digits

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
x_train, y_train, x_valid, y_valid = images[:960], labels[:960], images[960:1280], labels[960:1280]


def build_model(units, rate):
    model = keras.Sequential([keras.Input((64,))])
    model.add(keras.layers.Dense(units, activation="relu"))
    model.add(keras.layers.Dense(10, activation="softmax"))
    model.compile(
        keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


class Search:
    """Random order, one execution per trial."""

    def __init__(self, space, directory):
        self.trials = [dict(zip(space, values)) for values in itertools.product(*space.values())]
        self.directory = pathlib.Path(directory)
        self.directory.mkdir()
        self.scores = {}

    def search(self, **fit_arguments):
        for number, values in enumerate(self.trials):
            keras.backend.clear_session()
            keras.utils.set_random_seed(29)
            model = self.build(values)
            path = str(self.directory / f"trial-{number}.weights.h5")
            keep = keras.callbacks.ModelCheckpoint(
                path, "val_accuracy", save_best_only=True, save_weights_only=True
            )
            history = model.fit(callbacks=[keep], verbose=0, **fit_arguments)
            self.scores[number] = max(history.history["val_accuracy"])
            (self.directory / f"trial-{number}.json").write_text(
                json.dumps({**values, "score": self.scores[number]})
            )

    def build(self, values):
        # Under the scope:
        return build_model(**values)

    def best_model(self):
        number = max(self.scores, key=self.scores.get)
        model = self.build(self.trials[number])
        model.load_weights(self.directory / f"trial-{number}.weights.h5")
        return model


search = Search({"units": [16, 32], "rate": [0.01, 1e-5]}, "search")
search.search(x=x_train, y=y_train, batch_size=48, epochs=2, validation_data=(x_valid, y_valid))
best = search.best_model()
_, accuracy = best.evaluate(x_valid, y_valid, verbose=0)
assert abs(accuracy - max(search.scores.values())) < 1e-5
best.fit(x_train, y_train, epochs=1, verbose=0)

# Which of the good ones is the best is chance; that the slow ones are not is no chance.
slow = [score for number, score in search.scores.items() if search.trials[number]["rate"] == 1e-5]
assert max(slow) < accuracy - 0.3

counts = {"trials": len(search.scores), "iterations": int(best.optimizer.iterations)}
figures = {"accuracy": (accuracy, 0.15), "slow": (max(slow), 0.05)}
