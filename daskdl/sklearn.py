"""Estimators for scikit-learn's tools: `cross_val_score`, `Pipeline`, `GridSearchCV`.

Each fit trains a new :class:`daskdl.Trainer` on arrays in memory. This module needs the
extra `sklearn`.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

import numpy as np
import torch
from distributed import Client, Future
from torch import nn

from daskdl.errors import DataError, OptionError
from daskdl.keras.compiled import resolved_loss
from daskdl.losses import labels_and_scale
from daskdl.objective import Loss
from daskdl.trainer import Trainer

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import Tags
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
except ImportError as error:
    raise OptionError(
        f"daskdl.sklearn needs scikit-learn 1.6 or later, which cannot be imported "
        f"here: {error}; install it with pip install 'daskdl[sklearn]'"
    ) from error

__all__ = ["Classifier", "Regressor"]


class _Estimator(BaseEstimator):  # type: ignore[misc]
    def __init__(
        self,
        model: nn.Module | Callable[..., nn.Module] = nn.Linear,
        *,
        loss: Loss | None = None,
        optimizer: Any = torch.optim.Adam,
        lr: float | None = None,
        epochs: int = 10,
        batch_size: int = 32,
        client: Client | Literal[False] | None = None,
        random_state: int = 0,
        dtype: Any = "float32",
        trainer_options: Mapping[str, Any] | None = None,
        fit_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.loss = loss
        self.optimizer = optimizer
        self.lr = lr
        self.epochs = epochs
        self.batch_size = batch_size
        self.client = client
        self.random_state = random_state
        self.dtype = dtype
        self.trainer_options = trainer_options
        self.fit_options = fit_options

    def __sklearn_clone__(self) -> Self:
        """Clone as scikit-learn does, but share the client, which cannot be copied."""
        client, self.client = self.client, None
        try:
            clone: Self = super().__sklearn_clone__()
        finally:
            self.client = client
        clone.client = client
        return clone

    def _inputs(self, X: Any, **options: Any) -> Any:
        """Return validated inputs; with `y`, inputs and labels."""
        example = X[0] if isinstance(X, list) and X else X
        if isinstance(example, Future) or hasattr(type(example), "__dask_graph__"):
            raise DataError(
                f"X must be in memory, got a {type(X).__name__}, which scikit-learn "
                "would compute; use daskdl.Trainer for lazy data"
            )
        dtype = "numeric" if self.dtype is None else self.dtype
        return validate_data(self, X, dtype=dtype, allow_nd=True, **options)

    def _fit(
        self, X: Any, y: Any, sample_weight: Any, loss: Loss, outputs: int
    ) -> Self:
        model = self.model
        if _is_sized(model):
            model = functools.partial(model, int(np.prod(X.shape[1:])), outputs)
        self.trainer_ = Trainer(
            model,
            loss=loss,
            optimizer=self.optimizer,
            lr=self.lr,
            client=self.client,
            seed=self.random_state,
            **self.trainer_options or {},
        )
        self.trainer_.fit(
            X,
            y,
            sample_weight=sample_weight,
            epochs=self.epochs,
            batch_size=self.batch_size,
            **self.fit_options or {},
        )
        return self


def _is_sized(model: Any) -> bool:
    """Whether a function takes the numbers of features and outputs."""
    if isinstance(model, nn.Module) or not callable(model):
        return False
    parameters = inspect.signature(model).parameters.values()
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    return sum(p.default is p.empty and p.kind in positional for p in parameters) == 2


class Classifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """Classify with a PyTorch model that gives one score for each class.

    Args:
        model: An `nn.Module`, or a function that returns one. A function of two
            required arguments, such as `torch.nn.Linear`, gets the numbers of features
            and of classes.
        loss: See :class:`daskdl.Trainer`; None: `CrossEntropyLoss`. A binary loss gets
            labels (B, 1), and the model has one output.
        optimizer: See :class:`daskdl.Trainer`.
        lr: See :class:`daskdl.Trainer`.
        epochs: Passes over the data in each fit.
        batch_size: Rows per batch of each replica.
        client: See :class:`daskdl.Trainer`; clones share it.
        random_state: Seed of the trainer.
        dtype: numpy dtype to which X is converted; None: that of X.
        trainer_options: Other arguments of :class:`daskdl.Trainer`.
        fit_options: Other arguments of :meth:`daskdl.Trainer.fit`.

    Attributes:
        classes_: The labels, sorted, in the order of the scores.
        trainer_: The trainer of the last fit, with `model_` and `history_`.
        n_features_in_: Number of features.

    Raises:
        DataError: If `fit` gets an X that is not in memory, or more classes than the
            loss takes.

    Example:
        >>> X, y = np.array([[-1.0], [1.0]] * 20), ["no", "yes"] * 20
        >>> Classifier(lr=0.1, client=False).fit(X, y).predict([[-2.0], [2.0]])
        array(['no', 'yes'], dtype='<U3')
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train a new model.

        Args:
            X: Inputs in memory.
            y: One label of any type for each row.
            sample_weight: Weight of each row in the loss, >= 0, see
                :meth:`daskdl.Trainer.fit`.
        """
        X, y = self._inputs(X, y=y, reset=True)
        check_classification_targets(y)
        y = column_or_1d(y, warn=True)
        self.classes_, indices = np.unique(y, return_inverse=True)
        loss = nn.CrossEntropyLoss() if self.loss is None else resolved_loss(self.loss)
        outputs = len(self.classes_)
        if labels_and_scale(loss)[0] == "binary":
            if outputs != 2:
                raise DataError(
                    f"loss {loss!r} takes two classes, got {outputs}; use "
                    "CrossEntropyLoss"
                )
            labels = indices.astype("float32")[:, None]
            return self._fit(X, labels, sample_weight, loss, 1)
        return self._fit(X, indices, sample_weight, loss, outputs)

    def predict_proba(self, X: Any) -> Any:
        """Return the probability of each class, shape (n, classes)."""
        check_is_fitted(self)
        return self.trainer_.predict_proba(self._inputs(X, reset=False))

    def predict(self, X: Any) -> Any:
        """Return the most probable label of each row."""
        chosen = self.predict_proba(X).argmax(axis=1)
        return self.classes_[chosen]


class Regressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """Predict one or several numbers per row with a PyTorch model.

    Args:
        model: See :class:`Classifier`; a function gets the numbers of features and of
            columns of y. The model's outputs are (B, columns), even for one column.
        loss: See :class:`daskdl.Trainer`; None: `MSELoss`.
        optimizer: See :class:`Classifier`.
        lr: See :class:`Classifier`.
        epochs: See :class:`Classifier`.
        batch_size: See :class:`Classifier`.
        client: See :class:`Classifier`.
        random_state: See :class:`Classifier`.
        dtype: See :class:`Classifier`.
        trainer_options: See :class:`Classifier`.
        fit_options: See :class:`Classifier`.

    Attributes:
        trainer_: The trainer of the last fit, with `model_` and `history_`.
        n_features_in_: Number of features.

    Raises:
        DataError: If `fit` gets an X that is not in memory.

    Example:
        >>> X = np.linspace(-1, 1, 40)[:, None]
        >>> regressor = Regressor(lr=0.1, epochs=40, client=False)
        >>> round(regressor.fit(X, 2 * X[:, 0]).score(X, 2 * X[:, 0]), 1)
        1.0
    """

    def __sklearn_tags__(self) -> "Tags":
        """Declare that y may have several columns."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train a new model.

        Args:
            X: Inputs in memory.
            y: Numbers, (n,) or (n, outputs).
            sample_weight: Weight of each row in the loss, >= 0, see
                :meth:`daskdl.Trainer.fit`.
        """
        X, y = self._inputs(X, y=y, multi_output=True, y_numeric=True, reset=True)
        self._is_flat = y.ndim == 1
        columns = y.reshape(len(y), -1).astype("float32")
        loss = nn.MSELoss() if self.loss is None else self.loss
        return self._fit(X, columns, sample_weight, loss, columns.shape[1])

    def predict(self, X: Any) -> Any:
        """Return the outputs of the model, float64, in the shape of y."""
        check_is_fitted(self)
        outputs = self.trainer_.predict(self._inputs(X, reset=False)).astype("float64")
        return outputs[:, 0] if self._is_flat else outputs
