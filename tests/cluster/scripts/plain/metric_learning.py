"""Learns distances: a batch is a pair of images of each class, which `train_step` takes apart."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

keras.utils.set_random_seed(16)
images, labels = load_digits(return_X_y=True)
images = (images / 16).reshape(-1, 8, 8, 1).astype("float32")
of_class = [np.flatnonzero(labels == label) for label in range(10)]
BATCHES = 60


class AnchorPositivePairs(keras.utils.PyDataset):
    """Batches of two images of each of the ten digits."""

    def __init__(self, length, **kwargs):
        super().__init__(**kwargs)
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        pairs = [rng.choice(of_class[label], 2, replace=False) for label in range(10)]
        return np.stack([images[[pair[which] for pair in pairs]] for which in range(2)])


class EmbeddingModel(keras.Model):
    def train_step(self, data):
        if isinstance(data, tuple):
            data = data[0]
        anchors, positives = data[0], data[1]
        with tf.GradientTape() as tape:
            anchor_codes = self(anchors, training=True)
            positive_codes = self(positives, training=True)
            similarities = keras.ops.einsum("ae,pe->ap", anchor_codes, positive_codes) / 0.2
            loss = self.compute_loss(y=keras.ops.arange(10), y_pred=similarities)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(keras.ops.arange(10), similarities)
        return {m.name: m.result() for m in self.metrics}


# Under the scope:
inputs = keras.Input((8, 8, 1))
x = layers.Conv2D(16, 3, strides=2, activation="relu")(inputs)
x = layers.Dense(16)(layers.Flatten()(x))
model = EmbeddingModel(inputs, layers.UnitNormalization()(x))
model.compile(
    keras.optimizers.Adam(3e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
)

history = model.fit(AnchorPositivePairs(BATCHES), epochs=2, verbose=0)
codes = model.predict(images[:300], verbose=0)
nearest = np.argsort(codes @ codes.T, axis=1)[:, -2]
share = np.mean(labels[nearest] == labels[:300])

counts = {"iterations": int(model.optimizer.iterations), "codes": codes.shape}
figures = {"nearest is alike": (share, 0.1), "loss": (history.history["loss"][-1], 0.3)}
