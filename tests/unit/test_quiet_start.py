"""Which lines of TensorFlow's start are dropped, and when none is."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from kerasps import quiet_start, start_filter
from kerasps.script_start import with_quiet_start
from kerasps.start_lines import LineFilter

ABSL = "I0000 00:00:1795775537.766145   32111 "
OLDER = "2025-08-21 10:00:00.123456: I tensorflow/core/util/"
START = [
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    f"{ABSL}port.cc:153] oneDNN custom operations are on. You may see slightly different",
    f"{OLDER}port.cc:153] oneDNN custom operations are on. You may see slightly different",
    f"{ABSL}cpu_feature_guard.cc:227] This TensorFlow binary is optimized to use available CPU",
    "To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with "
    "the appropriate compiler flags.",
    "E0000 00:00:1754555555.1   77 cuda_dnn.cc:8579] Unable to register cuDNN factory: Attempting",
    "W0000 00:00:1754555555.1   77 computation_placer.cc:177] computation placer already "
    "registered. Please check linkage and avoid linking the same target more than once.",
    f"{ABSL}gpu_device.cc:2020] Created device /job:localhost/replica:0/task:0/device:GPU:0 with",
    f"{ABSL}grpc_server_lib.cc:467] Started server with target: grpc://127.0.0.1:34853",
]
WITHOUT_GPU = [
    f"{ABSL}cudart_stub.cc:31] Could not find cuda drivers on your machine, GPU will not be used.",
    "2025-08-21 10:00:00.123456: I external/local_xla/xla/tsl/cuda/cudart_stub.cc:31] Could not "
    "find cuda drivers on your machine, GPU will not be used.",
    "E0000 00:00:1795775542.009155   32111 cuda_platform.cc:52] failed call to cuInit: INTERNAL: "
    "CUDA error: Failed call to cuInit: UNKNOWN ERROR (303)",
]
OTHERS = [
    "",
    "Traceback (most recent call last):",
    "W0000 00:00:1754555555.1   77 gpu_device.cc:2342] Cannot dlopen some GPU libraries. Please "
    "make sure the missing libraries mentioned above are installed properly.",
    "E0000 00:00:1795775542.009155   32111 grpc_server_lib.cc:600] Unknown: Could not start gRPC",
    "F0000 00:00:1795775542.009155   32111 port.cc:1] Check failed",
    "the script says: oneDNN custom operations are on",
    "To enable the following instructions: read the manual",
]


def filtered(data, *, has_gpu=False, sizes=(1, 7, 10**6)):
    """What passes of these bytes; however they are cut into pieces, it is the same."""
    results = set()
    for size in sizes:
        lines = LineFilter(has_gpu=has_gpu, end=b"<end>")
        passed = b"".join(lines.feed(data[at : at + size]) for at in range(0, len(data), size))
        results.add(passed + lines.flush())
    assert len(results) == 1
    return results.pop()


@pytest.mark.parametrize("line", START)
@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_line_of_the_start_is_dropped(line, has_gpu):
    assert filtered(f"before\n{line}\nafter\n".encode(), has_gpu=has_gpu) == b"before\nafter\n"


@pytest.mark.parametrize("line", OTHERS)
@pytest.mark.parametrize("has_gpu", [False, True])
def test_another_line_passes(line, has_gpu):
    data = f"before\n{line}\nafter\n".encode()
    assert filtered(data, has_gpu=has_gpu) == data


@pytest.mark.parametrize("line", WITHOUT_GPU)
def test_that_no_gpu_is_used_is_said_where_there_is_one(line):
    data = f"{line}\n".encode()
    assert filtered(data) == b""
    assert filtered(data, has_gpu=True) == data


def test_what_follows_the_end_passes_as_it_is():
    line = START[0].encode() + b"\n"
    assert filtered(line + b"half<end>" + line) == b"half" + line


def test_a_line_that_is_not_complete_goes_on_when_it_is_asked_for():
    lines = LineFilter(has_gpu=False, end=b"<end>")
    assert lines.feed(b"Password: ") == b""
    assert lines.waits
    assert lines.flush() == b"Password: "
    assert not lines.waits
    # The rest of it is no line, whatever it looks like.
    assert lines.feed(START[0].encode() + b"\n") == START[0].encode() + b"\n"
    assert lines.feed(START[1].encode()) == b""
    assert not lines.waits
    assert lines.flush() == b""
    assert lines.feed(b" numerical results\nnext\n") == b"next\n"


@pytest.fixture
def environment(monkeypatch):
    for name in ("KERASPS_VERBOSE_STARTUP", "TF_CPP_MIN_LOG_LEVEL", *quiet_start._ASKED_FOR):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch.setenv


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, True),
        ({"KERASPS_VERBOSE_STARTUP": "1"}, False),
        ({"KERASPS_VERBOSE_STARTUP": "0"}, True),
        ({"TF_CPP_MIN_LOG_LEVEL": "0"}, False),
        ({"TF_CPP_MIN_LOG_LEVEL": "2"}, True),
        ({"TF_CPP_VMODULE": "context=1"}, False),
    ],
)
def test_environment_variables_say_if_it_is_quiet(environment, variables, expected):
    for name, value in variables.items():
        environment(name, value)
    assert quiet_start.is_quiet() == expected


@pytest.mark.parametrize("given", [None, "", "0", "1", "3"])
def test_the_level_is_set_for_the_import_alone_and_where_the_user_sets_none(environment, given):
    if given is not None:
        environment("TF_CPP_MIN_LOG_LEVEL", given)
    with quiet_start.quiet_start():
        assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == (given or "1")
        with quiet_start.quiet_start():
            assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == (given or "1")
    assert os.environ.get("TF_CPP_MIN_LOG_LEVEL") == given


def test_the_filter_ends_with_the_context_and_leaves_no_descriptor(environment):
    def descriptors():
        fds = [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
        return {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in fds}

    before = descriptors()
    for _ in range(3):
        with quiet_start.quiet_start():
            assert os.readlink("/proc/self/fd/2").startswith("pipe:")
    assert descriptors() == before
    assert start_filter._lasting == []


def test_without_another_process_nothing_is_dropped(environment, monkeypatch, capfd):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with quiet_start.quiet_start():
        os.write(2, START[0].encode())
    assert capfd.readouterr().err == START[0]


@pytest.mark.parametrize("hidden", ["", "-1", " -1"])
def test_a_gpu_that_is_hidden_is_none(monkeypatch, hidden):
    monkeypatch.setattr(start_filter.glob, "glob", lambda pattern: [pattern])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("NVIDIA_VISIBLE_DEVICES", raising=False)
    assert start_filter.may_use_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert not start_filter.may_use_gpu()


@pytest.mark.parametrize(
    ("vendor", "device_class", "expected"),
    [("0x10de", "0x030200", True), ("0x10de", "0x040300", False), ("0x1af4", "0x030000", False)],
)
def test_a_gpu_without_a_driver_is_one(monkeypatch, tmp_path, vendor, device_class, expected):
    (tmp_path / "vendor").write_text(f"{vendor}\n")
    (tmp_path / "class").write_text(f"{device_class}\n")
    found = {"/sys/bus/pci/devices/*/vendor": [str(tmp_path / "vendor")]}
    monkeypatch.setattr(start_filter, "glob", types.SimpleNamespace(glob=lambda p: found.get(p)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert start_filter.may_use_gpu() == expected


def test_the_file_of_the_filter_imports_nothing_of_kerasps():
    text = Path(start_filter.__file__).with_name("start_lines.py").read_text()
    assert "import kerasps" not in text
    assert "from kerasps" not in text


@pytest.mark.parametrize("given", [{}, {"PYTHONPATH": ""}, {"PYTHONPATH": "/mine:/other"}])
def test_a_script_finds_what_the_user_gives_and_not_the_working_directory(given):
    paths = with_quiet_start(given)["PYTHONPATH"].split(os.pathsep)
    assert paths[0].endswith("script_start")
    # An empty path would be the working directory, before the standard library.
    assert paths[1:] == [path for path in given.get("PYTHONPATH", "").split(":") if path]
