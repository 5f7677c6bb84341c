"""How surprised a model is by a text: what quantizing it cost."""

import math

import mlx.core as mx
import numpy as np

from turbospark.errors import OptionError
from turbospark.loading.arrays import evaluate
from turbospark.loading.build import LoadedModel
from turbospark.protocols import Phase

SAMPLE = (
    "A river begins as rain on high ground. The water finds a slope, then a channel, and at "
    "every bend it moves a little more of the bank from one side to the other. Over a thousand "
    "years the valley widens, villages grow beside the bridges, and the people who live there "
    "learn when the floods come. They build mills first, because falling water is cheap power, "
    "and later a railway that follows the same easy slope down to the sea. In the year of the "
    "great drought the miller wrote in his book that the wheel had not turned for forty days; "
    "the page after it records the price of bread, which had doubled. What the river gives, it "
    "gives to everyone at once, and what it takes back it takes without asking."
)
"""The text that is used where none is given."""

ROWS = 64


def perplexity(loaded: LoadedModel, text: str = SAMPLE) -> float:
    """Exp of the mean negative log-likelihood of a text's tokens, each given those before it.

    Args:
        loaded: the model and its tokenizer.
        text: at least two tokens long; special tokens are added as the checkpoint wants.

    Raises:
        OptionError: the text is too short.
    """
    ids = loaded.tokenizer.encode(text)
    if len(ids) < 2:
        raise OptionError(f"the text for perplexity has {len(ids)} tokens; 2 are the least")
    caches = loaded.model.make_caches(len(ids), 0)
    total = 0.0
    for start in range(0, len(ids) - 1, ROWS):
        chunk = ids[start : start + ROWS]
        output = loaded.model(mx.array(chunk), caches, phase=Phase.PREFILL, logits="all")
        assert output.logits is not None
        following = ids[start + 1 : start + 1 + len(chunk)]
        logits = output.logits[: len(following)]  # [R, V]
        chosen = mx.take_along_axis(logits, mx.array(following)[:, None], axis=-1)[:, 0]
        surprise = mx.logsumexp(logits, axis=-1) - chosen
        evaluate(surprise)
        total += float(np.asarray(surprise, dtype=np.float64).sum())
    return math.exp(total / (len(ids) - 1))
