"""Normalizers: statistics over parts, scaled batches, and fitted ones as JSON."""

import itertools
import json
import pickle
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from daskdl.data import MinMax, Normalization, Standardize, normalize
from daskdl.data.normalize import Scaling
from daskdl.errors import DataError, OptionError
from tests.support.sources import Parts, Streamed, unlabelled

RNG = np.random.default_rng(0)
X = RNG.normal(5, 3, (30, 2))
IMAGES = RNG.integers(0, 256, (7, 3, 4, 5), dtype=np.uint8)
TWO = Scaling(np.array([10.0, 20.0]), np.array([2.0, 5.0]), 1.0)
FITTED = Normalization(
    {
        "a": Scaling(np.array([1.0]), np.array([2.0])),
        3: (Scaling(np.array([0.1, 1 / 3]), np.array([10.0, 1 / 7]), -1.0), None),
    }
)


class Pair(NamedTuple):
    left: object
    right: object


def fitted(*parts, kind=Parts, normalizer=Standardize, **options):
    return normalizer(**options).fit(unlabelled(*parts, kind=kind), client=False)


def numbers(normalization):
    return normalization.scalings.shift, normalization.scalings.scale


class TestStatistics:
    @given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(0, 2**32))
    def test_are_those_of_numpy_however_the_rows_are_cut(self, lengths, seed):
        x = np.random.default_rng(seed).normal(3, 2, (sum(lengths) + 1, 2))
        parts = np.split(x, np.cumsum(lengths))

        for kind in (Parts, Streamed):
            mean, deviation = numbers(fitted(*parts, kind=kind))
            low, extent = numbers(fitted(*parts, kind=kind, normalizer=MinMax))

            np.testing.assert_allclose(mean, x.mean(0), rtol=1e-12, atol=1e-14)
            expected = np.where(x.std(0), x.std(0), 1)
            np.testing.assert_allclose(deviation, expected, rtol=1e-12)
            np.testing.assert_array_equal(low, x.min(0))
            np.testing.assert_allclose(extent, np.where(np.ptp(x, 0), np.ptp(x, 0), 1))

    def test_a_large_offset_costs_no_digits(self):
        shifted = RNG.normal(size=(10_000, 3)) + 1e8
        exact = shifted - 1e8  # without rounding, so close to 1e8

        mean, deviation = numbers(fitted(*np.array_split(shifted, 7)))

        # The mean of float64 near 1e8 is known to 1.5e-8; the deviation to all digits.
        np.testing.assert_allclose(mean - 1e8, exact.mean(0), atol=1.6e-8)
        np.testing.assert_allclose(deviation, exact.std(0), rtol=1e-13)

    @pytest.mark.parametrize(
        ("per", "axes", "shape"),
        [
            ("feature", (0,), (3, 4, 5)),
            ("channel", (0, 2, 3), (3, 1, 1)),
            ("all", None, (1, 1, 1)),
        ],
    )
    def test_groups_are_those_of_per(self, per, axes, shape, monkeypatch):
        monkeypatch.setattr(normalize, "_SLICE_BYTES", 3 * 8 * 60)  # three images

        mean, deviation = numbers(fitted(IMAGES, per=per))

        assert mean.shape == deviation.shape == shape
        np.testing.assert_allclose(mean.ravel(), IMAGES.mean(axes).ravel())
        np.testing.assert_allclose(deviation.ravel(), IMAGES.std(axes).ravel())

    def test_channels_are_the_second_axis_of_tables_and_of_images_of_any_size(self):
        large, small = np.full((2, 3, 4, 4), 1.0), np.full((8, 3, 2, 2), 3.0)

        table, _ = numbers(fitted(X, per="channel"))
        images, _ = numbers(fitted(large, small, per="channel"))

        np.testing.assert_allclose(table, X.mean(0))
        assert images.ravel().tolist() == [2.0] * 3

    def test_do_not_depend_on_the_order_in_which_parts_arrive(self, monkeypatch):
        scalings = []
        for order in itertools.permutations(range(4)):

            def each(source, function, client, order=order):
                for part in order:
                    yield part, function(source, part)

            monkeypatch.setattr(normalize, "map_parts", each)
            scalings.append(fitted(X[:3], X[3:4], X[4:11], X[11:]))

        assert all(scaling == scalings[0] for scaling in scalings)

    def test_each_array_of_a_tree_has_its_own(self):
        tree = {"a": X, "b": Pair(X[:, 0], X * 2)}

        trained = fitted(tree).scalings

        assert trained["a"].shift == pytest.approx(X.mean(0))
        assert isinstance(trained["b"], Pair)
        assert trained["b"].left.shift == pytest.approx(X[:, 0].mean())
        assert trained["b"].right.shift == pytest.approx(2 * X.mean(0))

    @pytest.mark.parametrize(
        ("parts", "options", "message"),
        [
            ([X[:0]], {}, "X has no rows to fit a normalizer on"),
            ([X, X[:, :1]], {}, r"^box 1 has rows of shape \(1,\), those before have "),
            ([{"a": X}, X], {}, r"^x of box 1 is like \., those before are like {'a'"),
        ],
        ids=["empty", "shape", "structure"],
    )
    def test_of_parts_that_do_not_fit_together_are_refused(
        self, parts, options, message
    ):
        with pytest.raises(DataError, match=message):
            fitted(*parts, **options)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_a_value_that_is_not_finite_is_refused_with_its_place(self, value):
        wrong = X.copy()
        wrong[5, 1] = value

        with pytest.raises(
            DataError, match=rf"^box 1: x\['a'\]\[5, 1\] is {value}; a nor"
        ):
            fitted({"a": X}, {"a": wrong})
        message = rf"^box 0, its rows counted from 4: x\[1, 1\] is {value}"
        with pytest.raises(DataError, match=message):
            fitted(wrong, kind=Streamed)


