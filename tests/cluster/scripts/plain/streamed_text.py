"""Text files of unknown length, filtered and bucketed by tf.data; the vocabulary is a file."""

import pathlib
import tempfile

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(36)
rng = np.random.default_rng(36)
topics = {
    0: ["goal", "match", "team", "ball", "league"],
    1: ["chip", "code", "data", "cloud", "disk"],
}
fillers = ["a", "the", "of", "and", "to", "in", "on", "with", "for", "by"]
folder = pathlib.Path(tempfile.mkdtemp())
for number in range(2):
    lines = []
    for _ in range(350):
        topic = rng.integers(2)
        lines.append(
            f"{topic}\t"
            + " ".join([*rng.choice(fillers, rng.integers(2, 9)), *rng.choice(topics[topic], 2)])
        )
    with open(folder / f"news-{number}.tsv", "w") as file:
        file.write("\n".join([*lines, "", "# the end"]))
with open(folder / "words.txt", "w") as file:
    file.write("\n".join(["[UNK]", *fillers, *topics[0], *topics[1]]))


def parse(line):
    parts = tf.strings.split(line, "\t")
    return parts[1], tf.strings.to_number(parts[0], tf.int32)


lines = tf.data.TextLineDataset([str(folder / f"news-{number}.tsv") for number in range(2)]).filter(
    lambda line: tf.strings.length(line) > 0
)
dataset = lines.filter(lambda line: not tf.strings.regex_full_match(line, "#.*")).map(parse)
train, test = dataset.skip(100).batch(25), dataset.take(100).batch(25)

# Under the scope:
lookup = keras.layers.StringLookup(vocabulary=str(folder / "words.txt"), mask_token="")
split = keras.layers.Lambda(
    lambda text: tf.strings.split(text).to_tensor(""), output_shape=(None,), dtype="string"
)
text = keras.Input((), dtype="string")
x = keras.layers.Embedding(lookup.vocabulary_size(), 8)(lookup(split(text)))
x = keras.layers.GlobalAveragePooling1D()(x)
model = keras.Model(text, keras.layers.Dense(2, activation="softmax")(x))
model.compile(keras.optimizers.Adam(0.05), "sparse_categorical_crossentropy", metrics=["accuracy"])

steps = []
count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
history = model.fit(train, epochs=4, validation_data=test, callbacks=[count], verbose=0)
predicted = model.predict(test.map(lambda text, label: text), verbose=0)

# Not the optimizer's iterations: plain Keras counts one more where it finds the data at their end.
counts = {"steps": len(steps), "predicted": predicted.shape}
figures = {"accuracy": (history.history["val_accuracy"][-1], 0.06)}
