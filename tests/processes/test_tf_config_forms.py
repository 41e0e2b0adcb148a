"""A training whose TF_CONFIG names its chief `master` and lists an evaluator."""

import subprocess
import sys

SCRIPT = """
import json, os
import keras, numpy as np
import kerasps
cluster = kerasps.LocalCluster(1, 1)
config = cluster.tf_config
jobs = dict(config["cluster"])
jobs["master"] = jobs.pop("chief")
jobs["evaluator"] = ["127.0.0.1:1"]
os.environ["TF_CONFIG"] = json.dumps({"cluster": jobs, "task": {"type": "master", "index": 0}})
strategy = kerasps.ParameterServerStrategy()
assert sorted(strategy.description.jobs) == ["chief", "ps", "worker"]
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=2, verbose=0)
assert int(model.optimizer.iterations) == 4
print("trained on", len(strategy.workers()), "worker")
cluster.close()
"""


def test_master_and_a_listed_evaluator_train():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "trained on 1 worker" in done.stdout
