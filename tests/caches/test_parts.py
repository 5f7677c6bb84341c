"""Arrays of several owners under "part.name", and back."""

import mlx.core as mx

from turbospark.caches.parts import export_parts, split_parts


def test_parts_come_back_whatever_is_in_their_names() -> None:
    inner = {"0": {"k": mx.zeros(1), "v": mx.zeros(2)}, "10": {"k": mx.zeros(3)}, "1": {}}
    joined = export_parts({"cache": export_parts(inner), "extra": {"a.b": mx.zeros(4)}})
    assert list(joined) == ["cache.0.k", "cache.0.v", "cache.10.k", "extra.a.b"]
    parts = split_parts(joined)
    assert split_parts(parts["cache"]) == {name: part for name, part in inner.items() if part}
    assert list(parts["extra"]) == ["a.b"]
