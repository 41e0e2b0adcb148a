"""`kerasps env`: prints the facts for a bug report."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

import psutil

from kerasps import __version__
from kerasps.cluster.description.tf_config import read_tf_config
from kerasps.cluster.members.reachability import unreachable
from kerasps.errors import ClusterConfigError
from kerasps.words import num_bytes

# A person waits for it, and running tasks answer within milliseconds.
_REACH_TIMEOUT_S = 2.0
# The first import of TensorFlow on a cold disk takes tens of seconds.
_DEVICES_TIMEOUT_S = 120.0
# The driver of NVIDIA's GPUs tells its version there.
_DRIVER = Path("/proc/driver/nvidia/version")
_VARIABLE_PREFIXES = ("KERASPS_", "KERAS_")
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "TF_FORCE_GPU_ALLOW_GROWTH", "TF_GRPC_DEFAULT_OPTIONS")

_LIST_DEVICES = (
    "import tensorflow as tf; "
    "print(*(device.name for device in tf.config.list_physical_devices()), sep=', ')"
)


def report_environment() -> int:
    """Print versions, platform, memory, devices, environment variables and a check of TF_CONFIG."""
    _line("kerasps", __version__)
    _line("python", f"{platform.python_version()} ({sys.executable})")
    for package in ("keras", "tensorflow", "grpcio", "protobuf", "numpy"):
        _line(package, _version(package))
    _line("platform", platform.platform())
    _line("processors", str(len(os.sched_getaffinity(0))))
    memory = psutil.virtual_memory()
    _line("memory", f"{num_bytes(memory.total)}, of which {num_bytes(memory.available)} are free")
    _line("gpu driver", _driver())
    _line("devices", _devices())
    for name in sorted(os.environ):
        if name.startswith(_VARIABLE_PREFIXES) or name in _VARIABLES:
            _line(name, os.environ[name])
    return _check_tf_config()


def _check_tf_config() -> int:
    if not os.environ.get("TF_CONFIG"):
        _line("TF_CONFIG", "not set")
        return 0
    try:
        description = read_tf_config()
    except ClusterConfigError as exc:
        _line("TF_CONFIG", f"wrong: {exc}")
        return 1
    jobs = ", ".join(f"{len(tasks)} {job}" for job, tasks in description.jobs.items())
    _line(
        "TF_CONFIG", f"valid: {jobs}; this task is {description.task_type} {description.task_index}"
    )
    addresses = description.server_addresses
    missing = unreachable(addresses, _REACH_TIMEOUT_S)
    for task, address in addresses.items():
        state = f"not reachable ({missing[task]})" if task in missing else "reachable"
        _line(f"  {task[0]} {task[1]}", f"{address} {state}")
    return 0


def _devices() -> str:
    """Return the devices that TensorFlow sees, or its error.

    A separate process asks TensorFlow, so that its log and a crash do no harm.
    """
    env = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3")
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LIST_DEVICES],
            env=env,
            capture_output=True,
            text=True,
            timeout=_DEVICES_TIMEOUT_S,
            check=True,
        )
    except subprocess.CalledProcessError as exc:
        lines = exc.stderr.strip().splitlines() or [f"exit code {exc.returncode}"]
        return f"TensorFlow fails: {lines[-1]}"
    except subprocess.TimeoutExpired:
        return f"TensorFlow did not answer within {_DEVICES_TIMEOUT_S:g} s"
    return done.stdout.strip().splitlines()[-1]


def _driver() -> str:
    """Return the version of NVIDIA's driver."""
    try:
        text = _DRIVER.read_text()
    except OSError:
        return "none"
    found = re.search(r"\d+(?:\.\d+)+", text)
    return found[0] if found else text.strip()


def _version(package: str) -> str:
    """Return the versions of a package; a nightly build of another name may have installed it."""
    others = set(packages_distributions().get(package, ())) - {package}
    found = [f"{version(other)} ({other})" for other in sorted(others)]
    with contextlib.suppress(PackageNotFoundError):
        found.insert(0, version(package))
    return ", ".join(found) or "not installed"


def _line(name: str, value: str) -> None:
    print(f"{name}: {value}", flush=True)
