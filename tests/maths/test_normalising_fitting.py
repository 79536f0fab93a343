import itertools
from typing import NamedTuple

import numpy as np
import pytest

from daskdl.data import batching, normalize
from daskdl.data.normalize import statistics_of_all
from daskdl.errors import DataError, OptionError
from tests.support.sources import Parts, Streamed, unlabelled

X = np.random.default_rng(0).normal(5, 3, (20, 2))
CUT = (X[:3], X[3:4], X[4:11], X[11:])


class Pair(NamedTuple):
    left: object
    right: object


def found(source, only=None, per="feature"):
    return statistics_of_all(source, per, only, False)


def numbers(statistics):
    return [
        statistics.count,
        statistics.mean.tolist(),
        statistics.rest.tolist(),
        statistics.squares.tolist(),
        statistics.low.tolist(),
        statistics.high.tolist(),
    ]


@pytest.mark.parametrize("kind", [Parts, Streamed])
def test_all_rows_of_all_parts_count(kind):
    own = found(unlabelled(*CUT, kind=kind))

    assert own.count == 20
    np.testing.assert_allclose(own.mean, X.mean(0), rtol=1e-14)
    np.testing.assert_allclose(own.deviation, X.std(0), rtol=1e-14)


def test_the_order_in_which_parts_come_makes_no_difference(monkeypatch):
    source = unlabelled(*CUT)
    results = []

    for order in itertools.permutations(range(4)):

        def each(source, function, client, order=order):
            for part in order:
                yield part, function(source, part)

        monkeypatch.setattr(normalize, "map_parts", each)
        results.append(numbers(found(source)))

    assert all(result == results[0] for result in results)


def test_parts_without_rows_are_passed_over():
    own = found(unlabelled(X[:0], X[:5], X[:0], X[5:]))

    assert own.count == 20


def test_no_rows_at_all_are_refused():
    with pytest.raises(DataError, match="X has no rows to fit a normalizer on"):
        found(unlabelled(X[:0]))


def test_each_array_of_a_tree_has_statistics_of_its_own():
    tree = {"a": X, "b": Pair(X[:, 0], X * 2)}

    own = found(unlabelled(tree))

    assert own["a"].mean.tolist() == pytest.approx(X.mean(0))
    assert isinstance(own["b"], Pair)
    assert own["b"].left.mean == pytest.approx(X[:, 0].mean())
    assert own["b"].right.mean.tolist() == pytest.approx(2 * X.mean(0))


@pytest.mark.parametrize(
    ("tree", "only", "places"),
    [
        ({"a": X, "ab": X, "c": (X, X)}, ("a", "c"), [True, False, True, True]),
        ((X, X, X), (0, 2), [True, False, True]),
    ],
)
def test_only_the_keys_asked_for_count(tree, only, places):
    own = found(unlabelled(tree, tree), only)

    assert [leaf is not None for leaf in batching.leaves(own)] == places


@pytest.mark.parametrize("x", [{"image": X}, (X,), X], ids=["dict", "tuple", "array"])
def test_a_key_that_x_does_not_have_is_refused(x):
    with pytest.raises(OptionError, match="only must hold keys of x, got 'imge' for x"):
        found(unlabelled(x), ("imge",))


def test_nan_is_refused_with_the_part_and_its_place():
    wrong = X.copy()
    wrong[3, 1] = np.nan

    with pytest.raises(DataError, match=r"^box 1: x\['a'\]\[3, 1\] is nan; a normali"):
        found(unlabelled({"a": X}, {"a": wrong}))


def test_nan_in_a_stream_is_counted_from_where_its_rows_begin():
    wrong = X.copy()
    wrong[5, 1] = np.nan

    message = r"^box 0, its rows counted from 4: x\[1, 1\] is nan"
    with pytest.raises(DataError, match=message):
        found(unlabelled(wrong, kind=Streamed))


def test_nan_in_what_is_left_out_does_not_matter():
    own = found(unlabelled({"a": X, "b": X * np.nan}), ("a",))

    assert own["b"] is None


def test_rows_of_another_shape_are_refused_with_the_part():
    with pytest.raises(DataError, match=r"^box 1 has rows of shape \(1,\), those befo"):
        found(unlabelled(X, X[:, :1]))


def test_images_of_several_sizes_share_their_channels():
    large, small = np.full((2, 3, 4, 4), 1.0), np.full((8, 3, 2, 2), 3.0)

    own = found(unlabelled(large, small), per="channel")

    assert own.count == 64
    assert own.mean.ravel().tolist() == [2.0] * 3


def test_parts_of_another_structure_are_refused_with_the_part():
    with pytest.raises(
        DataError, match=r"^x of box 1 is like \., those before are like {'a': \.}$"
    ):
        found(unlabelled({"a": X}, X))
