"""How fast are delta nets and routed experts on a GPU, and which geometry is best?

    python benchmarks/gpu_mixers.py [--seconds 80] [--only delta,scan,blocks,cuts,sorted]

Needs an Apple or NVIDIA GPU. Calls of a few rows form a compiled chain in which each waits for the
one before; calls of MLX's operations are graphs of their own, or they would share what no link
reaches. States and experts change from call to call, so that no cache holds them. Contenders take
turns and a figure is the median of rounds. Bandwidth is of the state, read and written, or of the
experts that rows are sent to, each counted once a row, in per cent of a copy measured in the same
run. It stops when its seconds are spent.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import gpu_experts
import mlx.core as mx
from gpu_links import Links
from gpu_timing import ROUNDS, Call, Chain, medians
from gpu_timing import Bench as Timed

from turbospark.kernels.delta_net import (
    DeltaRows,
    causal_conv_reference,
    delta_chunks_reference,
    fold_reference,
    gated_norm_reference,
    gates_reference,
    split_heads_reference,
)
from turbospark.kernels.experts import (
    mix_experts_reference,
    mix_experts_sorted,
    route_reference,
)
from turbospark.kernels.gpu.delta_net import delta_net
from turbospark.kernels.gpu.delta_scan import ScanGeometry, delta_scan, scan_geometry
from turbospark.kernels.gpu.experts_wide import dense_experts, mix_sorted
from turbospark.kernels.gpu.kernel import GpuTarget
from turbospark.kernels.target import DeltaGeometry, DeltaInputs, DeltaState
from turbospark.kernels.weights import DeltaWeights, ExpertWeights, Norm, QuantizedWeight

DTYPE = mx.bfloat16
CALLS = 40
DELTA = {"4B, 35B-A3B": (16, 32), "27B": (16, 48)}
HEAD_DIM = 128
ROWS, BLOCK_ROWS, LONG, SORTED = (1, 2, 4, 8), (1, 4, 8), (512, 2048), (64, 512, 2048)
EXPERTS = {"35B-A3B": (256, 8, 512, 2048), "26B-A4B": (128, 8, 704, 2816)}  # E, k, I, C


def chain(
    call: Call, start: mx.array, calls: int = CALLS, graphs: int = 1, *, is_compiled: bool = True
) -> Chain:
    return Chain(call, start, calls, graphs, is_compiled=is_compiled)


def turns(chains: Sequence[Chain], rounds: int = ROUNDS) -> list[float]:
    """Microseconds of each."""
    return [times.us for times in medians(chains, rounds=rounds)]


class Bench(Timed):
    def show(self, what: str, us: float, nbytes: int = 0, mlx_us: float = 0.0) -> None:
        bandwidth = self.bandwidth(nbytes, us) if nbytes else ""
        theirs = f"MLX {mlx_us:9.1f} us  {mlx_us / us:6.1f}x" if mlx_us else ""
        print(f"{what:56s} {us:9.2f} us  {bandwidth:18s} {theirs}", flush=True)

    def delta(self) -> None:
        """Few rows: one launch."""
        for name, (Hk, Hv) in DELTA.items():
            heads = DeltaGeometry(Hk, Hv, HEAD_DIM, HEAD_DIM, 4)
            weights, states = delta_weights(heads), delta_states(heads, CALLS)
            for T in ROWS:
                if self.is_over:
                    return
                inputs = delta_inputs(heads, T)
                for record in (False, True) if T in (1, 4) else (False,):
                    ours = chain(self._delta_call(inputs, states, heads, weights, record), inputs.z)
                    graphs = 4 if T == 1 else 1
                    theirs = chain(
                        partial(mlx_delta, inputs, states, heads, weights), inputs.z, 1, graphs
                    )
                    us, mlx_us = turns([ours, theirs])
                    form = " recorded" * record
                    nbytes = 2 * states[0][1].nbytes
                    self.show(f"delta_net {name}, {T} rows{form}", us, nbytes, mlx_us)

    def _delta_call(
        self,
        inputs: DeltaInputs,
        states: Sequence[DeltaState],
        heads: DeltaGeometry,
        weights: DeltaWeights,
        record: bool,
    ) -> Call:
        def call(link: mx.array, number: int) -> mx.array:
            y, after, rows = delta_net(
                replace(inputs, z=link),
                states[number],
                heads,
                weights,
                record=record,
                target=self.target,
            )
            kept = rows.arrays() if rows else ()
            return mx.depends(y, [*after, *kept])

        return call

    def scan(self) -> None:
        """Many rows: filter, scan, gate; and the chunked form in MLX's operations."""
        cuts = [
            ScanGeometry(held, simdgroups, block)
            for held, simdgroups, block in (
                (1, 4, 8), (1, 8, 8), (2, 2, 8), (2, 4, 8), (2, 4, 4), (2, 8, 8), (4, 2, 8),
                (4, 4, 8), (1, 2, 8),
            )
        ]  # fmt: skip
        Hk, Hv = next(iter(DELTA.values()))
        heads = DeltaGeometry(Hk, Hv, HEAD_DIM, HEAD_DIM, 4)
        weights, (state,) = delta_weights(heads), delta_states(heads, 1)
        for T in LONG:
            inputs = delta_inputs(heads, T)
            q, rows, log_decay = delta_rows(inputs, state, heads, weights)
            given = (rows.k, rows.v, rows.decay, rows.beta)
            mx.eval(q, given, log_decay)
            y, S = delta_scan(state[1], q, given, self.target)
            z, R = delta_chunks_reference(q, rows, log_decay)
            wrong = [float(mx.abs(a - b).max() / mx.abs(b).max()) for a, b in ((y, z), (S, R))]
            print(f"scan of {T} rows against chunks: {wrong[0]:.1e}, state {wrong[1]:.1e}")

            links = Links(self.target)
            whole = partial(self._whole, links, inputs, state, heads, weights)
            chunked = partial(mlx_chunks, inputs, state, heads, weights)
            mlx_call = partial(mlx_delta, inputs, [state], heads, weights)
            theirs = chain(mlx_call, inputs.z, 1, is_compiled=False)
            ours, chunks = chain(whole, inputs.z, 4), chain(chunked, inputs.z, 1, 2)
            us, chunks_us = turns([ours, chunks], 3)
            (mlx_us,) = turns([theirs], 1)
            self.show(f"delta_net, {T} rows, three launches", us, 0, mlx_us)
            self.show(f"delta_net, {T} rows, chunks in MLX operations", chunks_us, 0, mlx_us)
            for cut in cuts:
                if self.is_over:
                    return
                name = f"  scan held {cut.held} simdgroups {cut.simdgroups} block {cut.block}"
                call = partial(self._scan_call, q, given, cut)
                (us,) = turns([chain(call, state[1], 4)], 3)
                mark = " (default)" * (cut == scan_geometry(self.target.name, heads))
                self.show(name + mark, us)

    def _whole(
        self,
        links: Links,
        inputs: DeltaInputs,
        state: DeltaState,
        heads: DeltaGeometry,
        weights: DeltaWeights,
        link: mx.array,
        _: int,
    ) -> mx.array:
        # Only the gate reads z: filter and scan have to be told.
        given = replace(inputs, z=link)
        return links.behind(
            link, lambda: delta_net(given, state, heads, weights, target=links.target)[0]
        )

    def _scan_call(
        self,
        q: mx.array,
        given: tuple[mx.array, ...],
        cut: ScanGeometry,
        S: mx.array,
        _: int,
    ) -> mx.array:
        return delta_scan(S, q, given, self.target, cut)[1]

    def blocks(self) -> None:
        """Layers of experts of published shapes, and their launches."""
        gpu_experts.blocks(self, BLOCK_ROWS)

    def cuts(self) -> None:
        """Geometries of the launches of experts."""
        gpu_experts.cuts(self)

    def sorted(self) -> None:
        """Many rows: as they come, sorted by expert, sorted with dense matrices."""
        for name, (E, k, inner, C) in EXPERTS.items():
            experts = expert_weights(E, k, inner, C)
            for T in SORTED:
                if self.is_over:
                    return
                y = mx.random.normal((T, C)).astype(DTYPE)
                ids, weights = route_reference(mx.random.normal((T, E)), k)
                mx.eval(y, ids, weights)
                dense = partial(mix_dense, experts=experts, target=self.target)
                for form, mix in (
                    ("as they come", partial(mix_experts_reference, experts=experts)),
                    ("sorted", partial(mix_experts_sorted, experts=experts)),
                    ("sorted, dense matrices", dense),
                ):

                    def call(
                        link: mx.array,
                        _: int,
                        ids: mx.array = ids,
                        weights: mx.array = weights,
                        mix: Callable[..., mx.array] = mix,
                    ) -> mx.array:
                        return mix(link, ids, weights)

                    (us,) = turns([chain(call, y, 1, 2)], 3)
                    self.show(f"experts {name}, {T} rows {form}", us)


