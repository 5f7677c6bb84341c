"""What texts leave in memory: their rows and nothing else, and nothing once they are gone."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from loading.drafter_files import write_blocks, write_qwen

import turbospark as ts
from turbospark.caches.kv import KVCache
from turbospark.kernels.device import on_cpu
from turbospark.speculation.mtp_state import MTPState
from turbospark.testing import write_tiny_checkpoint

pytestmark = pytest.mark.skipif(not on_cpu(), reason="GPUs keep freed blocks in use")

FIRST, LAST = 500, 4000
SMALL = 8192


def beyond_rows(session: Any) -> int:
    gc.collect()
    return mx.get_active_memory() - session.nbytes


def test_four_thousand_steps_allocate_nothing_but_rows(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, max_position_embeddings=LAST + 100)
    engine = ts.load(folder, max_context=LAST + 100)
    steps = engine.stream("abc", max_tokens=LAST, logit_bias={257: -1e9})
    session = engine.runner.session
    held = 0
    for count, _ in enumerate(steps, 1):
        if count == FIRST:
            held = beyond_rows(session)
    assert session.position == LAST + 2
    assert beyond_rows(session) - held < SMALL


def test_a_mark_of_a_prediction_head_holds_its_row_alone() -> None:
    state = MTPState(lambda: [KVCache(1, 16, 2000)], 48)
    state.ids.extend(range(1000))
    state.hidden.append(mx.zeros((1000, 48)) + 1.5)
    mx.eval(*state.hidden.arrays())
    before = mx.get_active_memory()
    mark = state.mark()
    state.hidden.cut(0)
    gc.collect()
    mx.synchronize()
    assert mark.nbytes == 4 * 48
    assert mx.get_active_memory() - before < SMALL - 1000 * mark.nbytes
    assert mark.hidden is not None
    assert mark.hidden.tolist() == [[1.5] * 48]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ts.Engine]:
    root = tmp_path_factory.mktemp("recurrent")
    trunk, blocks = write_qwen(root / "trunk"), write_blocks(root / "blocks")
    return lambda draft: ts.load(
        trunk,
        draft=str(blocks) if draft == "blocks" else draft,
        max_context=200,
        session_slots=2,
        checkpoint_every=8,
    )


@pytest.mark.parametrize("draft", ["off", "mtp", "blocks"])
def test_states_of_twenty_prompts_go_with_their_texts(
    load: Callable[[str], ts.Engine], draft: str
) -> None:
    engine, held = load(draft), list[int]()
    options: dict[str, Any] = {} if draft == "off" else {"draft_block": 2}
    for serial in range(20):
        prompt = [5 + serial, *range(40 + serial, 70 + serial)]
        engine.generate(prompt, max_tokens=6, stop_token_ids=[], **options)
        with engine.session() as chat:
            chat.send(f"{serial:02} of twenty", max_tokens=4, **options)
        del chat
        gc.collect()
        held.append(mx.get_active_memory())
    assert max(held[3:]) <= 1.01 * held[3]
