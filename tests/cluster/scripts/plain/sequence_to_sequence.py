"""Reverses words with an encoder and a decoder of characters; decodes with models made of the
trained layers.
"""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(35)
rng = np.random.default_rng(35)
LETTERS, LENGTH, START = 5, 4, 0
words = rng.integers(1, LETTERS + 1, (960, LENGTH))
reverse = words[:, ::-1]
fed = np.concatenate([np.full((len(words), 1), START), reverse[:, :-1]], axis=1)


def generator():
    for start in range(0, len(words), 32):
        part = slice(start, start + 32)
        yield (words[part], fed[part]), reverse[part]


# Under the scope:
encoder_inputs = keras.Input((LENGTH,), dtype="int32")
embed = layers.Embedding(LETTERS + 1, 12)
_, h, c = layers.LSTM(32, return_state=True)(embed(encoder_inputs))
decoder_inputs = keras.Input((None,), dtype="int32")
decoder_lstm = layers.LSTM(32, return_sequences=True, return_state=True)
decoder_dense = layers.Dense(LETTERS + 1, activation="softmax")
decoded, _, _ = decoder_lstm(embed(decoder_inputs), initial_state=[h, c])
model = keras.Model([encoder_inputs, decoder_inputs], decoder_dense(decoded))
model.compile(keras.optimizers.Adam(0.02), "sparse_categorical_crossentropy", metrics=["accuracy"])

history = model.fit([words, fed], reverse, batch_size=32, epochs=5, verbose=0)

encoder = keras.Model(encoder_inputs, [h, c])
states = [keras.Input((32,)), keras.Input((32,))]
outputs, new_h, new_c = decoder_lstm(embed(decoder_inputs), initial_state=states)
decoder = keras.Model([decoder_inputs, *states], [decoder_dense(outputs), new_h, new_c])
state = encoder.predict(words[:50], verbose=0)
token, said = np.full((50, 1), START), []
for _ in range(LENGTH):
    probabilities, *state = decoder.predict([token, *state], verbose=0)
    token = probabilities[:, -1].argmax(-1)[:, None]
    said.append(token)
right = np.mean(np.concatenate(said, axis=1) == reverse[:50])

counts = {"iterations": int(model.optimizer.iterations), "said": len(said)}
figures = {"accuracy": (history.history["accuracy"][-1], 0.2), "right": (float(right), 0.25)}
