"""megazero/tensor_stream.py: the same file as if all tensors had been there, and one at a time in memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megazero.tensor_file import CHUNK_BYTES, TensorFile
from megazero.tensor_stream import Lazy, write_lazily


def test_a_streamed_file_is_read_by_all_and_its_checksums_are_right(tmp_path: Path) -> None:
    """Tensors that end on a chunk's border, cross two of them, are empty, or lie transposed."""
    sizes = {"a": (CHUNK_BYTES // 4 - 100,), "b": (), "c": (3, CHUNK_BYTES // 4), "d": (0, 5), "e": (7, 11)}
    tensors = {name: torch.randn(shape) for name, shape in sizes.items()}
    tensors |= {"c": tensors["c"].bfloat16(), "e": tensors["e"].T}
    lazies = [(name, Lazy(tensor.dtype, tuple(tensor.shape), partial(tensors.get, name)))
              for name, tensor in tensors.items()]
    written = write_lazily(tmp_path / "x.safetensors", lazies, metadata={"format": "pt"})
    loaded = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items()) and len(loaded) == 5
    file = TensorFile(tmp_path / "x.safetensors", expected=written)
    for name, tensor in tensors.items():
        assert file.bits(name).tobytes() == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    assert file.metadata == {"format": "pt"}
    with pytest.raises(FileExistsError):
        write_lazily(tmp_path / "x.safetensors", lazies, metadata={})


def test_a_tensor_that_cannot_be_read_leaves_no_file(tmp_path: Path) -> None:
    def fail() -> Tensor:
        raise ValueError("no such tensor")

    lazies = [("a", Lazy(torch.float32, (4,), partial(torch.ones, 4))), ("b", Lazy(torch.float32, (4,), fail))]
    with pytest.raises(ValueError, match="no such tensor"):
        write_lazily(tmp_path / "x.safetensors", lazies, metadata={})
    assert not list(tmp_path.iterdir())


def test_a_tensor_may_come_in_parts(tmp_path: Path) -> None:
    whole = torch.randn(5, 3, 7)
    first, *rest = (partial(whole.__getitem__, part) for part in (slice(2), 2, slice(3, 5)))
    write_lazily(tmp_path / "x.safetensors", [("a", Lazy(whole.dtype, (5, 3, 7), first, tuple(rest)))], metadata={})
    assert torch.equal(load_file(tmp_path / "x.safetensors")["a"], whole)
    with pytest.raises(AssertionError):
        write_lazily(tmp_path / "y.safetensors", [("a", Lazy(whole.dtype, (5, 3, 7), first, (first,)))], metadata={})
