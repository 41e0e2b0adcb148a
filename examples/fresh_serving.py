"""Serves a model while it learns: a click changes the answers within seconds.

Three processes run beside each other. The *training* learns which items are clicked, and writes what
changed once a second. The *server* applies that, and answers requests over HTTP. The *visitor* clicks
on new items, and measures the seconds until the answer for an item has changed. An item that nobody
knows has the score 0.5. If a process ends, it is started again.

python examples/fresh_serving.py --items 20
"""

from __future__ import annotations

import argparse
import http.client
import http.server
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROLES = ("train", "serve", "visit")


def train(directory: Path) -> None:
    """Learn from the clicks that were written, and go on as they come."""
    import keras

    import kerasps
    from clusters import strategy

    with strategy(num_workers=1, num_ps=1) as parameter_servers, parameter_servers.scope():
        items = keras.Input((), dtype="int64", name="items")
        scores = kerasps.layers.DynamicEmbedding(1, "zeros", name="scores")(items)
        model = keras.Model(items, keras.layers.Activation("sigmoid")(scores))
        model.compile("adagrad", "binary_crossentropy")
        if not (directory / "exported").exists():
            model.export(directory / "half", updatable=True, verbose=False)
            (directory / "half").rename(directory / "exported")
        export = kerasps.DeltaExport(directory / "deltas", every_seconds=1)
        done = 0
        while True:  # after a restart, from the first click
            clicks = (directory / "clicks").read_text().splitlines()[done:]
            if clicks:
                done += len(clicks)
                ids = np.array([int(click) for click in clicks])
                model.fit(ids, np.ones(len(ids)), verbose=0, callbacks=[export])
            time.sleep(0.1)


def serve(directory: Path) -> None:
    """Answer requests such as `GET /7` for the item 7."""
    import kerasps

    while not (directory / "exported").exists():
        time.sleep(0.1)
    follower = kerasps.serving.Follower(directory / "exported", directory / "deltas")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            score = follower.predict(np.array([int(self.path[1:])]))[0, 0]
            answer = {"score": float(score), "version": follower.version, "age": follower.age_s}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    (directory / "new_port").write_text(str(server.server_port))
    (directory / "new_port").rename(directory / "port")
    server.serve_forever()


def score_of(directory: Path, item: int) -> float:
    """Ask the server; wait for it while it is not there."""
    while True:
        try:
            port = int((directory / "port").read_text())
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("GET", f"/{item}")
            return float(json.loads(connection.getresponse().read())["score"])
        except (OSError, http.client.HTTPException):
            time.sleep(0.1)


def visit(directory: Path) -> None:
    """Click on new items, and print the seconds until their scores have changed."""
    while not (directory / "seconds").exists() or len(
        (directory / "seconds").read_text().split()
    ) < int(os.environ["ITEMS"]):
        item = random.randrange(2**62)
        assert score_of(directory, item) == 0.5
        with open(directory / "clicks", "a") as clicks:
            clicks.write(f"{item}\n")
        began = time.monotonic()
        while score_of(directory, item) == 0.5:
            time.sleep(0.02)
        with open(directory / "seconds", "a") as seconds:
            seconds.write(f"{time.monotonic() - began:.2f}\n")


def main() -> None:
    """Start the three processes, and each again if it ends; print how long changes took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--items", type=int, default=20, help="the items to click on")
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        {"train": train, "serve": serve, "visit": visit}[options.role](options.directory)
        return
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "clicks").touch()

        def start(role: str) -> subprocess.Popen[bytes]:
            command = [sys.executable, __file__, "--role", role, "--directory", directory]
            return subprocess.Popen(command, env={**os.environ, "ITEMS": str(options.items)})

        running = {role: start(role) for role in ROLES}
        print({role: process.pid for role, process in running.items()}, flush=True)
        while running["visit"].poll() != 0:
            for role, process in running.items():
                if process.poll() is not None:
                    running[role] = start(role)
            time.sleep(0.1)
        for process in running.values():
            process.terminate()
            process.wait()
        seconds = np.array([float(s) for s in (Path(directory) / "seconds").read_text().split()])
    quartiles = ", ".join(f"{s:.2f}" for s in np.quantile(seconds, [0.25, 0.5, 0.75]))
    print(f"from the first click to the changed answer, {len(seconds)} new items:")
    print(f"quartiles {quartiles} s; median {np.median(seconds):.2f}, worst {seconds.max():.2f} s")


if __name__ == "__main__":
    main()
