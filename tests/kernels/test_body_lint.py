"""Every body keeps the rules, and each rule finds what it is there for."""

from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

import pytest
from kernels import body_lint
from kernels.body_lint import RULES, Body
from kernels.cases_gpu import EMULATION

from turbospark.kernels.gpu.argmax import JOIN as ARGMAX_JOIN
from turbospark.kernels.gpu.argmax import PARTS as ARGMAX_PARTS
from turbospark.kernels.gpu.attention_decode import COMBINE, PARTIALS, TENSOR
from turbospark.kernels.gpu.delta_net import RECORD as DELTA_NET
from turbospark.kernels.gpu.delta_scan import FILTER, GATE, SCAN
from turbospark.kernels.gpu.experts import ROUTE
from turbospark.kernels.gpu.experts_wide import JOIN as EXPERTS_JOIN
from turbospark.kernels.gpu.head_norm_rope import KERNEL as HEAD_NORM_ROPE
from turbospark.kernels.gpu.index_rows import KERNEL as INDEX_ROWS
from turbospark.kernels.gpu.int4_chain import KERNEL as CHAIN
from turbospark.kernels.gpu.int4_product import kernel_of
from turbospark.kernels.gpu.int4_rows import KERNEL as INT4_ROWS
from turbospark.kernels.gpu.kernel import Kernel, header
from turbospark.kernels.gpu.latent import KERNELS as LATENTS
from turbospark.kernels.gpu.latent import PARTIALS as LATENT_PARTIALS
from turbospark.kernels.gpu.rms_norm import KERNEL as RMS_NORM
from turbospark.kernels.gpu.rotated_attention import kernel_of as kernel_that_rotates
from turbospark.kernels.gpu.streams import NORM as STREAMS_NORM
from turbospark.kernels.gpu.streams import OPEN as STREAMS_OPEN


def form_of(name: str, inputs: str, outputs: str) -> Kernel:
    """A kernel with all the inputs that a body may have."""
    return Kernel(name, tuple(inputs.split()), tuple(outputs.split()))


UP_CODES = ("gate_codes", "up_codes", "shared_gate_codes", "shared_up_codes")
UP_NAMES = "x norm_weight shared_norm_weight numbers scores expert_scale gate_bias up_bias " + (
    " ".join(
        f"{code.removesuffix('codes')}{part}"
        for code in UP_CODES
        for part in ("codes", "scales", "biases")
    )
)

ROTATED = kernel_that_rotates(PARTIALS, writes=True)
FOLDER = resources.files("turbospark.kernels.gpu")

