"""The loop of one method over its epochs: sizes of executions, callbacks, metrics, and positions.

Contract: runs in the thread of `fit`, and reaches workers through a dispatcher only.
"""
