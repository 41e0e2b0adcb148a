"""A siamese network with a triplet loss: a layer of distances, a model around it with steps of its
own.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from sklearn.datasets import load_digits

keras.utils.set_random_seed(18)
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
rng = np.random.default_rng(18)


def triplets(size):
    anchors = rng.integers(0, len(images), size)
    positives = [rng.choice(np.flatnonzero(labels == labels[anchor])) for anchor in anchors]
    negatives = [rng.choice(np.flatnonzero(labels != labels[anchor])) for anchor in anchors]
    return tuple(images[which] for which in (anchors, positives, negatives))


class DistanceLayer(layers.Layer):
    def call(self, anchor, positive, negative):
        to_positive = ops.sum(tf.square(anchor - positive), -1)
        to_negative = ops.sum(tf.square(anchor - negative), -1)
        return to_positive, to_negative


class SiameseModel(keras.Model):
    def __init__(self, siamese_network, margin=0.5):
        super().__init__()
        self.siamese_network = siamese_network
        self.margin = margin
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs):
        return self.siamese_network(inputs)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self._compute_loss(data)
        gradients = tape.gradient(loss, self.siamese_network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.siamese_network.trainable_weights))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data):
        self.loss_tracker.update_state(self._compute_loss(data))
        return {"loss": self.loss_tracker.result()}

    def _compute_loss(self, data):
        to_positive, to_negative = self.siamese_network(data)
        return tf.maximum(to_positive - to_negative + self.margin, 0.0)

    @property
    def metrics(self):
        return [self.loss_tracker]


train = tf.data.Dataset.from_tensor_slices(triplets(960)).batch(32).prefetch(8)
test = tf.data.Dataset.from_tensor_slices(triplets(160)).batch(32).prefetch(8)

# Under the scope:
embedding = keras.Sequential(
    [keras.Input((64,)), layers.Dense(32, "relu"), layers.Dense(8)], name="embedding"
)
inputs = [keras.Input((64,), name=name) for name in ("anchor", "positive", "negative")]
siamese_model = SiameseModel(
    keras.Model(inputs, DistanceLayer()(*[embedding(part) for part in inputs]))
)
siamese_model.compile(optimizer=keras.optimizers.Adam(0.003))

history = siamese_model.fit(train, epochs=4, validation_data=test, verbose=0)
anchor, positive, negative = next(iter(test))
cosine = keras.metrics.CosineSimilarity()
near = cosine(embedding(anchor), embedding(positive)).numpy()
cosine.reset_state()
far = cosine(embedding(anchor), embedding(negative)).numpy()
assert near > far

counts = {
    "iterations": int(siamese_model.optimizer.iterations),
    "epochs": len(history.history["val_loss"]),
}
figures = {"loss": (history.history["val_loss"][-1], 0.1), "apart by": (float(near - far), 0.3)}
