"""`docs/security.md` gives the recipe that is tested, and is right about TensorFlow."""

from __future__ import annotations

import os
import shlex
import tempfile

import tensorflow as tf

from support.documentation import CHECKOUT
from support.process_checks import ALONE

TEXT = (CHECKOUT / "docs" / "security.md").read_text()


def test_the_recipe_is_the_one_that_is_tested():
    """Its test is in tests/processes/test_listening.py."""
    recipes = [
        line.strip()
        for block in TEXT.split("```bash\n")[1:]
        for line in block.split("```")[0].splitlines()
        if line.strip()
    ]
    assert [shlex.split(recipe) for recipe in recipes] == [
        [*ALONE, "kerasps", "launch", "train.py"]
    ]


def test_autograph_writes_into_the_temporary_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    written = []

    @tf.function
    def function(value):
        written.extend(name for name in os.listdir(tmp_path) if name.endswith(".py"))
        return value if value > 0 else -value

    function(tf.constant(1.0))
    assert written
