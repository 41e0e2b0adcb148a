"""Logs can be read by their owner alone."""

from __future__ import annotations

import os

import pytest

from kerasps.cluster.processes.logs import make_log_dir, open_log
from support.process_checks import mode_of


@pytest.fixture(autouse=True, params=[0o000, 0o022, 0o077])
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


def test_a_directory_that_is_made_is_the_owners(tmp_path):
    make_log_dir(tmp_path / "new" / "logs")
    assert mode_of(tmp_path / "new" / "logs") == "0o700"


def test_a_directory_that_is_there_is_left_as_it_is(tmp_path):
    (tmp_path / "logs").mkdir()
    os.chmod(tmp_path / "logs", 0o755)
    make_log_dir(tmp_path / "logs")
    assert mode_of(tmp_path / "logs") == "0o755"
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_log_dir(tmp_path / "file")


def test_a_file_is_appended_to_and_becomes_the_owners(tmp_path):
    path = tmp_path / "worker-0.log"
    with open_log(path) as log:
        log.write(b"one\n")
    assert mode_of(path) == "0o600"
    os.chmod(path, 0o644)
    with open_log(path) as log:
        log.write(b"two\n")
    assert mode_of(path) == "0o600"
    assert path.read_text() == "one\ntwo\n"


def test_a_device_is_left_as_it_is(tmp_path):
    """Logs that are sent to /dev/null by a link, by root too."""
    before = mode_of("/dev/null")
    (tmp_path / "worker-0.log").symlink_to("/dev/null")
    with open_log(tmp_path / "worker-0.log") as log:
        log.write(b"one\n")
    assert mode_of("/dev/null") == before
