"""The state of a run for people and machines: records, a socket, an HTTP endpoint.

Contract: nothing is asked of a task, and nothing is worked out, until somebody asks for a status.
The records and the sockets import neither Keras nor TensorFlow, so `kerasps top` starts fast.
"""
