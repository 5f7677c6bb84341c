"""The drafter that is none."""

import mlx.core as mx
import pytest

from turbospark.errors import CheckpointError, ProducerError
from turbospark.protocols import ForwardOutput
from turbospark.speculation.off import NoDrafter


def test_it_proposes_nothing_and_says_why() -> None:
    drafter = NoDrafter("the checkpoint carries no drafter")
    state = drafter.new_state(99)
    assert drafter.block(state, [1, 2], 3, 4) == []
    assert "carries no drafter" in repr(drafter)
    assert (drafter.hidden, drafter.taps, drafter.max_block) == (False, (), 0)
    with pytest.raises(ProducerError, match="but the checkpoint carries no drafter"):
        drafter.step(state, 1, 0)


def test_its_state_stands_anywhere_and_holds_nothing() -> None:
    drafter = NoDrafter()
    state = drafter.new_state(99)
    drafter.observe(state, [1, 2, 3], 0, ForwardOutput(None))
    drafter.prime(state, [1, 2, 3], 4)
    state.rewind(2)
    assert state.resume_at(17) == 17
    assert (state.cursor, state.nbytes, state.mark(), state.export()) == (0, 0, None, {})
    state.fork().restore({})
    with pytest.raises(CheckpointError, match="no drafter keeps no arrays"):
        state.restore({"rows": mx.zeros(2)})
