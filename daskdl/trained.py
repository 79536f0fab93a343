"""What a trainer does with its trained model: evaluate, predict."""

import os
from collections.abc import Callable, Mapping
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
from daskdl.inference.options import OutputOptions, Postprocess
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

    def predict(  # noqa: PLR0913 - by name, as those of `fit`
        self,
        X: Any,
        *,
        batch_size: int = 64,
        output: str | os.PathLike[str] = "same",
        postprocess: Postprocess | None = None,
        keyed: bool | None = None,
        transform: Transform | None = None,
        loader: Loader | Callable[..., Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Apply `model_(x)` to every row, on the cluster or in this process.

        Args:
            X: Inputs, of the kinds that :meth:`fit` takes; labels that come with them
                are passed over. In a bag, and in a list of Delayed objects that are
                lists of examples, these may be pairs (key, x), and of any shapes.
            batch_size: Rows per forward pass.
            output: ``"same"``: what came in comes out. Or a folder, as a URL of fsspec
                or a path, that the workers write to, part by part: Parquet for a
                `dask.dataframe`, else safetensors. A run that was interrupted goes on
                with the parts that are missing when it is begun again.
            postprocess: Of the outputs of each batch, tensors, in tuples or dicts if
                the model returns such; returns tensors with the same rows, or such of
                them. It runs on the worker.
            keyed: Whether the examples of bags and lists are pairs (key, x); None: they
                are if the first begins with text, bytes, a UUID or a date, or with a
                whole number or a tuple of these before arrays.
            transform: See :meth:`fit`, as those that follow; y is None for it.
            loader: For files.
            collate_fn: For datasets.
            storage_options: Of the file system of `output`, for fsspec.

        Returns:
            The outputs in order. Of Dask's collections, lazy ones of the same kind, in
            the same partitions and with the same keys or index; a tensor of tensors,
            and of all else a numpy array. Where the outputs are tuples or dicts, such
            of these; but of a `dask.dataframe`, a dict of outputs with one number for
            each row is one dataframe with these columns. Its columns are `classes_`
            where there are as many outputs. With a folder, :class:`Predictions`.

        Raises:
            OptionError: If it would be lazy, and no cluster is there to compute it; or
                if the folder has predictions of another model, data or options.
        """
        names = getattr(self, "classes_", None)
        wanted = OutputOptions(output, postprocess, keyed, storage_options, names)
        both = one_of(transform, self.transform)
        read = ReadOptions(batch_size, both, loader, collate_fn)
        if is_lazy(X) and not wanted.writes:
            check_outlives(self.client)
        with site_of(self.client) as site:
            return site.predict(self._fitted(), X, read, wanted)

    def _objective(self) -> Objective | None:
        objective: Objective = objective_of(self.loss, self.step)
        return objective

    def _fitted(self) -> nn.Module:
        if not hasattr(self, "model_"):
            raise OptionError("the trainer has no model_ yet; call fit first")
        return self.model_
