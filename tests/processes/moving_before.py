"""Runs a script as the chief of TensorFlow's own servers, all of them in this process.

python moving_before.py SCRIPT

The script is the left column of a page on moving: it reads TF_CONFIG.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys

import tensorflow as tf

NUM_TASKS = {"chief": 1, "worker": 2, "ps": 2}


def main() -> None:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(sum(NUM_TASKS.values()))]
    addresses = iter(["127.0.0.1:{1}".format(*probe.getsockname()) for probe in probes])
    cluster = {job: [next(addresses) for _ in range(n)] for job, n in NUM_TASKS.items()}
    for probe in probes:
        probe.close()
    # A worker that waits for a ps holds a thread. With as few as two cores all would wait.
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=4)
    servers = [
        tf.distribute.Server(
            cluster, job_name=job, task_index=index, protocol="grpc", config=config
        )
        for job in ("worker", "ps")
        for index in range(NUM_TASKS[job])
    ]
    task = {"type": "chief", "index": 0}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    runpy.run_path(sys.argv[1], run_name="__main__")
    sys.stdout.flush()
    # Servers of TensorFlow have no end.
    os._exit(0 if servers else 1)


if __name__ == "__main__":
    main()
