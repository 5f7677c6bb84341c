"""What users get back: a response a token, and a text that carries the last one."""

import html
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GenerationResponse:
    """One step of a generation; the last one has a `finish_reason`.

    Attributes:
        text: text that became final with this token; may be empty.
        token: the token's id; None where the prompt's pass was cancelled.
        logits: [V] what the token was chosen from.
        from_draft: whether a drafter proposed it.
        prompt_tokens: tokens of the whole prompt.
        prompt_tps: tokens of it that went through the model, a second.
        generation_tokens: tokens generated so far, one that ends the text included.
        generation_tps: tokens a second, the first one left out: it belongs to the prompt.
        peak_memory: MLX's peak so far, in GB.
        finish_reason: "stop", "length", "cancelled" or None.
        stop_reason: the stop string, or the id of the stop token, that ended the text.
        reused_tokens: tokens of the prompt that earlier calls had already fed.
        reuse_reason: why not more.
        evicted: whether this call overwrote a parked conversation.
        ttft: seconds from the call to the first token.
        drafted: tokens that a drafter proposed so far.
        accepted: how many of them were kept.
        accepted_per_position: the same by place in the draft.
        rounds: passes over proposals.
        rollbacks: those of which something was taken back.
        draft_off_reason: why nothing is drafted now; None where something is.
        logprob: the token's log-probability, where `logprobs` asked for it.
        top_logprobs: (id, log-probability) of the likeliest tokens, best first.
    """

    text: str
    token: int | None
    logits: mx.array | None
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    ttft: float
    reused_tokens: int
    reuse_reason: str
    ids: list[int]
    from_draft: bool = False
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    evicted: bool = False
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    rounds: int = 0
    rollbacks: int = 0
    draft_off_reason: str | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()

    @property
    def logprobs(self) -> mx.array:
        """Log-probabilities [V] of this step, computed when asked for."""
        if self.logits is None:
            raise AttributeError("no token was generated, so there are no log-probabilities")
        return self.logits - mx.logsumexp(self.logits)

    @property
    def token_ids(self) -> list[int]:
        """Every id generated up to this step."""
        return self.ids[: self.generation_tokens]

    def summary(self) -> str:
        """One line of counts and rates."""
        reused = f" ({self.reused_tokens} reused)" if self.reused_tokens else ""
        parts = [
            f"prompt {self.prompt_tokens} tokens{reused} at {self.prompt_tps:.1f} tok/s",
            f"generated {self.generation_tokens} at {self.generation_tps:.1f} tok/s",
            f"first token after {self.ttft:.2f} s",
            f"peak {self.peak_memory:.2f} GB",
        ]
        if self.drafted:
            parts.insert(2, f"{self.accepted} of {self.drafted} drafted tokens kept")
        if self.finish_reason:
            parts.append(f"ended by {self.finish_reason}")
        return ", ".join(parts)

    def __repr__(self) -> str:
        return f"GenerationResponse({self.text!r}, token={self.token}, {self.summary()})"

    def _repr_html_(self) -> str:
        return _html(self.text, self.summary())


class GeneratedText(str):
    """A generated text; every field of its last response is an attribute of it.

    Attributes:
        response: that last response; its `text` alone is only the last piece.
    """

    response: GenerationResponse

    def __new__(cls, text: str, response: GenerationResponse) -> "GeneratedText":
        """Join a text and the response that ended it."""
        made = super().__new__(cls, text)
        made.response = response
        return made

    @property
    def text(self) -> str:
        """The whole text as a plain string."""
        return str.__str__(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "response":
            raise AttributeError(name)
        return getattr(self.response, name)

    def __repr__(self) -> str:
        return f"GeneratedText({str.__repr__(self)}, {self.response.summary()})"

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str.__str__(self),)

    def _repr_html_(self) -> str:
        return _html(self, self.response.summary())


def _html(text: str, summary: str) -> str:
    return (
        f'<div><p style="white-space: pre-wrap">{html.escape(text)}</p>'
        f"<small>{html.escape(summary)}</small></div>"
    )
