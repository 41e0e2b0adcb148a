"""What the tests of whole runs share: the tasks of a run, and what `restarted_training.py` told."""

from __future__ import annotations

import json
import subprocess

from support.process_checks import PATIENCE_S, wait_for


class ToldTraining:
    """What a script of `restarted_training.py` in a folder has told.

    Args:
        is_over: returns True once no more will be told.
        describe: returns what helps to find out why it is over.
    """

    def __init__(self, folder, is_over, describe):
        self.here = folder
        self._is_over, self._describe = is_over, describe

    def hold(self, *epochs):
        """Have the training wait in the middle of each of these, until it is released."""
        for epoch in epochs:
            (self.here / f"held-{epoch}").touch()

    def release(self, epoch):
        (self.here / f"held-{epoch}").unlink()

    def events(self, what):
        path = self.here / "events"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["what"] == what]

    def wait_for_epoch(self, number):
        wait_for(
            lambda: (
                self._is_over() or any(event["epoch"] == number for event in self.events("epoch"))
            ),
            what=f"epoch {number}",
        )
        assert not self._is_over(), self._describe()

    def check_exact(self, num_steps, starts):
        """Each step was done once, in so many lives of the script."""
        (done,) = self.events("done")
        assert done["iterations"] == done["updates"] == num_steps
        assert len(self.events("started")) == starts, self._describe()


class Tasks(ToldTraining):
    """The processes of the tasks of a run, by name, each with a log in the folder."""

    def __init__(self, folder, chief):
        super().__init__(folder, lambda: self.tasks[chief].poll() is not None, self.logs)
        self.tasks = {}

    def codes(self, *names):
        """The exit codes of tasks, which all end."""
        found = {}
        for name in names or self.tasks:
            try:
                found[name] = self.tasks[name].wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                found[name] = f"{name} runs on"
        return found

    def check_codes(self, expected, *names):
        codes = self.codes(*names)
        assert set(codes.values()) == {expected}, (codes, self.logs())

    def logs(self):
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-3000:]}"
            for path in sorted(self.here.glob("*.log"))
        )
