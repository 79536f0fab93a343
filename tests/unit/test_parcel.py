import numpy as np
import pytest

from daskdl.channel import protocol as module
from daskdl.channel.protocol import Parcel, join

ARRAYS = {
    "odd": np.arange(5, dtype=np.uint8),
    "wide": np.arange(6, dtype=np.float64).reshape(2, 3),
    "none": np.empty((0, 4), np.float32),
    "one": np.array(7),
    "strided": np.arange(10, dtype=np.int32)[::3],
}


@pytest.fixture(params=[1, 3, 8, 64, 10**6])
def part_bytes(request, monkeypatch):
    monkeypatch.setattr(module, "PART_BYTES", request.param)
    return request.param


def test_arrays_come_out_as_they_went_in(part_bytes):
    parcel = Parcel(ARRAYS)

    parts = [parcel.part(number) for number in range(parcel.parts)]

    joined = join(parcel.forms, parts)
    assert joined.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert joined[name].dtype == array.dtype
        np.testing.assert_array_equal(joined[name], array)


def test_parts_are_of_bounded_size(part_bytes):
    parcel = Parcel(ARRAYS)

    sizes = [parcel.part(number).nbytes for number in range(parcel.parts)]

    assert sum(sizes) == parcel.nbytes == 5 + 48 + 0 + 8 + 16
    assert all(size == part_bytes for size in sizes[:-1])
    assert sizes[-1] <= part_bytes


def test_a_part_of_one_array_is_not_copied():
    array = np.arange(8.0)

    assert np.shares_memory(Parcel({"a": array}).part(0), array)


def test_nothing_is_a_parcel_too():
    parcel = Parcel({})

    assert (parcel.parts, join(parcel.forms, [parcel.part(0)])) == (1, {})


def test_parts_that_do_not_go_with_the_forms_are_refused():
    parcel = Parcel({"a": np.arange(4.0)})

    with pytest.raises(ValueError, match="need 32 bytes for 1 arrays, got 31"):
        join(parcel.forms, [parcel.part(0)[:31]])


@pytest.mark.parametrize("number", [-1, 1])
def test_a_part_that_does_not_exist_is_refused(number):
    with pytest.raises(ValueError, match=f"part must be in 0 .. 0, got {number}"):
        Parcel({"a": np.arange(4.0)}).part(number)
