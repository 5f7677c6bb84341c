"""How fast is a CPU, next to mlx-lm and llama.cpp on the same weights?

    python benchmarks/cpu_decode.py [--repeats 5] [--json]

Loads the demo model once into each engine, in one process: turbospark from its GGUF; mlx-lm with
the same weights dequantized and quantized again by MLX to INT4, in the fastest of the modes tried;
llama.cpp from the same file where llama_cpp can be imported. Every round runs each engine once, in
turn; figures are medians over the rounds. Decode starts behind a 256-token prompt. Prefill computes
the head for the last row only. Decode is also given as a share of the memory bandwidth, which is
measured between the rounds. Peak memory is read in a child process that runs turbospark alone.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

import turbospark as ts
from turbospark.cli.bench import bytes_a_token, memory_bandwidth
from turbospark.kernels.quantized_matmul import dequantize_reference
from turbospark.loading.demo import demo_file
from turbospark.nn.linear import Matrix, RMSNorm

PROMPT_TOKENS = 256
RANDOM = np.random.default_rng(11)
PROMPT = [2, *RANDOM.integers(1000, 200_000, PROMPT_TOKENS - 1).tolist()]
FOLLOWING = RANDOM.integers(1000, 200_000, 64).tolist()


@dataclass
class Contender:
    """One engine: how it prefills PROMPT, and how it feeds one more token."""

    name: str
    prefill: Callable[[], None]
    step: Callable[[int], None]
    decode_tokens: int

    def prefill_rate(self) -> float:
        begin = time.perf_counter()
        self.prefill()
        return PROMPT_TOKENS / (time.perf_counter() - begin)

    def decode_rate(self) -> float:
        begin = time.perf_counter()
        for token in FOLLOWING[: self.decode_tokens]:
            self.step(token)
        return self.decode_tokens / (time.perf_counter() - begin)


def turbospark_contender(engine: ts.Engine, name: str) -> Contender:
    runner = engine.runner
    position = 0

    def prefill() -> None:
        nonlocal position
        runner.reset()
        runner.prefill_chunk(PROMPT, 0)
        position = PROMPT_TOKENS

    def step(token: int) -> None:
        nonlocal position
        runner.produce(token, position)
        position += 1

    return Contender(name, prefill, step, 48)


def mlx_lm_model(engine: ts.Engine, dtype: mx.Dtype, group_size: int) -> nn.Module:
    """mlx-lm's model with the engine's weights, quantized again to INT4."""
    from mlx_lm.models import gemma3_text

    fields = gemma3_text.ModelArgs.__dataclass_fields__
    config = {**engine.model_config, "model_type": "gemma3_text", "rope_scaling": None}
    rope = config.get("rope_parameters") or {}
    if rope:
        config["rope_theta"] = rope["full_attention"]["rope_theta"]
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    config["sliding_window_pattern"] = 6
    model = gemma3_text.Model(
        gemma3_text.ModelArgs(**{key: config[key] for key in fields if key in config})
    )
    weights = {}
    for path, module in engine.model.named_modules():
        if isinstance(module, Matrix):
            weights[f"{path}.weight"] = dequantize_reference(module.value).astype(dtype)
        elif isinstance(module, RMSNorm):
            weights[f"{path}.weight"] = module.weight.astype(dtype)
    model.load_weights(list(model.sanitize(weights).items()))
    nn.quantize(model, group_size=group_size, bits=4)
    mx.eval(model.parameters())
    model.eval()
    return model


def mlx_lm_contender(
    engine: ts.Engine, dtype: mx.Dtype, group_size: int, decode_tokens: int
) -> Contender:
    from mlx_lm.models.cache import make_prompt_cache

    model = mlx_lm_model(engine, dtype, group_size)
    cache = make_prompt_cache(model)

    def forward(tokens: list[int]) -> None:
        hidden = model.model(mx.array([tokens]), cache=cache)[:, -1:]
        head = (
            model.lm_head if not model.tie_word_embeddings else model.model.embed_tokens.as_linear
        )
        mx.eval(head(hidden))

    def prefill() -> None:
        cache[:] = make_prompt_cache(model)
        forward(PROMPT)

    kind = "float32" if dtype == mx.float32 else "bfloat16"
    name = f"mlx-lm INT4 {kind} g{group_size}"
    return Contender(name, prefill, lambda token: forward([token]), decode_tokens)


def fastest_mlx_lm(engine: ts.Engine) -> Contender:
    """mlx-lm in the mode that decodes fastest here, judged by a few tokens each."""
    rates = {}
    for dtype, group_size in ((mx.float32, 32), (mx.float32, 64), (mx.bfloat16, 64)):
        contender = mlx_lm_contender(engine, dtype, group_size, 2)
        contender.step(PROMPT[0])
        rates[dtype, group_size] = contender.decode_rate()
        print(f"  {contender.name}: {rates[dtype, group_size]:.2f} tok/s", file=sys.stderr)
    dtype, group_size = max(rates, key=lambda mode: rates[mode])
    return mlx_lm_contender(engine, dtype, group_size, 8)


def llama_cpp_contender(path: Path) -> Contender | None:
    if importlib.util.find_spec("llama_cpp") is None:
        return None
    import llama_cpp

    llama_cpp.llama_log_set(quiet(llama_cpp), ctypes.c_void_p(0))
    model = llama_cpp.Llama(
        str(path),
        n_ctx=PROMPT_TOKENS + 128,
        n_batch=PROMPT_TOKENS,
        n_threads=os.cpu_count(),
        n_threads_batch=os.cpu_count(),
        verbose=False,
    )

    def prefill() -> None:
        model.reset()
        model.eval(PROMPT)

    return Contender("llama.cpp Q4_K_M", prefill, lambda token: model.eval([token]), 48)


def quiet(llama_cpp: object) -> object:
    """A callback that drops llama.cpp's log."""
    global LOG_CALLBACK  # noqa: PLW0603  llama.cpp keeps the pointer, so Python must keep the object
    LOG_CALLBACK = llama_cpp.llama_log_callback(lambda *_: None)
    return LOG_CALLBACK


