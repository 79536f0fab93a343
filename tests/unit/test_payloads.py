import dask.config
import numpy as np
import pytest
from distributed.protocol import Serialized, dumps, to_serialize

from daskdl.channel.protocol import unwrap, unwrap_arrays, wrap, wrap_arrays

ARRAYS = [
    np.arange(7, dtype=np.uint8),
    np.arange(6.0).reshape(2, 3),
    np.zeros(0, np.int64),
    np.arange(10, dtype=np.int32)[::2],
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}{a.shape}")
def test_an_array_comes_back_as_it_was_wrapped(array):
    back = unwrap(wrap(array))

    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_a_wrapped_array_is_serialised_already():
    assert isinstance(wrap(ARRAYS[0]), Serialized)


def on_the_wire(payload):
    """Bytes that Dask would send, told to compress."""
    with dask.config.set({"distributed.comm.compression": "lz4"}):
        return sum(len(frame) for frame in dumps({"payload": payload}))


def test_dask_does_not_compress_what_is_wrapped():
    array = np.zeros(2**20, np.uint8)

    assert on_the_wire(to_serialize(array)) < array.nbytes / 10  # it does otherwise
    assert on_the_wire(wrap(array)) >= array.nbytes


@pytest.mark.parametrize("payload", [None, "text", 5, b"bytes"], ids=repr)
def test_other_payloads_stay_as_they_are(payload):
    assert unwrap(payload) is payload


def test_what_was_not_serialised_on_its_way_is_taken_out():
    assert unwrap(to_serialize(ARRAYS[0])) is ARRAYS[0]


def test_the_arrays_of_a_note_are_wrapped_and_the_rest_is_plain():
    note = {"counts": ARRAYS[0], "step": 3, "nested": {"a": 1}}

    wrapped = wrap_arrays(note)

    assert isinstance(wrapped["counts"], Serialized)
    assert (wrapped["step"], wrapped["nested"]) == (3, {"a": 1})
    back = unwrap_arrays(wrapped)
    assert back.keys() == note.keys()
    np.testing.assert_array_equal(back["counts"], ARRAYS[0])


@pytest.mark.parametrize("note", [None, "text", [1, 2]], ids=repr)
def test_a_note_that_is_no_mapping_travels_as_it_is(note):
    assert unwrap_arrays(wrap_arrays(note)) is note
