"""SimCLR: an encoder learns from images without labels, a probe from a few with; each has its own
optimizer.
"""

import keras
import tensorflow as tf
from keras import layers, ops
from sklearn.datasets import load_digits

keras.utils.set_random_seed(15)
images, labels = load_digits(return_X_y=True)
images = (images / 16).reshape(-1, 8, 8, 1).astype("float32")
WIDTH = 32


def make_augmenter(shift):
    return keras.Sequential(
        [keras.Input((8, 8, 1)), layers.RandomTranslation(shift, shift), layers.GaussianNoise(0.05)]
    )


def make_encoder():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(WIDTH, activation="relu"),
        ],
        name="encoder",
    )


class ContrastiveModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.temperature = 0.1
        self.contrastive_augmenter = make_augmenter(0.15)
        self.classification_augmenter = make_augmenter(0.05)
        self.encoder = make_encoder()
        self.projection_head = keras.Sequential(
            [keras.Input((WIDTH,)), layers.Dense(WIDTH, "relu"), layers.Dense(WIDTH)]
        )
        self.linear_probe = keras.Sequential([keras.Input((WIDTH,)), layers.Dense(10)])

    def compile(self, contrastive_optimizer, probe_optimizer, **kwargs):
        super().compile(**kwargs)
        self.contrastive_optimizer = contrastive_optimizer
        self.probe_optimizer = probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.contrastive_loss_tracker = keras.metrics.Mean(name="c_loss")
        self.contrastive_accuracy = keras.metrics.SparseCategoricalAccuracy(name="c_acc")
        self.probe_loss_tracker = keras.metrics.Mean(name="p_loss")
        self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    @property
    def metrics(self):
        return [
            self.contrastive_loss_tracker,
            self.contrastive_accuracy,
            self.probe_loss_tracker,
            self.probe_accuracy,
        ]

    def contrastive_loss(self, first, second):
        first = ops.normalize(first, axis=1)
        second = ops.normalize(second, axis=1)
        similarities = ops.matmul(first, ops.transpose(second)) / self.temperature
        which = ops.arange(ops.shape(first)[0])
        self.contrastive_accuracy.update_state(which, similarities)
        self.contrastive_accuracy.update_state(which, ops.transpose(similarities))
        there = keras.losses.sparse_categorical_crossentropy(which, similarities, from_logits=True)
        back = keras.losses.sparse_categorical_crossentropy(
            which, ops.transpose(similarities), from_logits=True
        )
        return (there + back) / 2

    def train_step(self, data):
        unlabeled, (labeled, labels) = data
        everything = ops.concatenate((unlabeled, labeled), axis=0)
        first = self.contrastive_augmenter(everything, training=True)
        second = self.contrastive_augmenter(everything, training=True)
        with tf.GradientTape() as tape:
            projected = [
                self.projection_head(self.encoder(view, training=True), training=True)
                for view in (first, second)
            ]
            loss = self.contrastive_loss(*projected)
        weights = self.encoder.trainable_weights + self.projection_head.trainable_weights
        self.contrastive_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        self.contrastive_loss_tracker.update_state(loss)

        augmented = self.classification_augmenter(labeled, training=True)
        with tf.GradientTape() as tape:
            logits = self.linear_probe(self.encoder(augmented, training=False), training=True)
            loss = self.probe_loss(labels, logits)
        weights = self.linear_probe.trainable_weights
        self.probe_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        self.probe_loss_tracker.update_state(loss)
        self.probe_accuracy.update_state(labels, logits)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data):
        labeled, labels = data
        logits = self.linear_probe(self.encoder(labeled, training=False), training=False)
        self.probe_loss_tracker.update_state(self.probe_loss(labels, logits))
        self.probe_accuracy.update_state(labels, logits)
        return {m.name: m.result() for m in self.metrics[2:]}


unlabeled = tf.data.Dataset.from_tensor_slices(images[:1200]).shuffle(1200).batch(40)
labeled = (
    tf.data.Dataset.from_tensor_slices((images[1200:1500], labels[1200:1500]))
    .shuffle(300)
    .batch(10)
)
train = tf.data.Dataset.zip((unlabeled, labeled)).prefetch(2)
test = tf.data.Dataset.from_tensor_slices((images[1500:], labels[1500:])).batch(64)

# Under the scope:
model = ContrastiveModel()
model.compile(
    contrastive_optimizer=keras.optimizers.Adam(0.003), probe_optimizer=keras.optimizers.Adam(0.02)
)

history = model.fit(train, epochs=5, validation_data=test, verbose=0)
result = model.evaluate(test, return_dict=True, verbose=0)

# The encoder goes on as a part of another model.
tuned = keras.Sequential([keras.Input((8, 8, 1)), model.encoder, layers.Dense(10)])
tuned.compile(
    "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
)
tuned.fit(labeled, epochs=2, verbose=0)
codes = model.encoder.predict(images[:7], verbose=0)

counts = {
    "contrastive": int(model.contrastive_optimizer.iterations),
    "probe": int(model.probe_optimizer.iterations),
    "tuned": int(tuned.optimizer.iterations),
    "examples": float(model.probe_accuracy.count),
    "codes": codes.shape,
}
figures = {
    "probe accuracy": (result["p_acc"], 0.15),
    "contrastive loss": (history.history["c_loss"][-1], 0.4),
}
