"""What a model is worth on data: as a whole, and by example."""

from collections.abc import Callable
from typing import Any

from daskdl.cluster import check_outlives
from daskdl.data.batches import Transform
from daskdl.data.checks import check_same_classes
from daskdl.data.collections import is_lazy
from daskdl.data.formats.loaders import Loader
from daskdl.data.options import OnBad, ReadOptions, one_of
from daskdl.data.sources import source_of
from daskdl.metrics.evaluation import Evaluation
from daskdl.metrics.wanted import Wanted
from daskdl.objective import OwnStep, objective_of
from daskdl.per_example.rehearsal import Given, Scores
from daskdl.per_example.scores import score_examples, worst_examples
from daskdl.per_example.weight_decay import penalty_of
from daskdl.per_example.worst import WorstExamples
from daskdl.sites import site_of
from daskdl.trained.base import HasModel


class Measuring(HasModel):
    """Measures its model."""

    def evaluate(
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
        check_same_classes(source, getattr(self, "classes_", None))
        with site_of(self.client) as site:
            return site.evaluate(self._fitted(), objective, source, read, wanted)

    def score_examples(
        self,
        data: Any,
        labels: Any = None,
        *,
        key: Any = None,
        regularization: bool = False,
        batch_size: int = 64,
        transform: Transform | None = None,
        loader: Loader | Callable[..., Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
        on_bad_batch: OnBad = "raise",
    ) -> Any:
        """Compute the loss of each example, that of a batch which has only it.

        Args:
            data: Inputs, of the kinds that :meth:`fit` takes.
            labels: Likewise.
            key: Names the scores. The name of a column of a table, which is then no
                input; a sequence with a value for each row of data in memory, of a
                dataset or of files; a `dask.array` of one axis where the data are one.
                For a bag, whether it is of pairs (key, example), as `keyed` of
                :meth:`predict`. None: they come without.
            regularization: Add what weight decay, and regularisers of a Keras model,
                stand for: the same number for each.
            batch_size: Rows per forward pass.
            transform: See :meth:`fit`, as those that follow.
            loader: For files.
            collate_fn: For datasets.
            on_bad_batch: What to do about parts that cannot be read. With ``"skip"``
                their scores are NaN where the number of rows is known, else left out.

        Returns:
            One float64 number per example, in order: a tensor of tensors, a series of
            pandas, and of all else in memory a numpy array; of Dask's collections a
            lazy `dask.array`, series, bag, or list of Delayed. With keys a series
            indexed by them, or a bag of pairs (key, score).

        Raises:
            OptionError: If an option does not go with the data, or if the optimizer's
                weight decay is no term of the loss, as AdamW's.
        """
        both = one_of(transform, self.transform)
        read = ReadOptions(batch_size, both, loader, collate_fn, on_bad_batch)
        model = self._fitted()
        penalty = penalty_of(model, self.optimizer_) if regularization else 0.0
        if is_lazy(data):
            check_outlives(self.client)
        names = getattr(self, "classes_", None)
        objective = objective_of(self.loss, self.step)
        how = Scores(model, objective, read, penalty, names)
        with site_of(self.client) as site:
            return score_examples(Given(data, labels, key), how, site.client)

    def errors(
        self,
        data: Any,
        labels: Any = None,
        *,
        top: int = 50,
        wrong_only: bool = False,
        key: Any = None,
        batch_size: int = 64,
        transform: Transform | None = None,
        loader: Loader | Callable[..., Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
        on_bad_batch: OnBad = "raise",
    ) -> WorstExamples:
        """Find the examples with the largest losses, and where they came from.

        Args:
            data: Inputs, of the kinds that :meth:`fit` takes.
            labels: Likewise.
            top: How many to return, >= 1; no process keeps more of a part.
            wrong_only: Leave out those that were predicted right; for labels that are
                one class index for each row.
            key: See :meth:`score_examples`.
            batch_size: Rows per forward pass.
            transform: See :meth:`fit`, as those that follow.
            loader: For files.
            collate_fn: For datasets.
            on_bad_batch: What to do about parts that cannot be read.

        Returns:
            The worst first; a loss that is NaN is the worst. Of equal ones the first
            in the data comes first. Rows of which the loss ignores all labels are
            passed over.

        Raises:
            OptionError: If an option does not go with the data.
        """
        both = one_of(transform, self.transform)
        read = ReadOptions(batch_size, both, loader, collate_fn, on_bad_batch)
        names = getattr(self, "classes_", None)
        how = Scores(
            self._fitted(), objective_of(self.loss, self.step), read, classes=names
        )
        with site_of(self.client) as site:
            return worst_examples(
                Given(data, labels, key),
                how,
                site.client,
                top=top,
                wrong_only=wrong_only,
            )
