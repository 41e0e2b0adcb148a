"""Serves as the task that TF_CONFIG names, on the address that is its argument, and starts anew at
each SIGUSR1; run by test_serve.py.
"""

from __future__ import annotations

import signal
import sys

from kerasps.cluster.description.tf_config import read_tf_config
from kerasps.cluster.server import start_server
from kerasps.cluster.serving.listen_address import listen_address
from kerasps.cluster.serving.renewal import restart_process

# A signal that comes while it starts waits, also across the new beginning.
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
description = read_tf_config()
server, port = start_server(description, listen_address(description, sys.argv[1]))
print("SERVES", flush=True)
signal.sigwait([signal.SIGUSR1])
restart_process(port)
