"""Tensors as safetensors: exact, with memory of their own, and nothing else is read."""

import pickle

import pytest
import safetensors.torch
import torch
from torch import nn

from daskdl import OptionError, SaveError
from daskdl.saving import folder
from daskdl.saving.folder import DTYPES, from_bytes, laid_out, view


def to_bytes(named):
    return bytes(view(laid_out(named)))


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_every_dtype_comes_back_exactly(dtype):
    tensor = torch.tensor([[0, 1], [3, 2]]).to(dtype)

    (read,) = from_bytes(to_bytes({"x": tensor})).values()

    assert read.dtype == dtype
    assert torch.equal(read, tensor)


def test_the_bytes_are_a_safetensors_file_for_others():
    content = to_bytes({"x": torch.arange(3)})

    assert safetensors.torch.load(content)["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(12.0)[3:5],
        torch.ones(1).expand(4),
        torch.tensor(3.5),
        torch.empty(0, 2),
        nn.Parameter(torch.ones(2)),
    ],
    ids=["transposed", "part", "expanded", "scalar", "empty", "parameter"],
)
def test_any_view_comes_back_as_a_whole_tensor(tensor):
    (read,) = from_bytes(to_bytes({"x": tensor})).values()

    assert torch.equal(read, tensor)
    assert read.is_contiguous()


def test_views_of_one_memory_are_written_each():
    flat = torch.arange(4.0)

    read = from_bytes(to_bytes({"a": flat[:2], "b": flat[1:], "c": flat}))

    assert [read[n].tolist() for n in "abc"] == [[0, 1], [1, 2, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(2, dtype=torch.complex64), "x is torch.complex64"),
        (torch.ones(2).to_sparse(), "torch.sparse_coo"),
        (torch.ones(2, device="meta"), "on meta"),
        (
            nn.UninitializedParameter(),
            "x is a torch.nn.parameter.UninitializedParameter",
        ),
    ],
    ids=["complex", "sparse", "meta", "lazy"],
)
def test_what_the_format_cannot_hold_is_refused_by_name(tensor, message):
    with pytest.raises(OptionError, match=message):
        to_bytes({"x": tensor})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 8,
        (2**63).to_bytes(8, "little") + b"{}",
        (100).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"\xff\xff",
        pickle.dumps({"x": 1}),
        to_bytes({"x": torch.arange(3)})[:-1],
        to_bytes({"x": torch.arange(3)}) + b"\0",
    ],
    ids=["no", "zeros", "huge", "long", "list", "no text", "pickle", "short", "more"],
)
def test_what_is_no_whole_file_is_refused(content):
    with pytest.raises(SaveError, match="no safetensors file"):
        from_bytes(content)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64], ids=str)
def test_a_dtype_that_is_never_written_is_refused(dtype):
    content = safetensors.torch.save({"x": torch.ones(2).to(dtype)})

    with pytest.raises(SaveError, match=f"'x' is {dtype}, which is never saved"):
        from_bytes(content)


def test_a_header_longer_than_the_file_is_refused_before_it_is_read(monkeypatch):
    monkeypatch.setattr(folder, "load", lambda _: pytest.fail("it was read"))

    with pytest.raises(SaveError, match=r"a header of 2147483648 bytes, of 10 in all"):
        from_bytes((2**31).to_bytes(8, "little") + b"{}")
