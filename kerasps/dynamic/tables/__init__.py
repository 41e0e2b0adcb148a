"""Tables on all ps as Keras variables, their rows by id outside of steps, and their pools.

Contract: what has to read or to change rows outside of steps comes here.
"""
