"""A small student learns from a teacher:

`compute_loss` mixes the labels with what the teacher says.
"""

import keras
import numpy as np
from keras import layers, ops
from sklearn.datasets import load_digits

keras.utils.set_random_seed(17)
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
x_train, y_train, x_test, y_test = images[:1500], labels[:1500], images[1500:], labels[1500:]


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.teacher = teacher
        self.student = student

    def compile(
        self, optimizer, metrics, student_loss_fn, distillation_loss_fn, alpha=0.1, temperature=3
    ):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha = alpha
        self.temperature = temperature

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False):
        teacher_pred = self.teacher(x, training=False)
        student_loss = self.student_loss_fn(y, y_pred)
        distillation_loss = self.distillation_loss_fn(
            ops.softmax(teacher_pred / self.temperature, axis=1),
            ops.softmax(y_pred / self.temperature, axis=1),
        ) * (self.temperature**2)
        return self.alpha * student_loss + (1 - self.alpha) * distillation_loss

    def call(self, x):
        return self.student(x)


# Under the scope:
teacher = keras.Sequential(
    [keras.Input((64,)), layers.Dense(96, "relu"), layers.Dense(10)], name="teacher"
)
student = keras.Sequential(
    [keras.Input((64,)), layers.Dense(12, "relu"), layers.Dense(10)], name="student"
)
scratch = keras.models.clone_model(student)
distiller = Distiller(student=student, teacher=teacher)

loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
teacher.compile(
    keras.optimizers.Adam(0.003), loss, metrics=[keras.metrics.SparseCategoricalAccuracy()]
)
teacher.fit(x_train, y_train, epochs=4, verbose=0)
taught = teacher.get_weights()

distiller.compile(
    optimizer=keras.optimizers.Adam(0.01),
    metrics=[keras.metrics.SparseCategoricalAccuracy()],
    student_loss_fn=loss,
    distillation_loss_fn=keras.losses.KLDivergence(),
    alpha=0.1,
    temperature=3,
)
history = distiller.fit(x_train, y_train, epochs=8, verbose=0)
_, accuracy = distiller.evaluate(x_test, y_test, verbose=0)

scratch.compile(
    keras.optimizers.Adam(0.01), loss, metrics=[keras.metrics.SparseCategoricalAccuracy()]
)
scratch.fit(x_train, y_train, epochs=2, verbose=0)
assert len(distiller.trainable_variables) == 8
same = student.predict(x_test, verbose=0)
assert np.mean(same.argmax(1) == y_test) > 0.6

counts = {
    "teacher": int(teacher.optimizer.iterations),
    "distiller": int(distiller.optimizer.iterations),
    "scratch": int(scratch.optimizer.iterations),
}
figures = {"accuracy": (accuracy, 0.15), "loss": (history.history["loss"][-1], 0.4)}
