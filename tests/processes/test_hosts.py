"""`kerasps run` on several hosts with names: on a network that can be cut, as no loopback can."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from support.hosts import Hosts, HostsNotAllowedError
from support.manifests import KUBERNETES, container_of, pods_of, read
from support.process_checks import marked_environment, marked_processes, wait_for
from support.runs import Tasks

TRAINING = Path(__file__).with_name("restarted_training.py")
CODE_OF_LOST_PS = 138
EPOCHS, STEPS = 6, 20


class Run(Tasks):
    """Tasks on hosts, and what the script of `restarted_training.py` has told."""

    def __init__(self, hosts, folder):
        super().__init__(folder, "chief")
        self.hosts = hosts
        self._mark = str(uuid.uuid4())

    def start(self, name, command, *, on=None, **variables):
        """Start the task of a name, on the host of that name or on another one."""
        env = marked_environment(
            self._mark,
            self.here,
            TF_CPP_MIN_LOG_LEVEL="3",
            KERAS_BACKEND="tensorflow",
            KERASPS_HANG_TIMEOUT="20",
            **variables,
        )
        with (self.here / f"{name}.log").open("a") as log:
            self.tasks[name] = self.hosts.run(
                on or name,
                command,
                env=env,
                cwd=self.here,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def lose(self, name):
        """Let the host of a task be gone: nothing runs there, and the network is cut first."""
        self.hosts.cut(name)
        pids = {
            pid
            for pid in marked_processes(self._mark)
            if os.readlink(f"/proc/{pid}/ns/net")
            == os.readlink(f"/proc/{self.tasks[name].pid}/ns/net")
        }
        assert self.tasks[name].pid in pids
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.tasks.pop(name).wait()

    def close(self):
        for process in self.tasks.values():
            process.kill()
            process.wait()
        for pid in marked_processes(self._mark):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def make_run(tmp_path):
    """Makes hosts with names, and a run on them; both end with the test."""
    made = []

    def make(names, spare=0):
        try:
            made.append(Hosts(names, spare))
        except HostsNotAllowedError as exc:
            pytest.skip(f"Hosts of a network cannot be made here: {exc}")
        made.append(Run(made[0], tmp_path))
        return made[-1]

    yield make
    for each in reversed(made):
        each.close()


def kerasps_run(*arguments):
    return [sys.executable, "-m", "kerasps", "run", *arguments]


class SmallRun:
    """A chief, a ps and a worker or two, each of which is told all hosts."""

    def __init__(self, make_run, *, num_workers=1, spare=0, options=()):
        workers = [f"worker-{index}" for index in range(num_workers)]
        self.run = make_run(["chief", "ps-0", *workers], spare)
        self.run.hold(1)
        self.hosts = self.run.hosts
        self._options = ["--hosts", f"chief=chief;ps=ps-0;worker={','.join(workers)}", *options]
        for name in (*workers, "ps-0", "chief"):
            self.start(name)

    def start(self, name, on=None):
        # The same command on each: a host finds itself by its name.
        script = [str(TRAINING), str(self.run.here), str(EPOCHS), str(STEPS)]
        self.run.start(name, kerasps_run(*self._options, *script), on=on)

    def check_done(self, *names):
        """Each step was done once, and all tasks of these names end well."""
        self.run.check_codes(0, *names)
        self.run.check_exact(EPOCHS * STEPS, starts=1)


def test_hosts_run_what_the_jobset_starts(make_run, tmp_path):
    """Names, variables, command and script are those of deploy/kubernetes/base."""
    (jobset,) = read(KUBERNETES / "base/jobset.yaml")
    name = jobset["metadata"]["name"]
    pods = {
        f"{hostname}.{name}": environment
        for _, hostname, _, environment in pods_of(name, jobset["spec"])
    }
    run = make_run([*pods])
    # What the pod mounts as its working directory.
    shutil.copy(KUBERNETES / "base/train.py", tmp_path)
    command = container_of(jobset["spec"]["replicatedJobs"][0])["command"]
    assert command[:2] == ["kerasps", "run"]
    script = {"EPOCHS": "2", "STEPS": "50", "BACKUPS": str(tmp_path / "backup")}
    for host, environment in pods.items():
        run.start(host, kerasps_run(*command[2:]), **script, **environment)
    run.check_codes(0)
    log = (tmp_path / f"{name}-chief-0-0.{name}.log").read_text()
    assert float(log.rpartition("accuracy ")[2]) > 0.6
    assert log.count("Epoch 1/2") == 1


@pytest.mark.matrix
def test_a_host_that_was_cut_off_takes_part_again(make_run):
    small = SmallRun(make_run)
    small.run.wait_for_epoch(1)
    small.hosts.cut("worker-0")
    small.run.release(1)
    is_noticed = re.compile(r"worker 0 at \S+ (is lost|has not answered)").search
    wait_for(lambda: is_noticed(small.run.logs()), what="the loss to be noticed")
    small.hosts.heal("worker-0")
    # There is no other worker: it has done all that was left.
    small.check_done()


def test_the_others_go_on_without_a_host_that_is_gone(make_run):
    small = SmallRun(make_run, num_workers=2)
    small.run.wait_for_epoch(1)
    small.run.lose("worker-1")
    small.run.release(1)
    small.check_done()


@pytest.mark.matrix
def test_a_run_ends_when_the_host_of_a_ps_is_gone(make_run):
    small = SmallRun(make_run, options=["--start-timeout", "60"])
    small.run.wait_for_epoch(1)
    small.run.lose("ps-0")
    small.run.release(1)
    codes = small.run.codes()
    assert codes == {"chief": CODE_OF_LOST_PS, "worker-0": CODE_OF_LOST_PS}, small.run.logs()


@pytest.mark.matrix
def test_a_worker_that_comes_at_another_address_takes_part(make_run):
    small = SmallRun(make_run, spare=1)
    small.run.wait_for_epoch(1)
    small.run.lose("worker-0")
    small.run.release(1)
    # Kubernetes keeps the name of a pod that it starts on another node.
    small.hosts.rename("worker-0", "spare-0")
    small.start("worker-0", on="spare-0")
    small.check_done()
