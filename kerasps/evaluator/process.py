"""Runs an evaluation script beside a training that `kerasps launch` started."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, cast

from kerasps.cluster.description.cluster_description import EVALUATOR, ClusterDescription
from kerasps.cluster.processes.logs import open_log
from kerasps.cluster.processes.process import child_environment, describe_exit_code, end_with_parent
from kerasps.words import say

# Set to 1 for a process whose stdin ends when the training does; nothing is ever written to it. A
# pipe leaves no files and ends with the launcher, even if that is killed.
END_OF_TRAINING_ON_STDIN = "KERASPS_END_OF_TRAINING_ON_STDIN"
_PREFIX = "[evaluator] "
# The same time as for a task of the cluster.
_TERMINATE_GRACE_S = 3.0
# Short for a person, and cheap for the processor.
_POLL_INTERVAL_S = 0.05
# Unbuffered, so that its lines are passed on at once. It may share a GPU with a worker.
_DEFAULTS: Mapping[str, str] = {
    "PYTHONUNBUFFERED": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
}


class EvaluatorProcess:
    """Runs an evaluation script as the task `evaluator` of a cluster, and passes on its output."""

    def __init__(
        self, command: Sequence[str], description: ClusterDescription, log_dir: Path | None
    ) -> None:
        env = child_environment(os.environ)
        env["TF_CONFIG"] = json.dumps(description.for_task(EVALUATOR, 0).as_tf_config())
        env[END_OF_TRAINING_ON_STDIN] = "1"
        for name, value in _DEFAULTS.items():
            env.setdefault(name, value)
        self._log: IO[bytes] | None = (
            None if log_dir is None else open_log(log_dir / f"{EVALUATOR}-0.log")
        )
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            env=env,
            # In another session, since Ctrl-C in the terminal is for the training script.
            start_new_session=True,
            preexec_fn=end_with_parent(),
        )
        os.set_blocking(self._output.fileno(), False)
        self._line = b""
        self._has_failed = False

    def watch(self) -> None:
        """Print its new lines on stderr, and its exit code if it failed.

        Does not wait. Call repeatedly: a full pipe would block the evaluator.
        """
        self._pass_output_on()
        if not self._has_failed and self._process.poll() not in (None, 0):
            self._fail(
                f"the evaluator failed ({describe_exit_code(self._process.returncode)}): see its "
                "output above."
            )

    def finish(self, timeout_s: float, is_hurried: Callable[[], bool]) -> bool:
        """Tell the process that the training is over, and wait for its last evaluation.

        Returns:
            True if it did not fail. An end because of `is_hurried` is no failure.
        """
        self._announce_end_of_training()
        deadline = time.monotonic() + timeout_s
        if self._is_running() and not is_hurried():
            _report(
                f"the training is over; the evaluator has {timeout_s:g} s for the last checkpoint."
            )
        while self._is_running() and not is_hurried():
            self._pass_output_on()
            if time.monotonic() > deadline:
                self._fail(
                    f"the evaluator did not end within {timeout_s:g} s after the training, and is "
                    "ended. Expected: a script that ends when `kerasps.SidecarEvaluator.start` "
                    "returns. Allow more time with --evaluator-timeout."
                )
                break
            time.sleep(_POLL_INTERVAL_S)
        if not self._is_running():
            self.watch()
        self.close()
        return not self._has_failed

    def close(self) -> None:
        """End the process if it runs, and pass on its remaining output.

        It gets SIGTERM and, after 3 seconds, SIGKILL. A second call does nothing.
        """
        if self._output.closed:
            return
        self._announce_end_of_training()
        if self._is_running():
            self._process.terminate()
            deadline = time.monotonic() + _TERMINATE_GRACE_S
            while self._is_running() and time.monotonic() < deadline:
                self._pass_output_on()
                time.sleep(_POLL_INTERVAL_S)
            self._process.kill()
            self._process.wait()
        self._pass_output_on()
        if self._line:
            _print_lines([self._line])
        self._output.close()
        if self._log is not None:
            self._log.close()

    def _is_running(self) -> bool:
        return self._process.poll() is None

    def _fail(self, what: str) -> None:
        self._has_failed = True
        _report(what)

    def _announce_end_of_training(self) -> None:
        if self._process.stdin is not None:
            # A process that has ended closed its end of the pipe.
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def _pass_output_on(self) -> None:
        with contextlib.suppress(BlockingIOError):
            # Read everything, since a full pipe would block the process.
            while chunk := os.read(self._output.fileno(), 64 * 1024):
                self._write_log(chunk)
                *lines, self._line = (self._line + chunk).split(b"\n")
                _print_lines(lines)

    def _write_log(self, chunk: bytes) -> None:
        if self._log is None:
            return
        try:
            self._log.write(chunk)
        except OSError as exc:
            # A log must not end the training: its lines are on stderr too.
            log, self._log = self._log, None
            _report(f"the log of the evaluator goes no further: {exc} ({log.name}).")
            log.close()

    @property
    def _output(self) -> IO[bytes]:
        return cast(IO[bytes], self._process.stdout)


def _print_lines(lines: Sequence[bytes]) -> None:
    for line in lines:
        say(f"{_PREFIX}{line.decode(errors='replace')}")


def _report(what: str) -> None:
    say(f"kerasps launch: {what}")
