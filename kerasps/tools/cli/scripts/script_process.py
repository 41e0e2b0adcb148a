"""A process of the user's script, with the pipe on which it reports lost tasks."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from typing import IO

from kerasps.cluster.description.cluster_description import ClusterDescription
from kerasps.cluster.processes.process import end_with_parent
from kerasps.runtime.supervision import TELL_ABSENT_EVERY_S, Notice, SupervisorPipe
from kerasps.words import times


class ScriptProcess:
    """One life of a script. It ends with this process, however that ends.

    Thread: make it in the main thread (see `end_with_parent`).
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        stdin: int | None = None,
        output: IO[bytes] | None = None,
    ) -> None:
        # A new pipe for each life, so that late notices of an earlier one are not read.
        self._pipe = SupervisorPipe()
        self._waits_until = 0.0
        # Where the script has made a strategy: see `runtime.supervision.What`.
        self.strategies: set[str] = set()
        self._process = subprocess.Popen(
            command,
            env={**env, **self._pipe.variables},
            stdin=stdin,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            pass_fds=[self._pipe.fd_to_pass],
            preexec_fn=end_with_parent(),
        )
        self._pipe.has_been_passed()

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the script runs."""
        return self._process.poll()

    def notices(self) -> list[Notice]:
        """Return the script's notices about tasks since the last call."""
        notices = []
        for notice in self._pipe.read():
            if notice.what in ("connected", "elsewhere"):
                self.strategies.add(notice.what)
                continue
            if notice.what == "absent" and notice.task_type == "worker":
                self._waits_until = notice.time + 3 * TELL_ABSENT_EVERY_S
            notices.append(notice)
        return notices

    def waits_for_chief(self) -> bool:
        """Return True if the script's last notices say that it waits for the chief to begin."""
        return time.monotonic() < self._waits_until

    def send_signal(self, number: int) -> None:
        """Send a signal to the script, if it runs."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float) -> None:
        """Wait until the script has ended; kill it after `timeout_s` seconds."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Kill the script if it still runs, and close the pipe to it."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()


def idle_tasks(
    strategies: Collection[str], description: ClusterDescription, *, driven: bool = False
) -> str | None:
    """Return a sentence if a script that succeeded has not used the cluster, else None."""
    if "connected" in strategies:
        return None
    jobs = description.jobs
    workers = times(len(jobs.get("worker", ())), "worker")
    idle = f"{'' if driven else f'{workers} and '}{len(jobs['ps'])} ps without work"
    strategy = f"`kerasps.{'WorkerDriven' if driven else 'ParameterServer'}Strategy()`"
    if "elsewhere" in strategies:
        return (
            f"the script trained on a `LocalCluster` that it started, beside {idle}. To use these, "
            f"make the strategy without one: {strategy}"
        )
    return (
        f"the script made no strategy of kerasps: it ran in one process, beside {idle}. To use "
        f"these, make one: {strategy}"
    )
