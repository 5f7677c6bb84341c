"""Which proposals stay.

Two rules, both exact in law. By match, a token is chosen from the target's row as ever and the
proposal stays if it is that token: the text is plain decoding's, token for token. By rejection, a
proposal drawn from a drafter's law q stays with probability min(1, p / q) under the target's law
p, and what takes its place is drawn from the rest of p: it keeps more, and needs q.

Source of the second: Leviathan, Kalman, Matias, "Fast Inference from Transformers via
Speculative Decoding" (2023), algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import mlx.core as mx
import numpy as np

from turbospark.sampling.ranking import Scores
from turbospark.sampling.select import Choice, Chooser
from turbospark.sampling.shaping import Distribution
from turbospark.sampling.uniform import ACCEPTANCE, PROPOSAL, RESIDUAL

_LEAST_RESIDUAL = 1e-12


def keeps(target: Any, draft: Any, uniform: Any) -> Any:
    """Whether a proposal stays: so with probability min(1, target / draft).

    Args:
        target: the proposal's probability under the target's law; a number or an array.
        draft: its probability under the law it was drawn from.
        uniform: in [0, 1), and used for nothing else.
    """
    return uniform * draft < target  # strictly, so that what the target bans never stays


def residual(target: Scores, draft: Scores) -> Scores:
    """Weights of what takes the place of a proposal that did not stay.

    Args:
        target: [..., n] probabilities of the target's candidates.
        draft: [..., n] probabilities of the same tokens under the drafter's law.

    Returns:
        [..., n] the target's mass beyond the drafter's, or all of the target's where nothing
        but rounding is beyond.
    """
    beyond = np.maximum(target - draft, 0.0)
    mass = beyond.sum(axis=-1, keepdims=True)
    return np.where(mass < _LEAST_RESIDUAL, target, beyond)


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """A token that a drafter proposes.

    Attributes:
        token: its id.
        law: what it was drawn from; None where it was not drawn.
    """

    token: int
    law: Distribution | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """What became of a proposal.

    Attributes:
        kept: whether it stays.
        choice: the proposal where it stays, else the token that takes its place.
    """

    kept: bool
    choice: Choice


class Acceptance(Protocol):
    """A rule for one generation: how step drafters' tokens are proposed and what stays."""

    def propose(self, logits: mx.array, history: Sequence[int], prompt_tokens: int) -> Proposal:
        """Choose a token from a drafter's logits [V].

        Args:
            logits: raw, as the target's would be.
            history: the text so far, the proposals before this one included.
            prompt_tokens: how many ids of it are the prompt's.
        """
        ...

    def judge(
        self, row: mx.array, proposal: Proposal, history: Sequence[int], prompt_tokens: int
    ) -> Verdict:
        """Hold a proposal for the token after `history` against the target's logits [V]."""
        ...


class MatchAcceptance:
    """Keeps a proposal that equals the target's own choice.

    Proposals of a step drafter are chosen by the numbers that the target will be asked with, so
    that laws that are alike choose alike. That spoils nothing: what stays is never theirs.
    """

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser

    def propose(self, logits: mx.array, history: Sequence[int], prompt_tokens: int) -> Proposal:
        """The token that the target would choose from these logits."""
        chooser = self._chooser
        # A sampler of the caller's is not asked: it may count its calls.
        return Proposal(chooser.pick(chooser.score(logits, history), history, prompt_tokens))

    def judge(
        self, row: mx.array, proposal: Proposal, history: Sequence[int], prompt_tokens: int
    ) -> Verdict:
        """Choose as if nothing had been proposed, then compare."""
        choice = self._chooser.choose(row, history, prompt_tokens)
        return Verdict(choice.token == proposal.token, choice)


class RejectionAcceptance:
    """Keeps a proposal by chance, so that the text has the target's law."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser

    def propose(self, logits: mx.array, history: Sequence[int], prompt_tokens: int) -> Proposal:
        """Draw from the drafter's law, shaped as the target's is."""
        chooser = self._chooser
        law = chooser.law(chooser.score(logits, history), history, prompt_tokens)
        uniform = chooser.uniform(len(history) - prompt_tokens, PROPOSAL)
        return Proposal(law.draw(uniform), law)

    def judge(
        self, row: mx.array, proposal: Proposal, history: Sequence[int], prompt_tokens: int
    ) -> Verdict:
        """Keep the proposal or draw from the rest of the target's law."""
        chooser, token, step = self._chooser, proposal.token, len(history) - prompt_tokens
        draft = cast(Distribution, proposal.law)
        scores = chooser.score(row, history)
        target = chooser.law(scores, history, prompt_tokens)
        uniform = chooser.uniform(step, ACCEPTANCE)
        if keeps(target.probability(token), draft.probability(token), uniform):
            return Verdict(True, chooser.choice(token, scores))
        rest = residual(target.probabilities, draft.probabilities_of(target.ids))
        token = target.reweighted(rest).draw(chooser.uniform(step, RESIDUAL))
        return Verdict(False, chooser.choice(token, scores))


def choose_acceptance(chooser: Chooser, *, block_passes: bool) -> Acceptance:
    """The rule for a generation.

    Args:
        chooser: the generation's. A seed asks for the very text of plain decoding, which only a
            match gives; without one the law is all that is promised. A sampler of the caller's
            has no temperature beside it.
        block_passes: whether whole blocks are proposed, of which no law is known.
    """
    config = chooser.config
    drawn = config.temperature > 0.0 and config.seed is None
    return MatchAcceptance(chooser) if block_passes or not drawn else RejectionAcceptance(chooser)