class TestFitting:
    def test_standardizes_and_leaves_the_data_and_the_normalizer_as_they_were(self):
        before, normalizer = X.copy(), Standardize()

        normalization = normalizer.fit(TensorDataset(torch.from_numpy(X)), client=False)
        scaled, _ = normalization((torch.from_numpy(X), None))

        assert normalizer == Standardize()
        np.testing.assert_array_equal(X, before)
        expected = (X - X.mean(0)) / X.std(0)
        np.testing.assert_allclose(scaled, expected.astype(np.float32), rtol=1e-6)

    def test_min_max_scales_the_lowest_and_the_highest_value_to_its_ends(self):
        scaled, _ = fitted(X, normalizer=MinMax, low=-1, high=3)((X, None))

        assert scaled.min(0).tolist() == [-1.0] * 2
        assert scaled.max(0).tolist() == [3.0] * 2

    @pytest.mark.parametrize(
        ("normalizer", "value"), [(Standardize(), 0.0), (MinMax(0.5, 1.0), 0.5)]
    )
    def test_constant_values_are_divided_by_one(self, normalizer, value):
        constant = np.full((5, 1), 0.1, np.float32)

        normalization = normalizer.fit(unlabelled(constant, constant[:3]), client=False)

        assert normalization.scalings.scale.tolist() == [1.0]
        assert normalization.scalings.shift == np.float64(np.float32(0.1))
        scaled, _ = normalization((constant, None))
        assert scaled.ravel().tolist() == pytest.approx([value] * 5)

    def test_deviations_up_to_epsilon_count_as_constant(self):
        x = np.array([[0.0, 0.0], [1.0, 1.1]])

        assert fitted(x, epsilon=0.5).scalings.scale.tolist() == pytest.approx(
            [1.0, 0.55]
        )

    @pytest.mark.parametrize(
        ("x", "only", "scaled"),
        [
            ({"a": X, "ab": X * np.nan, "c": (X, X)}, ("a", "c"), "a c[0] c[1]"),
            ((X, X * np.nan, X), (0, 2), "0 2"),
        ],
    )
    def test_only_the_chosen_inputs_are_scaled_and_labels_are_not(
        self, x, only, scaled
    ):
        y = np.arange(30)
        normalization = Standardize(only=only).fit(Parts((x, y), (x, y)), client=False)

        out, labels = normalization((x, y))

        assert labels is y
        names = {"a": lambda t: t["a"], "c[0]": lambda t: t["c"][0]}
        names |= {"c[1]": lambda t: t["c"][1], 0: lambda t: t[0], 2: lambda t: t[2]}
        for name in scaled.split():
            leaf = names[int(name) if name.isdigit() else name]
            assert leaf(out).mean(0) == pytest.approx(0, abs=1e-6)
        left = (lambda t: t["ab"]) if "a" in only else (lambda t: t[1])
        assert left(out) is left(x)

    @pytest.mark.parametrize(
        "x", [{"image": X}, (X,), X], ids=["dict", "tuple", "array"]
    )
    def test_a_key_that_x_does_not_have_is_refused(self, x):
        with pytest.raises(OptionError, match="only must hold keys of x, got 'imge' "):
            fitted(x, only=("imge",))

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (
                lambda: Standardize(per="row"),
                "per must be one of 'feature', 'channel', 'all', got 'row'",
            ),
            (lambda: MinMax(per="row"), "per must be one of"),
            (lambda: Standardize(only="image"), r"for one key use \('image',\)"),
            (lambda: Standardize(epsilon=-1.0), "must be finite and >= 0, got -1"),
            (lambda: Standardize(epsilon=np.nan), "epsilon must be finite"),
            (lambda: MinMax(1, 1), "low < high, got 1 and 1"),
            (lambda: MinMax(0, np.inf), "low and high must be finite"),
        ],
    )
    def test_options_outside_their_range_are_refused(self, make, message):
        with pytest.raises(OptionError, match=message):
            make()


