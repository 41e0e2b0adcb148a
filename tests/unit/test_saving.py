"""Files that take their place when they are whole."""

from __future__ import annotations

import json
import os
from pathlib import Path

import keras
import numpy as np
import pytest

from kerasps import _compat
from kerasps.saving import keras_files as saving


def test_a_file_takes_its_place_when_it_is_whole(tmp_path):
    path = tmp_path / "model.keras"
    path.write_text("old")
    path.chmod(0o640)
    with saving._written_aside(path) as partial:
        assert partial.endswith(".keras")
        with open(partial, "w") as file:
            file.write("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["model.keras"]


def test_an_exception_leaves_the_file_that_was_there(tmp_path):
    path = tmp_path / "model.keras"
    path.write_text("old")

    def fail():
        with saving._written_aside(path) as partial:
            with open(partial, "w") as file:
                file.write("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["model.keras"]


def test_what_a_killed_process_left_is_removed(tmp_path):
    (tmp_path / ".partial.model.keras").mkdir()
    (tmp_path / ".partial.model.keras" / "temporary").write_text("half")
    with saving._written_aside(tmp_path / "model.keras") as partial, open(partial, "w") as file:
        file.write("new")
    assert os.listdir(tmp_path) == ["model.keras"]


def test_two_saves_to_one_path_at_a_time_leave_each_other_alone(tmp_path):
    path = tmp_path / "model.keras"
    with saving._written_aside(path) as first:
        Path(first).write_text("first")
        with saving._written_aside(path) as second:
            Path(second).write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert os.listdir(tmp_path) == ["model.keras"]


def test_a_link_with_the_name_of_the_directory_of_a_save_is_not_followed(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    (tmp_path / ".partial.model.keras").symlink_to("mine")
    with saving._written_aside(tmp_path / "model.keras") as partial:
        Path(partial).write_text("new")
    assert (tmp_path / "mine" / "notes").read_text() == "mine"
    assert (tmp_path / ".partial.model.keras").is_symlink()


def test_the_target_of_a_link_is_replaced(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model.keras").write_text("old")
    (tmp_path / "model.keras").symlink_to("elsewhere/model.keras")
    with saving._written_aside(tmp_path / "model.keras") as partial, open(partial, "w") as file:
        file.write("new")
    assert (tmp_path / "elsewhere" / "model.keras").read_text() == "new"
    assert (tmp_path / "model.keras").is_symlink()


def test_the_files_of_a_directory_take_their_places(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("old")
    (tmp_path / "model" / "of the user").write_text("stays")
    with saving._written_aside(tmp_path / "model") as partial:
        os.makedirs(f"{partial}/assets")
        for name in ("config.json", "assets/words"):
            with open(f"{partial}/{name}", "w") as file:
                file.write("new")
    files = {
        str(p.relative_to(tmp_path)): p.read_text() for p in tmp_path.rglob("*") if p.is_file()
    }
    assert files == {
        "model/config.json": "new",
        "model/assets/words": "new",
        "model/of the user": "stays",
    }


def make_model(value):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(8)])
    model.set_weights([np.full_like(weight, value) for weight in model.get_weights()])
    return model


def test_weights_in_several_files_take_the_place_of_those_before(tmp_path):
    original, path = _compat.saving_lib.save_weights_only, tmp_path / "model.weights.json"
    make_model(1).save_weights(path, max_shard_size=3e-7)  # plain Keras: two files
    other = tmp_path / "other.weights.h5"
    make_model(9).save_weights(other)
    for value in (2, 3):
        saving._save_weights_in_files(original, make_model(value), path, 3e-7, None)
        loaded = make_model(0)
        loaded.load_weights(path)
        assert all((weight == value).all() for weight in loaded.get_weights())
    named = {
        file
        for files in json.loads(path.read_text())["weight_map"].values()
        for file in np.atleast_1d(files)
    }
    assert len(named) == 2
    assert set(os.listdir(tmp_path)) == {*named, path.name, "model_00000.weights.h5", other.name}


def test_weights_in_several_files_are_the_old_ones_until_all_are_there(tmp_path):
    path = tmp_path / "model.weights.json"
    saving._save_weights_in_files(
        _compat.saving_lib.save_weights_only, make_model(1), path, 3e-7, None
    )

    def fail(*args):
        _compat.saving_lib.save_weights_only(*args)
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        saving._save_weights_in_files(fail, make_model(2), path, 3e-7, None)
    loaded = make_model(0)
    loaded.load_weights(path)
    assert all((weight == 1).all() for weight in loaded.get_weights())
    assert not list(tmp_path.glob(".partial.*"))
