import pickle

import numpy as np
import pytest
import torch

from daskdl.data.normalize import Scaling
from daskdl.errors import DataError

TWO = Scaling(np.array([10.0, 20.0]), np.array([2.0, 5.0]), 1.0)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.uint8,
        torch.int16,
        torch.int64,
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
    ],
    ids=str,
)
def test_tensors_of_any_dtype_become_float32(dtype):
    values = torch.tensor([[10, 20], [14, 30]], dtype=dtype)

    scaled = TWO.apply(values)

    assert scaled.dtype == torch.float32
    torch.testing.assert_close(scaled, torch.tensor([[1.0, 1.0], [3.0, 3.0]]))
    assert values.tolist() == [[10, 20], [14, 30]]


@pytest.mark.parametrize("dtype", [">f8", "uint16", "uint8", "float32", "bool"])
def test_arrays_that_are_read_only_become_float32_arrays(dtype):
    values = np.array([[0, 1]], dtype)
    values.flags.writeable = False

    scaled = TWO.apply(values)

    assert isinstance(scaled, np.ndarray)
    assert scaled.dtype == np.float32
    np.testing.assert_allclose(scaled, [[-4.0, -2.8]], rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_a_large_shift_costs_no_digits(dtype):
    values = (1e7 + np.arange(8).reshape(8, 1)).astype(dtype)  # exact in float32
    scaling = Scaling(np.array([1e7 + 3.3]), np.array([0.7]))

    scaled = scaling.apply(torch.from_numpy(values))

    exact = (np.arange(8).reshape(8, 1) - 3.3) / 0.7
    np.testing.assert_allclose(scaled.numpy(), exact, rtol=3e-7)


def test_channels_are_scaled_in_images_of_any_size():
    scaling = Scaling(np.array([[[1.0]], [[2.0]]]), np.array([[[1.0]], [[4.0]]]))
    image = torch.full((1, 2, 3, 5), 6.0)

    scaled = scaling.apply(image)

    assert scaled.shape == image.shape
    assert scaled[0, :, 0, 0].tolist() == [5.0, 1.0]


@pytest.mark.parametrize("shape", [(3, 1), (3, 3), (3,), (3, 2, 2), (3, 1, 2)])
@pytest.mark.parametrize("function", [Scaling.apply, Scaling.inverse])
def test_rows_of_another_shape_are_refused(function, shape):
    with pytest.raises(DataError, match=r"rows of shape .* cannot be scaled by \(2,\)"):
        function(TWO, torch.zeros(shape))


@pytest.mark.parametrize("kind", [torch.from_numpy, np.asarray], ids=["torch", "numpy"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_inverse_gives_the_values_back(kind, dtype):
    values = kind(np.array([[3.0, -7.5], [0.25, 1e3]], dtype))

    back = TWO.inverse(TWO.apply(values))

    assert type(back) is type(values)
    np.testing.assert_allclose(np.asarray(back), np.asarray(values), rtol=1e-5)


def test_the_inverse_keeps_the_dtype_and_adds_a_large_shift_exactly():
    scaling = Scaling(np.array([1e8]), np.array([0.5]))

    back = scaling.inverse(torch.tensor([[3.0]], dtype=torch.float64))

    assert back.tolist() == [[1e8 + 1.5]]


def same():
    return Scaling(np.array([10.0, 20.0]), np.array([2.0, 5.0]), 1.0)


@pytest.mark.parametrize(
    "other",
    [
        Scaling(np.array([10.0, 21.0]), np.array([2.0, 5.0]), 1.0),
        Scaling(np.array([10.0, 20.0]), np.array([2.0, 6.0]), 1.0),
        Scaling(np.array([10.0, 20.0]), np.array([2.0, 5.0]), 0.0),
        "no scaling",
    ],
)
def test_equal_are_those_of_the_same_numbers(other):
    assert same() == TWO
    assert hash(same()) == hash(TWO)
    assert other != TWO


def test_its_numbers_are_its_own_and_cannot_be_changed_even_after_a_journey():
    shift = np.array([10.0, 20.0])
    own = Scaling(shift, np.array([2.0, 5.0]), 1.0)
    shift[0] = 0
    travelled = pickle.loads(pickle.dumps(own))

    assert travelled == own == TWO
    for one in (own, travelled):
        with pytest.raises(ValueError, match="read-only"):
            one.scale[0] = 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_tensor_stays_on_its_device():
    scaled = TWO.apply(torch.zeros(1, 2, device="cuda"))

    assert scaled.device.type == "cuda"
