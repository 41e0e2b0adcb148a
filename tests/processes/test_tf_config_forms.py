"""Trainings with a TF_CONFIG in the forms of schedulers."""

import os

import pytest

from support.process_checks import run_script

SCRIPT = """
import json, os
import keras, numpy as np
import kerasps
cluster = kerasps.LocalCluster(1, 1)
config = cluster.tf_config
jobs = dict(config["cluster"])
chief = jobs.pop("chief")
if FORM == "master":
    jobs |= {"master": chief, "evaluator": ["127.0.0.1:1"]}
    task = {"type": "master", "index": 0}
else:
    jobs["worker"] = chief + jobs["worker"]
    task = {"type": "worker", "index": 0}
    os.environ["KERASPS_CHIEF"] = "worker:0"
os.environ["TF_CONFIG"] = json.dumps({"cluster": jobs, "task": task})
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


@pytest.mark.parametrize("form", ["master", pytest.param("no_chief", marks=pytest.mark.matrix)])
def test_a_form_trains(form, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"FORM = {form!r}{SCRIPT}")
    done = run_script(script, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert "trained on 1 worker" in done.stdout
