"""Which launches are in the graph of a chain, and how many lie one behind the other."""

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from turbospark.kernels.gpu.kernel import GpuTarget

LAUNCH = "CumSum"
"""The node that a launch is here."""

_UNSEEN = {"Depends", "Broadcast", "Concatenate", "Reshape", "Slice", "Squeeze", "Sum", "View"}
"""Nodes that launch nothing on a GPU, and those that hand a launch its inputs here."""


def counting() -> GpuTarget:
    """A target that computes nothing, but whose launches read what they are given."""

    def build(**_names: Any) -> Callable[..., Sequence[mx.array]]:
        def launch(**call: Any) -> list[mx.array]:
            firsts = [x.reshape(-1)[:1].view(mx.uint8)[:1] for x in call["inputs"]]
            total = mx.concatenate(firsts).sum()
            whole = mx.cumsum(total.reshape(1))
            pairs = zip(call["output_shapes"], call["output_dtypes"], strict=True)
            return [mx.broadcast_to(whole.view(dtype)[:1], shape) for shape, dtype in pairs]

        return launch

    return GpuTarget("cuda", "cuda.h", build, "cuda")


def chained(chain: Any, folder: Path, label: str = LAUNCH) -> tuple[tuple[int, int], int]:
    """Of a chain's graph: nodes of that label, the most on one path, and all that compute.

    What a node `Depends` is told to wait for is no path: a GPU does not wait for it.
    """
    file = folder / "chain.dot"
    outputs = chain._run(chain._start)
    mx.export_to_dot(str(file), *(outputs if isinstance(outputs, list) else [outputs]))
    labels = dict[str, str]()
    read, made, maker = defaultdict[str, list[str]](list), defaultdict[str, int](int), {}
    for line in file.read_text().splitlines():
        if node := re.search(r'(\d+) \[label ?="(\w+)[^"]*", shape=rectangle', line):
            labels[node[1]] = node[2]
        elif edge := re.fullmatch(r'"(\w+)" -> (\d+)', line):
            read[edge[2]].append(edge[1])
        elif edge := re.fullmatch(r'(\d+) -> "(\w+)"', line):
            maker[edge[2]] = edge[1]
            made[edge[1]] += 1

    @functools.cache
    def longest(node: str) -> int:
        inputs = read[node][: made[node] if labels[node] == "Depends" else None]
        before = [longest(maker[name]) for name in inputs if name in maker]
        return max(before, default=0) + (labels[node] == label)

    count = sum(found == label for found in labels.values())
    computing = [found for found in labels.values() if found not in _UNSEEN]
    return (count, max(map(longest, labels))), len(computing)
