"""Any order of turns, steps, rounds and failures, against the list of what was fed."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from runner.turns import best, draft, expected, row, turn
from runner.turns import invariant as agree

from turbospark.errors import ProducerError
from turbospark.runner.runner import Runner
from turbospark.testing import ScriptedDrafter, ScriptedModel, hashed_logits, scripted_runner

VOCAB = 7
CONTEXT = 60
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=8)
BAD = 6


class RunnerMachine(RuleBasedStateMachine):
    """The record is the list, the caches hold it, the drafter has followed over all of it."""

    @initialize(
        recurrent=st.integers(0, 1),
        block_passes=st.booleans(),
        slots=st.integers(1, 3),
        reach=st.sampled_from([None, 9]),
        every=st.sampled_from([1, 3, 99]),
        prefer=st.booleans(),
    )
    def open(
        self,
        recurrent: int,
        block_passes: bool,
        slots: int,
        reach: int | None,
        every: int,
        prefer: bool,
    ) -> None:
        logits = hashed_logits(VOCAB)
        self.model = ScriptedModel(logits, vocab_size=VOCAB, recurrent=recurrent, reach=reach)
        self.drafter = ScriptedDrafter(logits, "alternating", block_passes=block_passes)
        self.runner = scripted_runner(
            self.model,
            self.drafter,
            slots=slots,
            max_context=CONTEXT,
            prefer_reuse=prefer,
            checkpoint_every=every,
        )
        self.ids: list[int] = []
        self.row: list[float] = []

    def live(self) -> bool:
        return bool(self.ids) and len(self.ids) < CONTEXT - 9

    @rule(prompt=PROMPTS, chunk=st.integers(0, 4))
    def turn(self, prompt: list[int], chunk: int) -> None:
        done = turn(self.runner, prompt, 0, chunk)
        self.ids, self.row = prompt, done.row

    @precondition(live)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4), chunk=st.integers(0, 3))
    def continues(self, tokens: list[int], chunk: int) -> None:
        prompt = [*self.ids, *tokens]
        done = turn(self.runner, prompt, 0, chunk)
        assert done.reuse.tokens >= len(self.ids) - 1
        self.ids, self.row = prompt, done.row

    @precondition(live)
    @rule()
    def step(self) -> None:
        token = best(self.row)
        self.row = row(self.runner.produce(token, len(self.ids)))
        self.ids = [*self.ids, token]

    @precondition(live)
    @rule(block=st.integers(1, 8), keep=st.integers(1, 9))
    def round(self, block: int, keep: int) -> None:
        runner, base, anchor = self.runner, len(self.ids), best(self.row)
        proposals = draft(runner, anchor, block)
        feed = [anchor, *proposals]
        keep = min(keep, len(feed))  # what the target would say does not matter here
        point = runner.checkpoint()
        verified = runner.verify(feed, base)
        lines = [row(line) for line in verified.logits]
        assert lines == [
            expected(self.model, [*self.ids, *feed[: i + 1]]) for i in range(len(feed))
        ]
        if keep < len(feed):
            runner.rollback_retaining(point, keep, verified)
        runner.rewind_drafter(base)
        runner.record_committed(feed[:keep], base, verified)
        self.ids, self.row = [*self.ids, *feed[:keep]], lines[keep - 1]

    @precondition(live)
    @rule(block=st.integers(1, 8))
    def abandoned_round(self, block: int) -> None:
        """Its drafter has written the row before the token that a plain step then feeds."""
        runner, base = self.runner, len(self.ids)
        feed = [best(self.row), *draft(runner, best(self.row), block)]
        point = runner.checkpoint()
        runner.verify(feed, base)
        runner.rollback(point)
        runner.rewind_drafter(base)
        self.step()

    @precondition(live)
    @rule(verify=st.booleans())
    def fails(self, verify: bool) -> None:
        self.model.fail_on = BAD
        at = len(self.ids)
        with pytest.raises(ProducerError):
            self.runner.verify([1, BAD], at) if verify else self.runner.produce(BAD, at)
        self.model.fail_on = None
        assert self.runner.session.fed_ids.tainted
        self.runner.reset()
        self.ids = []

    @precondition(live)
    @rule()
    def forks(self) -> None:
        session = self.runner.session.fork()
        runner = self.runner
        self.runner = Runner(
            self.model, session, self.drafter, prefix_reuse=True, prefer_reuse=runner.prefer_reuse
        )
        runner.prefill_chunk([2, 3, 4], len(self.ids))  # the other branch goes another way

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "runner"):
            return
        session = self.runner.session
        assert session.fed_ids.ids == self.ids
        agree(self.runner)
        if self.ids:
            assert self.row == expected(self.model, self.ids)
        state, reference = session.drafter_state, self.drafter.rows_of(self.ids)
        assert state.covered == len(self.ids)
        assert state.rows[: len(reference)] == reference[: len(state.rows)]
        assert self.runner.draft_off_reason() is None


TestAnyOrderOfCallsAgreesWithAList = RunnerMachine.TestCase
TestAnyOrderOfCallsAgreesWithAList.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None
)
