"""A training that sets each weight and row to the number of a version, a server, one who asks.

Each is a process: `served_versions.py ROLE DIRECTORY FIRST`, with the first version of a training.
"""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading
import time
import urllib.request
from pathlib import Path

import kerasps
from kerasps.saving.model_deltas import ModelDeltas
from support.process_checks import wait_for
from support.versioned import question, set_version, versioned_model, versions_of


def train(directory, first):
    with kerasps.LocalCluster(num_workers=1, num_ps=2) as cluster:
        strategy = kerasps.ParameterServerStrategy(cluster.cluster_resolver)
        with strategy.scope():
            model = versioned_model()
            set_version(model, first)
            if not (directory / "exported").exists():
                model.export(directory / "half", updatable=True, verbose=False)
                os.rename(directory / "half", directory / "exported")
            deltas = ModelDeltas(model, directory / "deltas", 2, None)
            for version in range(first, first + 10**6):
                set_version(model, version, first=version % 3 * 50)
                deltas.write(deltas.read())


def serve(directory, first):
    del first
    wait_for((directory / "exported").exists)
    follower = kerasps.serving.Follower(
        directory / "exported", directory / "deltas", every_seconds=0.01
    )
    asked = question(100)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            answer = versions_of(follower(asked))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps([answer, follower.problem]).encode())

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    (directory / "new_port").write_text(str(server.server_port))
    os.rename(directory / "new_port", directory / "port")
    server.serve_forever()


def ask(directory, first):
    """Writes each answer as a line, by two threads."""
    del first

    def ask_on():
        while True:
            try:
                port = (directory / "port").read_text()
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as reply:
                    answer = reply.read()
            except (OSError, ValueError):  # the server ended, or is not there yet
                time.sleep(0.02)
                continue
            with open(directory / "answers", "ab", buffering=0) as answers:
                answers.write(answer + b"\n")

    for _ in range(2):
        threading.Thread(target=ask_on).start()


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
