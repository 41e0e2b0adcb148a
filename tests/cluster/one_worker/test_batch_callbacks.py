"""With one worker, steps find what batch callbacks have set, as in plain Keras."""

from __future__ import annotations

import pytest

from support.batch_callbacks import (
    NUM_BATCHES,
    Scheduled,
    Told,
    arrays,
    generator,
    in_turn,
    rates_used,
    rows_model,
)


@pytest.mark.filterwarnings("ignore:.*lives in this process")
@pytest.mark.parametrize(
    ("moment", "data", "size"), [("begin", arrays, 1), ("end", generator, 1), ("begin", arrays, 4)]
)
def test_each_step_has_the_rate_that_is_set_for_it(strategy, moment, data, size):
    model = rows_model(strategy, size)
    model.fit(**data(), verbose=0, callbacks=[Scheduled(moment)])
    first_of_execution = [step - step % size for step in range(NUM_BATCHES)]
    assert rates_used(model) == first_of_execution


@pytest.mark.parametrize("moment", ["begin", "end"])
def test_the_batch_of_a_stop_is_the_last(strategy, moment):
    model, told = rows_model(strategy), Told(stop_at=5, moment=moment)
    model.fit(**arrays(), epochs=3, verbose=0, callbacks=[told])
    assert told.calls == in_turn(6)
    assert int(model.optimizer.iterations) == 6
