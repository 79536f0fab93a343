import json
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from daskdl.data.normalize import MinMax, Normalization, Standardize
from daskdl.errors import OptionError
from tests.support.sources import Parts, unlabelled

RNG = np.random.default_rng(0)
X = RNG.normal(5, 3, (30, 4))
CUT = (X[:7], X[7:20], X[20:])
PIXELS = RNG.integers(0, 256, (9, 3, 4, 4), dtype=np.uint8)


def test_standardised_data_has_mean_0_and_deviation_1():
    fitted = Standardize().fit(unlabelled(*CUT), client=False)

    np.testing.assert_allclose(fitted.scalings.shift, X.mean(0), rtol=1e-14)
    np.testing.assert_allclose(fitted.scalings.scale, X.std(0), rtol=1e-14)
    scaled, _ = fitted((torch.from_numpy(X), None))
    np.testing.assert_allclose(
        scaled, ((X - X.mean(0)) / X.std(0)).astype(np.float32), rtol=1e-6
    )


def test_a_dataset_need_not_have_labels():
    dataset = TensorDataset(torch.from_numpy(X))

    fitted = Standardize().fit(dataset, client=False)

    np.testing.assert_allclose(fitted.scalings.shift, X.mean(0), rtol=1e-14)


def test_min_max_takes_the_lowest_and_the_highest_to_its_ends():
    fitted = MinMax(-1, 3).fit(unlabelled(*CUT), client=False)

    scaled, _ = fitted((X, None))

    assert scaled.min(0).tolist() == [-1.0] * 4
    assert scaled.max(0).tolist() == [3.0] * 4


@pytest.mark.parametrize(
    ("normalizer", "value"), [(Standardize(), 0.0), (MinMax(0.5, 1.0), 0.5)]
)
def test_what_is_constant_is_divided_by_one(normalizer, value):
    constant = np.full((5, 1), 0.1, np.float32)

    fitted = normalizer.fit(unlabelled(constant, constant), client=False)

    assert fitted.scalings.scale.tolist() == [1.0]
    assert fitted((constant, None))[0].ravel().tolist() == pytest.approx([value] * 5)


def test_up_to_epsilon_counts_as_constant():
    X = np.array([[0.0, 0.0], [1.0, 1.1]])

    fitted = Standardize(epsilon=0.5).fit(unlabelled(X), client=False)

    assert fitted.scalings.scale.tolist() == pytest.approx([1.0, 0.55])


def test_images_of_bytes_are_scaled_by_channel():
    fitted = Standardize(per="channel").fit(unlabelled(PIXELS), client=False)

    scaled, _ = fitted((PIXELS, None))

    np.testing.assert_allclose(scaled.mean((0, 2, 3)), [0] * 3, atol=1e-6)
    np.testing.assert_allclose(scaled.std((0, 2, 3)), [1] * 3, rtol=1e-5)


def test_only_some_inputs_are_scaled_and_labels_are_not():
    source = Parts(({"image": PIXELS, "word": np.arange(9)}, np.arange(9)))
    normalizer = MinMax(only=("image",), per="all")

    fitted = normalizer.fit(source, client=False)

    x, y = fitted(source.load(0))
    assert x["image"].max() == 1.0
    assert x["word"].tolist() == y.tolist() == list(range(9))


def test_a_normalizer_is_not_changed_by_fitting():
    normalizer = Standardize()

    one, two = (normalizer.fit(unlabelled(x), client=False) for x in (X, X + 1))

    assert normalizer == Standardize()
    assert one != two
    with pytest.raises(FrozenInstanceError):
        normalizer.epsilon = 1.0


@pytest.mark.parametrize("normalizer", [Standardize(), MinMax(-1, 1, per="all")])
def test_what_was_fitted_can_be_written_down(normalizer):
    fitted = normalizer.fit(unlabelled(*CUT), client=False)

    assert Normalization.from_dict(json.loads(json.dumps(fitted.to_dict()))) == fitted


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Standardize(per="row"), "per must be one of"),
        (lambda: Standardize(only="image"), r"for one key use \('image',\)"),
        (lambda: Standardize(epsilon=-1.0), "epsilon must be finite and >= 0, got -1"),
        (lambda: Standardize(epsilon=np.nan), "epsilon must be finite"),
        (lambda: MinMax(1, 1), "low < high, got 1 and 1"),
        (lambda: MinMax(0, np.inf), "low and high must be finite"),
        (lambda: MinMax(per="row"), "per must be one of"),
    ],
)
def test_options_outside_of_what_is_allowed_are_refused(make, message):
    with pytest.raises(OptionError, match=message):
        make()
