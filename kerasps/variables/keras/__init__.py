"""Variables, slots and optimizers as Keras sees them, made here or adopted.

Contract: outside a step, each is what plain Keras has, with remote storage.
"""
