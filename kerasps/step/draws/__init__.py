"""Random operations of TensorFlow in a step: what they draw follows from the number of the step.

Contract: `with_draws_of_step` returns the function of a compute phase without operations that draw
from a state of their kernel. It calls nothing on a task.
"""