def mix_dense(
    y: mx.array, ids: mx.array, weights: mx.array, experts: ExpertWeights, target: GpuTarget
) -> mx.array:
    """Sorted rows times matrices that are dequantized first, summed up in one launch."""
    return mix_sorted(y, ids, weights, dense_experts(experts), target=target)


def expert_weights(E: int, k: int, inner: int, C: int) -> ExpertWeights:
    def make(N: int, K: int) -> QuantizedWeight:
        codes = mx.random.randint(0, 1 << 16, (E, N, K // 4)).astype(mx.uint16).view(mx.uint32)
        scales, biases = (mx.random.normal((E, N, K // 64)).astype(DTYPE) * 0.01 for _ in range(2))
        mx.eval(codes, scales, biases)
        return QuantizedWeight(codes, scales, biases, 4, 64)

    return ExpertWeights(make(inner, C), make(inner, C), make(C, inner), "silu", k)


def delta_weights(heads: DeltaGeometry) -> DeltaWeights:
    Hv = heads.num_value_heads
    made = DeltaWeights(
        mx.random.normal((heads.channels, heads.taps, 1)).astype(DTYPE),
        mx.random.normal((Hv,)),
        mx.random.normal((Hv,)),
        Norm(mx.ones((heads.value_dim,), DTYPE), 1e-6),
    )
    mx.eval(made.conv, made.log_rate, made.dt_bias, made.norm.weight)
    return made


def delta_inputs(heads: DeltaGeometry, T: int) -> DeltaInputs:
    Hv = heads.num_value_heads
    widths = (heads.channels, heads.values, Hv, Hv)
    parts = [mx.random.normal((T, width)).astype(DTYPE) for width in widths]
    mx.eval(parts)
    return DeltaInputs(*parts)


def delta_states(heads: DeltaGeometry, count: int) -> list[DeltaState]:
    states = [tuple(mx.random.normal(x.shape) for x in heads.zero_state()) for _ in range(count)]
    mx.eval(states)
    return states


def delta_rows(
    inputs: DeltaInputs, state: DeltaState, heads: DeltaGeometry, weights: DeltaWeights
) -> tuple[mx.array, DeltaRows, mx.array]:
    """Queries, row inputs and logarithms of the decay in MLX's operations."""
    filtered = causal_conv_reference(inputs.qkv, state[0], weights.conv)
    q, k, v = split_heads_reference(filtered, heads)
    log_decay, beta = gates_reference(inputs.a, inputs.b, weights.log_rate, weights.dt_bias)
    rows = DeltaRows(state, inputs.qkv, k, v, mx.exp(log_decay), beta, fold_reference)
    return q, rows, log_decay


def mlx_chunks(
    inputs: DeltaInputs,
    state: DeltaState,
    heads: DeltaGeometry,
    weights: DeltaWeights,
    link: mx.array,
    _: int,
) -> mx.array:
    """The layer in chunks of MLX's operations."""
    q, rows, log_decay = delta_rows(inputs, state, heads, weights)
    y, S = delta_chunks_reference(q, rows, log_decay)
    return mx.depends(gated_norm_reference(y, link, weights.norm).astype(DTYPE), [S])


def mlx_delta(
    inputs: DeltaInputs,
    states: Sequence[DeltaState],
    heads: DeltaGeometry,
    weights: DeltaWeights,
    link: mx.array,
    number: int,
) -> mx.array:
    """The layer with MLX's own gated delta update."""
    q, rows, _ = delta_rows(inputs, states[number], heads, weights)
    parts = [x.astype(DTYPE)[None] for x in (q, rows.k, rows.v)]
    y, S = mx.fast.gated_delta_update(
        *parts, rows.decay[None], rows.beta[None], states[number][1][None]
    )
    y = gated_norm_reference(y[0].astype(mx.float32), link, weights.norm).astype(DTYPE)
    return mx.depends(y, [S])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="scan,delta,blocks,sorted", help="comma separated")
    parser.add_argument("--seconds", type=float, default=80.0)
    arguments = parser.parse_args()
    bench = Bench(arguments.seconds)
    for part in arguments.only.split(","):
        {
            "delta": bench.delta,
            "scan": bench.scan,
            "blocks": bench.blocks,
            "cuts": bench.cuts,
            "sorted": bench.sorted,
        }[part]()
    if bench.is_over:
        print("stopped: out of seconds", flush=True)


if __name__ == "__main__":
    main()
