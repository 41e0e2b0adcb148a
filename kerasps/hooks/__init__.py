"""All patches of Keras and TensorFlow, which the first strategy installs.

Contract: importing this package patches nothing. `patch.install` goes through one table,
`table.PATCHES`, from which the `README.md` here and the canary are also made. A model outside the
scope runs Keras's code throughout: each patch calls the original unless the call concerns the
strategy of this process.
"""