class TestScaling:
    @pytest.mark.parametrize(
        "dtype",
        ["uint8", "int16", "int64", "bfloat16", "float16", "float32", "float64"],
    )
    def test_makes_float32_tensors_of_any_dtype(self, dtype):
        values = torch.tensor([[10, 20], [14, 30]], dtype=getattr(torch, dtype))

        scaled, _ = Normalization(TWO)((values, None))

        assert scaled.dtype == torch.float32
        torch.testing.assert_close(scaled, torch.tensor([[1.0, 1.0], [3.0, 3.0]]))
        assert values.tolist() == [[10, 20], [14, 30]]

    @pytest.mark.parametrize("dtype", [">f8", "uint16", "uint8", "float32", "bool"])
    def test_makes_float32_arrays_of_arrays_that_are_read_only(self, dtype):
        values = np.array([[0, 1]], dtype)
        values.flags.writeable = False

        scaled, _ = Normalization(TWO)((values, None))

        assert isinstance(scaled, np.ndarray)
        assert scaled.dtype == np.float32
        np.testing.assert_allclose(scaled, [[-4.0, -2.8]], rtol=1e-6)

    @pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
    def test_loses_no_digits_by_a_large_shift(self, dtype):
        values = (1e7 + np.arange(8).reshape(8, 1)).astype(dtype)  # exact in float32
        normalization = Normalization(Scaling(np.array([1e7 + 3.3]), np.array([0.7])))

        scaled, _ = normalization((torch.from_numpy(values), None))

        exact = (np.arange(8).reshape(8, 1) - 3.3) / 0.7
        np.testing.assert_allclose(scaled.numpy(), exact, rtol=3e-7)
        assert normalization.inverse(
            torch.tensor([[3.0]], dtype=torch.float64)
        ).item() == (pytest.approx(1e7 + 3.3 + 2.1, abs=1e-8))

    def test_scales_channels_of_images_of_any_size(self):
        shift, scale = np.array([[[1.0]], [[2.0]]]), np.array([[[1.0]], [[4.0]]])
        image = torch.full((1, 2, 3, 5), 6.0)

        scaled, _ = Normalization(Scaling(shift, scale))((image, None))

        assert scaled.shape == image.shape
        assert scaled[0, :, 0, 0].tolist() == [5.0, 1.0]

    @pytest.mark.parametrize("shape", [(3, 1), (3, 3), (3,), (3, 2, 2), (3, 1, 2)])
    @pytest.mark.parametrize(
        "function",
        [
            lambda normalization, x: normalization.transform((x, None)),
            Normalization.inverse,
        ],
        ids=["transform", "inverse"],
    )
    def test_refuses_rows_of_another_shape_or_structure(self, function, shape):
        with pytest.raises(DataError, match=r"of shape .* cannot be scaled by \(2,\)"):
            function(Normalization(TWO), torch.zeros(shape))
        message = r"fitted on x like {'a': \., 3: \(\., \.\)}, got {'a': \.}"
        with pytest.raises(DataError, match=message):
            function(FITTED, {"a": torch.zeros(1, 1)})

    @pytest.mark.parametrize("kind", [torch.from_numpy, np.asarray])
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_is_undone_by_its_inverse(self, kind, dtype):
        values = kind(np.array([[3.0, -7.5], [0.25, 1e3]], dtype))
        normalization = Normalization(TWO)

        back = normalization.inverse(normalization((values, None))[0])

        assert type(back) is type(values)
        np.testing.assert_allclose(np.asarray(back), np.asarray(values), rtol=1e-5)

    def test_changes_nothing_but_the_fitted_arrays_of_x(self):
        word, label = torch.tensor([7]), torch.tensor([1])
        x = {3: (torch.tensor([[0.1, 1 / 3]]), word), "a": torch.tensor([[5]])}

        scaled, y = FITTED((x, label))

        assert list(scaled) == [3, "a"]  # the order of a dict does not matter
        assert scaled["a"].tolist() == [[2.0]]
        assert scaled[3][0].ravel().tolist() == pytest.approx([-1.0, -1.0])
        assert scaled[3][1] is word
        assert y is label
        assert FITTED.inverse(scaled)["a"].tolist() == [[5.0]]

    def test_has_numbers_of_its_own_that_cannot_be_changed(self):
        shift = np.array([10.0, 20.0])
        scaling = Scaling(shift, np.array([2.0, 5.0]), 1.0)
        shift[0] = 0

        for each in (scaling, pickle.loads(pickle.dumps(scaling))):
            assert each == TWO
            assert hash(each) == hash(TWO)
            with pytest.raises(ValueError, match="read-only"):
                each.scale[0] = 3

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_leaves_a_tensor_on_its_device(self):
        scaled, _ = Normalization(TWO)((torch.zeros(1, 2, device="cuda"), None))

        assert scaled.device.type == "cuda"


