"""A training loop around a tape, and one of `train_on_batch`, without `fit`."""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

keras.utils.set_random_seed(33)
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
train = (
    tf.data.Dataset.from_tensor_slices((images[:1440], labels[:1440]))
    .shuffle(1440, seed=1)
    .batch(48)
)
test = tf.data.Dataset.from_tensor_slices((images[1440:], labels[1440:])).batch(48)


def get_model():
    inputs = keras.Input(shape=(64,), name="digits")
    x = keras.layers.Dense(32, activation="relu", name="dense_1")(inputs)
    return keras.Model(inputs=inputs, outputs=keras.layers.Dense(10, name="predictions")(x))


# Under the scope:
model, batchwise = get_model(), get_model()
optimizer = keras.optimizers.Adam(learning_rate=0.01)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
accuracy = keras.metrics.SparseCategoricalAccuracy()
batchwise.compile("adam", loss_fn, metrics=["accuracy"])

for _ in range(2):
    for x, y in train:
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
        accuracy.update_state(y, model(x, training=False))
    trained = float(accuracy.result())
    accuracy.reset_state()
for x, y in test:
    accuracy.update_state(y, model(x, training=False))
tested = float(accuracy.result())

for _ in range(2):
    for x, y in train.as_numpy_iterator():
        logs = batchwise.train_on_batch(x, y, return_dict=True)
result = batchwise.evaluate(test, return_dict=True, verbose=0)
assert batchwise.predict_on_batch(images[:4]).shape == (4, 10)

counts = {
    "iterations": (int(optimizer.iterations), int(batchwise.optimizer.iterations)),
    "examples": float(accuracy.count),
    "logs": sorted(logs),
}
# One process computes, in the same order, so the figures are the same too.
figures = {
    "trained": (trained, 0.005),
    "tested": (tested, 0.01),
    "batchwise": (result["accuracy"], 0.01),
}