def memory_of_turbospark() -> dict[str, float]:
    """Peak bytes of a child process that loads, prefills and decodes with turbospark alone."""
    result = subprocess.run(
        [sys.executable, __file__, "--memory"], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(result.stdout)


def measure_memory() -> None:
    engine = ts.load("demo")
    contender = turbospark_contender(engine, "turbospark")
    contender.prefill()
    contender.decode_rate()
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    size = demo_file().stat().st_size
    print(
        json.dumps(
            {
                "file": size,
                "mlx_peak": mx.get_peak_memory(),
                "process_peak": rss,
                "mlx_peak_over_file": mx.get_peak_memory() / size,
                "process_peak_over_file": rss / size,
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="rounds; figures are medians")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--memory", action="store_true", help="only report peak memory")
    options = parser.parse_args()
    if options.memory:
        measure_memory()
        return
    memory = memory_of_turbospark()
    engine = ts.load("demo")
    engines = [turbospark_contender(engine, "turbospark")]
    engines.append(turbospark_contender(ts.load("demo", activations="exact"), "turbospark exact"))
    engines.append(fastest_mlx_lm(engine))
    peer = llama_cpp_contender(demo_file())
    engines.extend([peer] if peer else [])
    rates: dict[str, dict[str, list[float]]] = {
        contender.name: {"prefill": [], "decode": []} for contender in engines
    }
    bandwidths: list[float] = []
    for index in range(options.repeats + 1):
        bandwidths.append(memory_bandwidth())
        for contender in engines:
            prefill, decode = contender.prefill_rate(), contender.decode_rate()
            if index:  # the first round warms up
                rates[contender.name]["prefill"].append(prefill)
                rates[contender.name]["decode"].append(decode)
        print(f"  round {index} of {options.repeats}", file=sys.stderr)
    report(engine, rates, memory, statistics.median(bandwidths), options.json)


def report(
    engine: ts.Engine,
    rates: dict[str, dict[str, list[float]]],
    memory: dict[str, float],
    bandwidth: float,
    as_json: bool,
) -> None:
    medians = {
        name: {kind: statistics.median(values) for kind, values in both.items()}
        for name, both in rates.items()
    }
    ours = medians["turbospark"]
    share = ours["decode"] * bytes_a_token(engine.model) / bandwidth
    facts = {
        "medians": medians,
        "memory": memory,
        "bandwidth_bytes_per_second": bandwidth,
        "decode_share_of_bandwidth": share,
        "kernels": engine.kernels.describe(),
        "bodies": engine.bodies,
    }
    if as_json:
        print(json.dumps(facts))
        return
    print(f"kernels: {engine.kernels.describe()}; {engine.bodies}")
    print(f"{'engine':28} {'prefill 256':>12} {'decode':>10}   turbospark is faster by")
    for name, both in medians.items():
        ratio = {kind: ours[kind] / both[kind] for kind in both}
        print(
            f"{name:28} {both['prefill']:9.1f} t/s {both['decode']:6.1f} t/s   "
            f"prefill {ratio['prefill']:6.2f}x  decode {ratio['decode']:6.2f}x"
        )
    print(
        f"memory is read at {bandwidth / 1e9:.1f} GB/s; decode uses {share:.0%} of it\n"
        f"peak memory over the file's {memory['file'] / 1e6:.0f} MB: MLX "
        f"{memory['mlx_peak_over_file']:.2f}x, process {memory['process_peak_over_file']:.2f}x"
    )


if __name__ == "__main__":
    main()
