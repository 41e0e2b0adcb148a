"""The exception tree: what it is drawn as, and what code can catch."""

from __future__ import annotations

import pickle

import pytest

import kerasps
from kerasps import errors

BUILT_IN = {
    "ClusterConfigError": ValueError,
    "ClusterClosedError": ValueError,
    "TaskUnreachableError": ConnectionError,
    "TaskStartError": RuntimeError,
    "TaskLostError": RuntimeError,
    "PSLostError": RuntimeError,
    "WorkerLostError": RuntimeError,
    "CheckpointError": RuntimeError,
    "DeltaError": RuntimeError,
    "InputError": ValueError,
    "MissingNameError": ImportError,
    "UnsupportedError": ValueError,
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_error_is_a_kerasps_error_and_a_built_in_one(name):
    cls = getattr(errors, name)
    assert issubclass(cls, errors.KeraspsError)
    assert issubclass(cls, BUILT_IN[name])
    assert name in errors.__doc__


def test_every_error_is_drawn_exported_and_named_after_the_package():
    classes = {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and not name.startswith("_")
    }
    assert set(classes) == {"KeraspsError", *BUILT_IN}
    for name, cls in classes.items():
        assert getattr(kerasps, name) is cls
        assert f"{cls.__module__}.{cls.__qualname__}" == f"kerasps.{name}"


@pytest.mark.parametrize("cls", [errors.PSLostError, errors.WorkerLostError])
def test_a_lost_task_can_be_caught_by_its_job_or_as_any_task(cls):
    with pytest.raises(errors.TaskLostError, match="it went away"):
        raise cls("it went away")


@pytest.mark.parametrize("cls", [errors.TaskStartError, errors.PSLostError])
def test_an_error_about_a_task_names_it_and_survives_pickling(cls):
    error = pickle.loads(pickle.dumps(cls("it died", task_type="ps", task_index=1)))
    assert type(error) is cls
    assert (str(error), error.task_type, error.task_index) == ("it died", "ps", 1)