# Inputs that the wrapper knows to have 8 elements or more; pointers whose loads are aligned:
# - codes, codes_at, gate_at, up_at, matrix: whole rows of K / 8 words, K a multiple of 32 (of 8,
#   at 8 bits);
# - branch, branch_norm, norm_weight of experts_scores, all of experts_close: arrays of their own,
#   rows of K or C values, a multiple of 8;
# - hidden: what experts_up wrote, quads of rows whose parts are all multiples of eight floats;
# - row: of a cache block, an array of its own, of D values, D a multiple of 8;
# - parts: what attention_partials wrote, rows of D + 4 floats;
# - latents, keys, tail_v, tail_k of latent attention: rows of L and R values, L a multiple of 8, R
#   of 2, of blocks of eight rows or more;
# - x, weight and residual of rms_norm are passed on only where rows are multiples of 8;
# - state, q and k of delta_scan: whole arrays of rows of Dk floats, Dk a multiple of 4;
# - tail_k, tail_v: of a cache block, from whole rows of D values, D a multiple of 4, or of 8 where
#   16 bytes are read;
# - q, k, v and query_rows, key_rows, value_rows, and weights of their norms: of heads of 8 numbers
#   or more; frequencies are padded to 8.
KERNELS = {
    "int4_gemv": (kernel_of("int4_gemv", 3), {"x", "norm_weight"}, {"codes"}),
    "int4_rows": (INT4_ROWS, set(), set()),
    "rms_norm": (RMS_NORM, {"x", "weight", "residual"}, set()),
    "attention_partials": (
        PARTIALS,
        {"q", "sealed_k", "sealed_v", "tail_k", "tail_v"},
        {"row", "tail_k", "tail_v"},
    ),
    "attention_combine": (COMBINE, {"parts"}, {"parts"}),
    "argmax_parts": (ARGMAX_PARTS, {"logits"}, set()),
    "argmax_join": (ARGMAX_JOIN, set(), set()),
    "head_norm_rope": (
        HEAD_NORM_ROPE,
        {"q", "k", "v", "tail_k", "tail_v", "q_weight", "k_weight", "v_weight", "frequencies"},
        {"tail_k", "tail_v"},
    ),
    "rotated_partials": (
        ROTATED,
        {*ROTATED.inputs} - {"lengths", "numbers", "sinks", "gate"},
        {"row", "tail_k", "tail_v"},
    ),
    "delta_net": (DELTA_NET, {"qkv", "tail", "conv", "state"}, set()),
    "delta_filter": (FILTER, {"qkv", "tail", "conv"}, set()),
    "delta_scan": (SCAN, {"state", "q", "k"}, {"q", "k"}),
    "delta_gate": (GATE, set(), set()),
    "experts_route": (ROUTE, set(), set()),
    "experts_join": (EXPERTS_JOIN, {"outs"}, set()),
    "latent_queries": (
        LATENTS["latent_queries", True],
        {"codes", "scales", "biases", "tail_k", "tail_v"},
        {"tail_k", "tail_v"},
    ),
    "latent_partials": (
        LATENT_PARTIALS,
        {"sealed_k", "sealed_v", "tail_k", "tail_v"},
        {"latents", "keys"},
    ),
    "latent_values": (
        LATENTS["latent_values", True],
        {"codes", "scales", "biases", "parts"},
        {"parts"},
    ),
    "experts_scores": (
        form_of(
            "experts_scores",
            "x norm_weight numbers matrix scales biases bias branch branch_norm",
            "scores whole",
        ),
        {"x", "norm_weight", "matrix", "branch", "branch_norm"},
        {"matrix", "norm_weight", "branch", "branch_norm"},
    ),
    "experts_up": (
        form_of("experts_up", UP_NAMES, "hidden"),
        {*UP_NAMES.split()} - {"numbers", "scores", "expert_scale", "gate_bias", "up_bias"},
        {"gate_at", "up_at"},
    ),
    "experts_down": (
        form_of(
            "experts_down",
            "hidden codes scales biases bias shared_codes shared_scales shared_biases residual",
            "y",
        ),
        {"hidden", "codes", "scales", "biases", "shared_codes"},
        {"codes_at", "hidden"},
    ),
    "index_rows": (INDEX_ROWS, set(), set()),
    "streams_norm": (STREAMS_NORM, set(), set()),
    "streams_mix": (STREAMS_OPEN, set(), set()),
    "experts_close": (
        form_of("experts_close", "h sums a_weight b_weight weight numbers factor", "y"),
        {"h", "sums", "a_weight", "b_weight", "weight"},
        {"h", "sums", "a_weight", "b_weight", "weight"},
    ),
}

INCLUDED = {"rotated_heads.h"}
"""Parts of several bodies, linted with them."""

# Bodies of NVIDIA GPUs alone, and the rules that hold there too.
CUDA_ONLY = {
    "int4_mma": kernel_of("int4_mma", 3, only="cuda"),
    "int4_chain": CHAIN,
    "attention_tensor": TENSOR,
    "rotated_tensor": kernel_that_rotates(TENSOR, writes=True),
}
CUDA_RULES = (
    body_lint.text_is_ascii,
    body_lint.bindings_are_few,
    body_lint.names_do_not_bind_by_accident,
    body_lint.mlx_names_are_left_alone,
    body_lint.literals_are_floats,
    body_lint.nothing_is_atomic,
    body_lint.data_flows_one_way,
)


def body_of(name: str) -> Body:
    kernel, long_inputs, aligned = KERNELS[name]
    return Body(
        kernel.source, kernel.inputs, kernel.outputs, frozenset(long_inputs), frozenset(aligned)
    )


def test_every_body_is_linted() -> None:
    files = {file.name for file in FOLDER.joinpath("bodies").iterdir() if file.is_file()}
    assert files - INCLUDED == {Path(kernel.path).name for kernel, _, _ in KERNELS.values()}


def test_every_body_of_cuda_alone_is_linted() -> None:
    files = {file.name for file in FOLDER.joinpath("bodies/cuda").iterdir()}
    assert files == {Path(kernel.path).name for kernel in CUDA_ONLY.values()}


