"""What a trainer does with its trained model: evaluate, predict."""

from collections.abc import Callable
from typing import Any, Literal

from distributed import Client
from torch import Tensor, nn

from daskdl.cluster import check_outlives
from daskdl.data.batches import Transform
from daskdl.data.collections import is_lazy
from daskdl.data.formats.loaders import Loader
from daskdl.data.options import OnBad, ReadOptions, one_of
from daskdl.data.sources import source_of
from daskdl.errors import OptionError
from daskdl.metrics.evaluation import Evaluation
from daskdl.metrics.wanted import Wanted
from daskdl.objective import Loss, Objective, OwnStep, objective_of
from daskdl.sites import site_of


class Trained:
    """Has a model, or will have; see :class:`daskdl.Trainer`, which is one.

    Attributes:
        client: Of the cluster to work on, if there is one.
        loss: Of the model, or None if there is a step.
        step: What computes the loss in its place, or None.
        transform: Of every batch, or None.
        model_: The model; not set before it is trained.
    """

    client: Client | Literal[False] | None
    loss: Loss | None
    step: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor] | None
    transform: Transform | None
    model_: nn.Module

    def evaluate(  # noqa: PLR0913 - by name, as those of `fit`
        self,
        data: Any,
        labels: Any = None,
        *,
        metrics: Any = None,
        batch_size: int = 64,
        transform: Transform | None = None,
        loader: Loader | Callable[..., Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
        on_bad_batch: OnBad = "raise",
    ) -> Evaluation:
        """Measure `model_` in one pass, on the cluster or in this process.

        What parts of the data give is merged so that it does not matter how they are
        cut; see the page on evaluation.

        Args:
            data: Inputs, or inputs and labels, of the kinds that :meth:`fit` takes as
                `X`.
            labels: As it takes them as `y`.
            metrics: What is measured beside the loss: ``"classification"``,
                ``"binary"``, ``"multilabel"``, ``"regression"``, ``"calibration"``, or
                one of their classes in `daskdl.metrics`; metrics of torchmetrics, one,
                a `MetricCollection`, or a mapping of names to them; or a sequence of
                all these. None: accuracy, if labels are class indices.
            batch_size: Rows per forward pass.
            transform: See :meth:`fit`, as those that follow.
            loader: For files.
            collate_fn: For datasets.
            on_bad_batch: What to do about parts that cannot be read.

        Returns:
            A dict of all that was measured, over all rows, which prints as a report;
            ``"loss"`` is among it, and with a `step` it is all.

        Raises:
            DataError: If the data cannot be used, or there is a label that the loss or
                a metric does not accept.
            ModelError: If the model, its outputs, or the loss cannot be.
            OptionError: If another argument cannot.
        """
        both = one_of(transform, self.transform)
        read = ReadOptions(batch_size, both, loader, collate_fn, on_bad_batch)
        objective = self._objective()
        labelled = not isinstance(objective, OwnStep)
        wanted = Wanted.of(metrics, objective, getattr(self, "classes_", None))
        source = source_of(data, labels, read.source(None, labelled))
        with site_of(self.client) as site:
            return site.evaluate(self._fitted(), objective, source, read, wanted)

    def predict(
        self,
        X: Any,
        *,
        batch_size: int = 64,
        transform: Transform | None = None,
        loader: Loader | Callable[..., Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
    ) -> Any:
        """Apply `model_(x)` to every row, on the cluster or in this process.

        Args:
            X: Inputs, of the kinds that :meth:`fit` takes; labels that come with them
                are passed over.
            batch_size: Rows per forward pass.
            transform: See :meth:`fit`, as those that follow; y is None for it.
            loader: For files.
            collate_fn: For datasets.

        Returns:
            The outputs in order. Of Dask's collections, lazy ones of the same kind; a
            tensor of tensors, and of all else a numpy array. Where the model returns
            tuples or dicts, such of these.

        Raises:
            OptionError: If it would be lazy, and no cluster is there to compute it.
        """
        both = one_of(transform, self.transform)
        read = ReadOptions(batch_size, both, loader, collate_fn)
        if is_lazy(X):
            check_outlives(self.client)
        with site_of(self.client) as site:
            return site.predict(self._fitted(), X, read)

    def _objective(self) -> Objective | None:
        objective: Objective = objective_of(self.loss, self.step)
        return objective

    def _fitted(self) -> nn.Module:
        if not hasattr(self, "model_"):
            raise OptionError("the trainer has no model_ yet; call fit first")
        return self.model_
