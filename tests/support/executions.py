"""What a loop sends to its workers."""

from __future__ import annotations

import pytest

from kerasps.training.loop import execution_size
from kerasps.training.sessions.dispatcher import Dispatcher


def sent_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the steps of each execution sent from here on; all steps count as fast ones."""
    monkeypatch.setattr(execution_size, "_MAX_SECONDS", 1e6)
    monkeypatch.setattr(execution_size, "_WINDOW_S", 0.0)
    sizes: list[int] = []
    send = Dispatcher.send

    def noted(self, execution):
        sizes.append(execution.num_steps)
        send(self, execution)

    monkeypatch.setattr(Dispatcher, "send", noted)
    return sizes
