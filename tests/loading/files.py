"""Tiny checkpoints, written byte by byte so that tests can break any part of them."""

import json
import struct
from pathlib import Path

import numpy as np

VOCAB = 263
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 211,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
_NUMPY = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U32": np.uint32, "U8": np.uint8,
          "I64": np.int64}  # fmt: skip


def llama_shapes():
    """Parameter name to shape of the tiny llama."""
    shapes = {"model.embed_tokens.weight": (VOCAB, 64), "model.norm.weight": (64,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (64,),
            prefix + "post_attention_layernorm.weight": (64,),
            prefix + "self_attn.q_proj.weight": (96, 64),
            prefix + "self_attn.k_proj.weight": (32, 64),
            prefix + "self_attn.v_proj.weight": (32, 64),
            prefix + "self_attn.o_proj.weight": (64, 96),
            prefix + "mlp.gate_proj.weight": (160, 64),
            prefix + "mlp.up_proj.weight": (160, 64),
            prefix + "mlp.down_proj.weight": (64, 160),
        }
    return shapes


def llama_weights(seed=0):
    """Random float32 weights of the tiny llama, exact in bfloat16."""
    draw = np.random.default_rng(seed)
    weights = {}
    for name, shape in llama_shapes().items():
        numbers = draw.integers(-64, 65, size=shape)
        weights[name] = (numbers / 512 if len(shape) == 2 else 1 + numbers / 128).astype(np.float32)
    return weights


def bfloat16(values):
    """The upper halves of float32 numbers: bfloat16 as uint16."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def type_of(array):
    """The safetensors type of a numpy array; uint16 stands for bfloat16."""
    return next(name for name, kind in _NUMPY.items() if array.dtype == kind)


def safetensors_bytes(tensors, header=None):
    """A safetensors file; `header` replaces entries of the JSON header."""
    entries, data = {"__metadata__": {"format": "pt"}}, b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        span = [len(data), len(data) + len(raw)]
        entries[name] = {
            "dtype": type_of(array), "shape": list(array.shape), "data_offsets": span
        }  # fmt: skip
        data += raw
    text = json.dumps(entries | (header or {})).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write_tokenizer(folder):
    """A byte-level tokenizer.json of VOCAB ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<unk>", "<s>", "</s>", *letters, *(f"<extra{i}>" for i in range(VOCAB - 259))]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name) for name in ("<unk>", "<s>", "</s>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_folder(folder, tensors=None, config=None, shards=None):
    """A safetensors checkpoint; `shards` maps shard names to tensor names, with an index."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = llama_weights() if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps(LLAMA if config is None else config))
    write_tokenizer(folder)
    if shards is None:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        return folder
    for file, names in shards.items():
        (folder / file).write_bytes(safetensors_bytes({name: tensors[name] for name in names}))
    weight_map = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def two_shards(tensors):
    """Shard names to the halves of a checkpoint's tensor names."""
    names = list(tensors)
    return {
        "model-00001-of-00002.safetensors": names[:11],
        "model-00002-of-00002.safetensors": names[11:],
    }


def text(value):
    """A GGUF string."""
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value_bytes(value):
    """A GGUF value with its type in front."""
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    kind, layout = (5, "<i4") if isinstance(value[0], int) else (6, "<f4")
    return struct.pack("<IIQ", 9, kind, len(value)) + np.array(value, layout).tobytes()


def gguf_bytes(metadata, tensors, version=3, alignment=32):
    """A GGUF file; tensors are (ggml type number, shape in numpy order, raw bytes) by name."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    out += b"".join(text(key) + value_bytes(value) for key, value in metadata.items())
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        dims = shape[::-1]
        out += text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        out += struct.pack("<IQ", kind, len(data))
        data += raw + bytes(-len(raw) % alignment)
    return out + bytes(-len(out) % alignment) + data


def gguf_metadata(**changes):
    """Metadata of the tiny llama, with a vocabulary of bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "▁a"]
    metadata = {
        "general.architecture": "llama",
        "llama.embedding_length": 64,
        "llama.block_count": 2,
        "llama.feed_forward_length": 160,
        "llama.attention.head_count": 3,
        "llama.attention.head_count_kv": 1,
        "llama.attention.key_length": 32,
        "llama.attention.value_length": 32,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.context_length": 211,
        "llama.rope.freq_base": 10_000.0,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-1.0, -2.0, -3.0, -4.0],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, 1, 1, 1, 1],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return metadata | changes


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    """llama.cpp's name of a parameter of the tiny llama."""
    path, _, kind = name.rpartition(".")
    if path in GGUF_NAMES:
        return f"{GGUF_NAMES[path]}.{kind}"
    _, _, layer, rest = path.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest]}.{kind}"


def interleaved(matrix, heads):
    """Rows of q or k in the order in which llama.cpp's converter stores them."""
    rows, width = matrix.shape
    halves = matrix.reshape(heads, 2, rows // heads // 2, width)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, width)


def gguf_tensors(weights=None, encode=None):
    """The tiny llama's tensors for `gguf_bytes`; `encode(name, matrix)` gives (type, raw)."""
    tensors = {}
    for name, array in (weights or llama_weights()).items():
        if "q_proj" in name or "k_proj" in name:
            array = interleaved(array, 3 if "q_proj" in name else 1)
        kind, raw = 0, array.tobytes()
        if encode is not None and array.ndim == 2:
            kind, raw = encode(gguf_name(name), array)
        tensors[gguf_name(name)] = (kind, array.shape, raw)
    return tensors


def q8_0(_, matrix):
    """Q8_0 blocks whose scale is 1/512: exact for the weights of `llama_weights`."""
    rows, width = matrix.shape
    codes = np.rint(matrix * 512).astype(np.int8).reshape(rows, width // 32, 32)
    scales = np.full((rows, width // 32, 1), 1 / 512, np.float16)
    return 8, np.concatenate([scales.view(np.int8), codes], axis=-1).tobytes()


def write_gguf(path, metadata=None, tensors=None, **options):
    """A GGUF file of the tiny llama."""
    metadata = gguf_metadata() if metadata is None else metadata
    tensors = gguf_tensors() if tensors is None else tensors
    path.write_bytes(gguf_bytes(metadata, tensors, **options))
    return path
