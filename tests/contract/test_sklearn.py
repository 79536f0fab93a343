"""Trainers as estimators, in scikit-learn's tools."""

import pickle

import dask.array as da
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from torch import nn

from daskdl.errors import DataError
from daskdl.sklearn import Classifier, Regressor

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(120, 3))
NAMES = np.array(["ant", "bee", "cat"])[X.argmax(1)]
SUMS = X @ [1.0, 2.0, 3.0]
fast = {"client": False, "lr": 0.2, "epochs": 6}
ESTIMATORS = [Classifier(**fast), Regressor(**fast | {"epochs": 12})]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_it_is_an_estimator(estimator):
    # Of sparse data only the refusal is checked.
    weights = "check_sample_weight_equivalence_on_dense_data"
    expected = {weights: "float32, and batches of other rows: alike to 6 digits"}
    results = check_estimator(estimator, on_skip=None, expected_failed_checks=expected)

    others = {r["check_name"] for r in results if r["status"] != "passed"}
    assert others <= {weights, "check_array_api_input"}  # the latter needs a variable


@pytest.mark.parametrize(
    ("estimator", "y"), [(ESTIMATORS[0], NAMES), (ESTIMATORS[1], SUMS)]
)
class TestTools:
    def test_cross_validation_in_a_pipeline(self, estimator, y):
        scores = cross_val_score(make_pipeline(StandardScaler(), estimator), X, y, cv=3)

        assert scores.min() > 0.7

    def test_a_search_over_its_parameters(self, estimator, y):
        search = GridSearchCV(estimator, {"lr": [1e-9, 0.1]}, cv=3).fit(X, y)

        assert search.best_params_ == {"lr": 0.1}
        assert search.predict(X).shape == y.shape

    def test_it_is_pickled_when_fitted(self, estimator, y):
        fitted = clone(estimator).fit(X, y)

        again = pickle.loads(pickle.dumps(fitted))

        np.testing.assert_array_equal(again.predict(X), fitted.predict(X))

    def test_rows_without_weight_are_not_learned(self, estimator, y):
        half = np.arange(len(y)) < len(y) // 2
        wrong = np.where(half, y, np.roll(y, 1))
        weighted, unweighted = clone(estimator), clone(estimator)

        weighted.fit(X, wrong, sample_weight=half)
        unweighted.fit(X, wrong)

        assert weighted.score(X, y) > unweighted.score(X, y)


class TestClassifier:
    @pytest.mark.parametrize(
        "model", [lambda: nn.Linear(3, 1), nn.Linear], ids=["fixed", "sized"]
    )
    def test_a_binary_loss_has_one_output(self, model):
        y = np.where(SUMS > 0, "up", "down")
        classifier = Classifier(model, loss=nn.BCEWithLogitsLoss(), **fast).fit(X, y)

        chances = classifier.predict_proba(X)

        assert [*classifier.classes_] == ["down", "up"]
        np.testing.assert_allclose(chances.sum(axis=1), 1, rtol=1e-6)
        assert classifier.score(X, y) > 0.9
        with pytest.raises(DataError, match="takes two classes, got 3; use CrossEnt"):
            classifier.fit(X, NAMES)

    def test_options_reach_trainer_and_fit(self):
        classifier = Classifier(
            **fast | {"epochs": 2},
            trainer_options={"clip_grad_norm": 1.0},
            fit_options={"shuffle": False, "validation": (X, X.argmax(1))},
        )

        classifier.fit(X.astype("float32"), NAMES)

        assert classifier.trainer_.clip_grad_norm == 1.0
        assert len(classifier.trainer_.history_.column("val_accuracy")) == 2

    def test_lazy_data_are_refused(self):
        with pytest.raises(DataError, match=r"in memory, got a Array.*daskdl.Trainer"):
            Classifier(**fast).fit(da.from_array(X), NAMES)


def test_clones_share_a_client_that_cannot_be_copied():
    class Client:
        def __deepcopy__(self, memo):
            raise TypeError("cannot be copied")

    regressor = Regressor(client=Client(), lr=0.5)

    again = clone(regressor)

    assert again.client is regressor.client
    assert again.get_params() == regressor.get_params()


@pytest.mark.parametrize("columns", [1, 2])
def test_a_regressor_has_as_many_outputs_as_columns(columns):
    y = np.stack([SUMS, -SUMS], 1)[:, :columns]

    regressor = Regressor(**fast | {"epochs": 12}).fit(X, y)

    assert regressor.predict(X).shape == y.shape
    assert regressor.score(X, y) > 0.9
