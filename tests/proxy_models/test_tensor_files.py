"""Tensors written as they come, one at a time, are read by safetensors' own reader, in one file or several."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from proxy_models.tensor_files import TensorFiles, cut, index_of, write_tensors

TENSORS = {
    "flags": torch.tensor([True, False, True]),
    "half": torch.randn(3, 5).to(torch.bfloat16),
    "step": torch.tensor(3.0),
    "weight": torch.randn(7, 4),
    "counts": torch.arange(5),
    "window": torch.randn(2, 3, dtype=torch.float64),
}


@pytest.mark.parametrize("most", [10**9, 100, 1])
def test_what_is_written_in_any_order_is_read_back(tmp_path: Path, most: int) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, TENSORS, reversed(TENSORS.items()), max_file_bytes=most)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == {10**9: 1, 100: 3, 1: 6}[most]
    theirs = {name: tensor for file in files for name, tensor in load_file(file).items()}
    ours = TensorFiles(path)
    assert ours.keys() == theirs.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert ours.shapes[name] == tensor.shape
        assert torch.equal(ours[name], tensor)
        assert torch.equal(theirs[name], tensor)
    if len(files) > 1:
        index = json.loads(index_of(path).read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
        assert set(index["weight_map"].values()) == {file.name for file in files}
        assert files[0].name == f"a-00001-of-{len(files):05}.safetensors"
    save_file(TENSORS, tmp_path / "theirs.safetensors")
    assert all(torch.equal(TensorFiles(tmp_path / "theirs.safetensors")[name], TENSORS[name]) for name in TENSORS)


def test_a_tensor_that_is_missing_or_another_is_refused(tmp_path: Path) -> None:
    path, shapes = tmp_path / "a.safetensors", {"a": torch.empty(3, device="meta")}
    with pytest.raises(ValueError, match="a was announced and did not come"):
        write_tensors(path, shapes, [])
    for tensors in ([("a", torch.zeros(4))], [("a", torch.zeros(3).double())], [("b", torch.zeros(3))]):
        with pytest.raises(ValueError, match="must be announced so"):
            write_tensors(path, shapes, tensors)


def test_an_index_names_files_beside_it_only(tmp_path: Path) -> None:
    path = tmp_path / "b" / "a.safetensors"
    path.parent.mkdir()
    with pytest.raises(FileNotFoundError):
        TensorFiles(path)
    save_file({"a": torch.zeros(3)}, tmp_path / "outside.safetensors")
    for listed in ('{"weight_map": {"a": "../outside.safetensors"}}', "[]", "{", '{"weight_map": {"a": [1]}}'):
        index_of(path).write_text(listed)
        with pytest.raises(ValueError, match="not an index of tensors"):
            TensorFiles(path)
    index_of(path).write_text('{"weight_map": {"a": "a-00001-of-00001.safetensors"}}')
    with pytest.raises(ValueError, match=r"index\.json: .*a-00001-of-00001\.safetensors"):
        TensorFiles(path)


def test_parts_are_cut_where_the_next_would_not_fit() -> None:
    assert cut({"a": 3, "b": 2, "c": 9, "d": 1, "e": 4}, 5) == [["a", "b"], ["c"], ["d", "e"]]