class TestAsJson:
    def test_is_equal_to_the_last_digit_also_after_pickling(self):
        text = json.dumps(FITTED.to_dict(), allow_nan=False)

        assert Normalization.from_dict(json.loads(text)) == FITTED
        assert pickle.loads(pickle.dumps(FITTED)) == FITTED

    @pytest.mark.parametrize(
        "scaling",
        [
            Scaling(np.array([10.0, 21.0]), np.array([2.0, 5.0]), 1.0),
            Scaling(np.array([10.0, 20.0]), np.array([2.0, 6.0]), 1.0),
            Scaling(np.array([10.0, 20.0]), np.array([2.0, 5.0]), 0.0),
            None,
        ],
        ids=["shift", "scale", "offset", "none"],
    )
    def test_other_numbers_are_not_equal(self, scaling):
        assert Normalization(scaling) != Normalization(TWO)

    @pytest.mark.parametrize(
        "plain",
        [
            {},
            None,
            {"x": None},
            *(
                {"x": scalings, "columns": {}}
                for scalings in ({"shift": [1.0]}, {"tuple": 3}, ["shift"])
            ),
        ],
        ids=str,
    )
    def test_another_dict_is_refused(self, plain):
        with pytest.raises(OptionError, match=r"not what Normalization.to_dict\(\) re"):
            Normalization.from_dict(plain)