@pytest.mark.parametrize("rule", CUDA_RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("name", CUDA_ONLY)
def test_bodies_of_cuda_alone_keep_the_rule(
    name: str, rule: Callable[[Body], Iterator[str]]
) -> None:
    kernel = CUDA_ONLY[name]
    outputs = [name for name in kernel.outputs if name != "scratch"]  # a launch's own notes
    assert list(rule(Body(kernel.source, kernel.inputs, tuple(outputs)))) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("name", KERNELS)
def test_bodies_keep_the_rule(name: str, rule: Callable[[Body], Iterator[str]]) -> None:
    assert list(rule(body_of(name))) == []


@pytest.mark.parametrize(
    "rule", [body_lint.text_is_ascii, body_lint.mlx_names_are_left_alone], ids=lambda r: r.__name__
)
@pytest.mark.parametrize("name", ["metal.h", "common.h", "heads.h", "parts.h", "cuda_fragments.h"])
def test_preludes_keep_the_rule(name: str, rule: Callable[[Body], Iterator[str]]) -> None:
    text = FOLDER.joinpath(f"dialect/{name}").read_text("utf-8")
    assert list(rule(Body(text, (), ()))) == []


PLANTED = [
    ("pointers_have_a_space", "const float* p = x;", "without an address space"),
    ("pointers_have_a_space", "float& r = v;", "without an address space"),
    ("short_inputs_are_only_indexed", "y[0] = load_floats<4>(x).v[0];", "passed on by pointer"),
    ("names_do_not_bind_by_accident", "int max_shape = 3;", "'x_shape'"),
    ("names_do_not_bind_by_accident", "int my_grid_size = 3;", "'grid_size'"),
    ("bindings_are_few", "int n = x_shape[0];", "32 bindings"),
    ("text_is_ascii", "// the µ kernel", "not ASCII"),
    ("mlx_names_are_left_alone", "struct Limits { int a; };", "MLX's own"),
    ("mlx_names_are_left_alone", "namespace metal { int a; }", "inside namespace metal"),
    ("language_is_metal", "if (lane > 3) return;", "'return'"),
    ("language_is_metal", "double d = 0;", "'double'"),
    ("language_is_metal", "threadgroup_barrier(mem_flags::mem_none);", "'mem_none'"),
    ("language_is_metal", "size_t n = 0;", "'size_t'"),
    ("language_is_metal", "v = std::max(v, 0.0f);", "std::"),
    ("language_is_metal", "auto f = [&](int i) { v += i; };", "lambdas"),
    ("language_is_metal", "float (*f)(float) = g;", "function pointers"),
    ("literals_are_floats", "float v = 2.0 * 1.0f;", "2.0 is a double"),
    ("literals_are_floats", "float v = 1.5e-3;", "1.5e-3 is a double"),
    ("vector_types_are_packs", "float3 v;", "float3"),
    ("wide_loads_are_aligned", "auto p = load_pack<4>(x + 1);", "load_pack from 'x'"),
    ("nothing_is_atomic", "atomic_fetch_add_explicit(y, 1, memory_order_relaxed);", "atomics"),
    ("private_arrays_are_unrolled", "float v[4]; for (int i = 0; i < 4; i++) { v[i] = 0.0f; }",
     "indexed by 'i' at run time"),
    ("private_arrays_are_unrolled", "float v[4]; v[lane & 3] = 0.0f;", "indexed by 'lane'"),
    ("data_flows_one_way", "x[0] = 0.0f;", "input 'x' is written"),
    ("data_flows_one_way", "y[0] += 1.0f;", "output 'y' is read"),
    ("data_flows_one_way", "float v = y[0];", "output 'y' is read"),
    ("loops_do_not_divide", "for (int i = 0; i < K; i++) { n += i % count; }", "'% count'"),
    ("loops_do_not_divide", "for (int i = 0; i < K; i++) { s += metal::exp(s); }", "'exp('"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "text", "message"), PLANTED)
def test_a_planted_violation_is_found(rule: str, text: str, message: str) -> None:
    others = tuple(f"other{i}" for i in range(30)) if rule == "bindings_are_few" else ()
    body = Body(text, ("x", *others[:29]), ("y",), frozenset(others))
    found = list(getattr(body_lint, rule)(body))
    assert any(message in line for line in found), found


def test_every_rule_has_a_planted_violation() -> None:
    assert {rule.__name__ for rule in RULES} == {rule for rule, _, _ in PLANTED}


@pytest.mark.parametrize("kernel", [k for k, _, _ in KERNELS.values()], ids=lambda k: k.name)
def test_neither_comments_nor_includes_reach_mlx(kernel: Kernel) -> None:
    for text in (kernel.source, header(EMULATION)):
        assert "#include" not in text
        assert "//" not in text
        assert "/*" not in text
        assert "\n\n" not in text
