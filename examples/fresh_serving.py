"""Serves a model while it learns: a click changes the answers within seconds.

Three processes run beside each other. The *training* learns which items are clicked, and writes
what changed. The *server* applies that, and answers requests over HTTP. The *visitor* clicks on new
items, and measures the seconds until the answer for an item has changed. An item that nobody knows
has the score 0.5. If a process ends, it is started again.

python examples/fresh_serving.py 20           # the number of new items
"""

import contextlib
import http.server
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import keras
import numpy as np

import kerasps
from clusters import strategy


def train(directory: Path) -> None:
    """Learn from the clicks that were written, and go on as they come."""
    with strategy(num_workers=1, num_ps=1) as parameter_servers, parameter_servers.scope():
        items = keras.Input((), dtype="int64", name="items")
        scores = kerasps.layers.DynamicEmbedding(1, "zeros", name="scores")(items)
        model = keras.Model(items, keras.layers.Activation("sigmoid")(scores))
        model.compile("adagrad", "binary_crossentropy")
        model.fit(np.zeros(1), np.ones(1), verbose=0)  # traces the step before anybody waits
        if not (directory / "exported").exists():
            model.export(directory / "exported", updatable=True)
        export = kerasps.DeltaExport(directory / "deltas", every_seconds=1)
        done = 0
        while True:  # after a restart, from the first click
            if clicks := (directory / "clicks").read_text().split()[done:]:
                done += len(clicks)
                model.fit(np.int64(clicks), np.ones(len(clicks)), verbose=0, callbacks=[export])
            time.sleep(0.1)


def serve(directory: Path) -> None:
    """Answer requests such as `GET /7` with the score of the item 7."""
    while not list(directory.glob("exported/assets.extra/*.json")):  # it is written last
        time.sleep(0.1)
    follower = kerasps.serving.Follower(directory / "exported", directory / "deltas")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            item = np.array([int(self.path[1:])])
            self.wfile.write(str(follower.predict(item)[0, 0]).encode())

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    (directory / "address").write_text(f"http://127.0.0.1:{server.server_port}/")
    server.serve_forever()


def score_of(directory: Path, item: int) -> float:
    """Ask the server; wait while it is not there."""
    while True:
        with contextlib.suppress(OSError, ValueError):
            address = f"{(directory / 'address').read_text()}{item}"
            return float(urllib.request.urlopen(address).read())
        time.sleep(0.1)


def visit(directory: Path) -> None:
    """Click on new items, and note the seconds until their scores have changed."""
    while True:
        item = np.random.default_rng().integers(2**62)
        score_of(directory, item)  # when the server is there
        with open(directory / "clicks", "a") as clicks:
            clicks.write(f"{item}\n")
        began = time.monotonic()
        while score_of(directory, item) == 0.5:
            time.sleep(0.02)
        with open(directory / "seconds", "a") as seconds:
            seconds.write(f"{time.monotonic() - began:.2f}\n")


def main(num_items: int) -> None:
    """Start the three processes, and each again if it ends; print how long changes took."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as at_end:
        directory = Path(name)
        (directory / "clicks").touch()
        (directory / "seconds").touch()
        running: dict[str, subprocess.Popen[bytes]] = {}
        while len(seconds := (directory / "seconds").read_text().split()) < num_items:
            for role in ("train", "serve", "visit"):
                if role not in running or running[role].poll() is not None:
                    command = [sys.executable, __file__, role, name]
                    running[role] = subprocess.Popen(command, stderr=subprocess.DEVNULL)
                    at_end.callback(running[role].wait)
                    at_end.callback(running[role].kill)
            time.sleep(0.1)
    middle, most, worst = np.quantile(np.array(seconds, float), [0.5, 0.9, 1])
    print(f"{len(seconds)} new items: median {middle} s, 90% {most:.2f} s, worst {worst} s")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        {"train": train, "serve": serve, "visit": visit}[sys.argv[1]](Path(sys.argv[2]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
