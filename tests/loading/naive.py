"""Readers without a single check: what the bytes of a whole file say."""

import json
import struct

import numpy as np

_LAYOUTS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1",
            10: "<u8", 11: "<i8", 12: "<f8"}  # fmt: skip


def safetensors(raw):
    """Tensor name to its bytes, shape and type."""
    (length,) = struct.unpack_from("<Q", raw)
    header, start = json.loads(raw[8 : 8 + length]), 8 + length
    header.pop("__metadata__", None)
    return {
        name: (
            raw[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]],
            tuple(entry["shape"]),
            entry["dtype"],
        )
        for name, entry in header.items()
    }


class Gguf:
    """Metadata and tensors of a GGUF file."""

    def __init__(self, raw):
        self.raw, self.at = raw, 8
        num_tensors, num_keys = self.numbers("<u8", 2)
        self.metadata = {}
        for _ in range(num_keys):
            key = self.text()
            self.metadata[key] = self.value(self.numbers("<u4", 1)[0])
        rows = [self.row() for _ in range(num_tensors)]
        step = self.metadata.get("general.alignment", 32)
        base = -(-self.at // step) * step
        self.tensors = {name: (kind, shape, base + at) for name, shape, kind, at in rows}

    def numbers(self, layout, count):
        found = np.frombuffer(self.raw, layout, count, self.at)
        self.at += found.nbytes
        return found.tolist()

    def text(self):
        (length,) = self.numbers("<u8", 1)
        self.at += length
        return self.raw[self.at - length : self.at].decode()

    def value(self, kind):
        if kind == 8:
            return self.text()
        if kind != 9:
            return self.numbers(_LAYOUTS[kind], 1)[0]
        (kind,) = self.numbers("<u4", 1)
        (count,) = self.numbers("<u8", 1)
        if kind in {8, 9}:
            return [self.value(kind) for _ in range(count)]
        return self.numbers(_LAYOUTS[kind], count)

    def row(self):
        name = self.text()
        (count,) = self.numbers("<u4", 1)
        dims = self.numbers("<u8", count)
        return name, tuple(dims[::-1]), self.numbers("<u4", 1)[0], self.numbers("<u8", 1)[0]
