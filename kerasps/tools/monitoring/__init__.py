"""The state of a run for people and machines: records, a socket, an HTTP endpoint.

Contract: this wing asks no task and computes nothing until a caller asks for a status. The records
and the sockets import neither Keras nor TensorFlow, so `kerasps top` starts fast.
"""
