"""What the tests of processes share."""

from __future__ import annotations

import pytest

from support.launched import Launch


@pytest.fixture
def launch(tmp_path):
    """Starts scripts under `kerasps launch`, and ends what is left of them."""
    started = []

    def start(body, **options):
        started.append(Launch(tmp_path, body, **options))
        return started[-1]

    yield start
    for launched in started:
        launched.end()
