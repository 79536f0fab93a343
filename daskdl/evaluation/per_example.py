"""What a classifier has guessed for each example of a batch. No Dask, no state.

Only of labels that are one class index for each row: of others there is no one guess.

What names the examples beside their row numbers: a column, a list, or a bag's own.

How they are taken off the data is in :mod:`daskdl.evaluation.per_example`.

Keys of examples, taken off the data before these are scored.

The loss of each example of a batch: what a batch that has only it would have.

No Dask, no state. The losses of torch that are known to take each row by itself are
computed for all rows at once. Any other is called row by row: whether it looks at more
than one row cannot be seen from outside.

The term of the loss that an optimizer's weight decay stands for. No Dask.

Scores rows one by one, wherever they are. No Dask.

What a batch comes to, and how parts are gone through on a cluster, is below.

The worst examples of a data set: which they are, and where they came from. No Dask.

An example is worse than another if its loss is larger, and worst if it is NaN; of
equal losses the one that comes first in the data is the worse one. That is a total
order, so the worst of some parts' worst are the worst of all, whoever comes first.

Parts of data scored example by example, wherever they are; all here pickles.

What is to be scored example by example, and whether model and loss fit it.

The loss of each example, and which are the worst, with every worker doing a part.
"""

import copy
import functools
import heapq
import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, overload

import dask
import numpy as np
import torch
from dask.delayed import delayed
from distributed import Client
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.optim import Optimizer
from typing_extensions import override

from daskdl.config import check_count
from daskdl.data import batching
from daskdl.data import source as sources
from daskdl.data.batching import (
    Batch,
    Rows,
    Transform,
    Tree,
    auto_device,
    batches,
    floating_dtype,
    rows_in,
    to_device,
    whole,
)
from daskdl.data.checks import (
    UNREADABLE,
    USER_ERRORS,
    LabelCheck,
    check_loss,
    check_module,
    check_same_classes,
    dry_run,
    ignored_label,
    is_classification,
    is_left_out,
    preserved_random_state,
)
from daskdl.data.dask_collections import (
    Collections,
    is_bag,
    is_dask_frame,
    is_lazy,
    is_lazy_list,
)
from daskdl.data.distribute import map_parts, workers_of
from daskdl.data.inputs import ReadOptions, infer_metadata, source_of
from daskdl.data.source import SHOWN_ROWS, Source, rows_of_part
from daskdl.data.tables import as_numpy, is_dask_array, is_frame
from daskdl.data.torch_datasets import split_stream
from daskdl.errors import DataError, ModelError, OptionError
from daskdl.inference.lazy import Examples, lazy_outputs, with_first_rows
from daskdl.keras.module import CrossEntropyOfProbabilities
from daskdl.objective import Loss, Objective, OwnStep, Penalised, batch_loss, on_device
from daskdl.serialization import Packed, PackedModel, copied

logger = logging.getLogger(__name__)


class Guesses(NamedTuple):
    """For each row, on the CPU."""

    labels: Tensor  # int64
    predicted: Tensor  # int64, the class with the largest output
    probabilities: Tensor | None  # float64, of the label; None: not known of this loss


def guesses_of(loss: Any, output: Any, y: Tree) -> Guesses | None:
    """Tell what a model has guessed.

    Args:
        loss: Says what the outputs are: of `CrossEntropyLoss` logits, of `NLLLoss`
            logarithms of probabilities.
        output: Of the model; None if it is not known.
        y: The labels.

    Returns:
        None unless the labels are one class index for each row. A label that is
        ignored has the probability NaN.

    Example:
        >>> output = torch.tensor([[0.25, 0.75]]).log()
        >>> guesses_of(nn.NLLLoss(), output, torch.tensor([0]))
        Guesses(labels=tensor([0]), predicted=tensor([1]), \
probabilities=tensor([0.2500], dtype=torch.float64))
    """
    if not is_classification(output, y) or y.ndim != 1:
        return None
    predicted = output.argmax(dim=1)
    chances = _chances(loss, output)
    if chances is not None:
        chances = _of_labels(chances, y).cpu()
    return Guesses(y.cpu(), predicted.cpu(), chances)


def ignored(loss: Any, y: Tree) -> Tensor | None:
    """Which rows have nothing but labels that a loss passes over; None: it has none.

    Example:
        >>> ignored(nn.CrossEntropyLoss(ignore_index=9), torch.tensor([[9, 9], [0, 9]]))
        tensor([ True, False])
    """
    label = ignored_label(loss)
    if label is None or not isinstance(y, Tensor) or y.is_floating_point():
        return None
    return (y == label).reshape(len(y), -1).all(dim=1).cpu()


def _chances(loss: Any, output: Tensor) -> Tensor | None:
    """Probabilities of the classes, if the loss says what its outputs are."""
    function = loss.func if isinstance(loss, functools.partial) else loss
    if isinstance(loss, nn.CrossEntropyLoss) or function is functional.cross_entropy:
        return output.double().softmax(dim=1)
    if isinstance(loss, CrossEntropyOfProbabilities):
        return output.double()
    if type(loss) is nn.NLLLoss or function is functional.nll_loss:
        return output.double().exp()
    return None


def _of_labels(chances: Tensor, y: Tensor) -> Tensor:
    known = (y >= 0) & (y < chances.shape[1])
    picked = chances.gather(1, y.where(known, 0)[:, None])[:, 0]
    return picked.where(known, torch.nan)


class Place(NamedTuple):
    """Where an example is."""

    part: int
    row: int
    number: int  # among the rows of all parts


class Keys(ABC):
    """One for each example."""

    def check(self, source: Source) -> None:  # noqa: B027 - most are seen to go along
        """Refuse data that these cannot be the keys of.

        Raises:
            DataError: If there are more or fewer of them than rows.
        """

    @abstractmethod
    def with_scores(self, scores: Any) -> Any:
        """What `score_examples` returns.

        Args:
            scores: Of all examples, as they would be returned without keys.
        """

    @abstractmethod
    def of(self, places: Sequence[Place], client: Client | Literal[False]) -> list[Any]:
        """The keys of some examples."""

    def check_count(self, rows: int) -> None:  # noqa: B027 - most are cut alike
        """Refuse another number of rows than there are keys.

        Args:
            rows: That have been gone through.

        Raises:
            DataError: With both numbers.
        """


class Listed(Keys):
    """In memory.

    Args:
        values: In the order of the examples.
        name: Of them together, or None.
    """

    def __init__(self, values: Sequence[Any], name: str | None = None) -> None:
        self._values = values
        self._name = name

    @override
    def check(self, source: Source) -> None:
        if source.sequential:
            raise OptionError(
                "key must be None for data that are gone through from the beginning: "
                "their rows come from several shards at a time, in no order"
            )
        rows = sources.rows_in(source)
        if rows is not None:
            self.check_count(rows)

    @override
    def check_count(self, rows: int) -> None:
        if rows != len(self._values):
            raise DataError(
                f"key must have one value for each row, got {len(self._values)} for "
                f"{rows} rows"
            )

    @override
    def with_scores(self, scores: Any) -> Any:
        pandas = _pandas()
        self.check_count(len(scores))
        index = pandas.Index(list(self._values), name=self._name, tupleize_cols=False)
        return pandas.Series(np.asarray(scores), index=index, name="score")

    @override
    def of(self, places: Sequence[Place], client: Client | Literal[False]) -> list[Any]:
        return [self._values[place.number] for place in places]


class Lazy(Keys):
    """A column of a ``dask.dataframe``, a ``dask.array`` or a bag, cut as the data are.

    Args:
        values: That. Scores of a bag have their keys already.
    """

    def __init__(self, values: Any) -> None:
        self._values = values

    @override
    def with_scores(self, scores: Any) -> Any:
        import dask.dataframe

        pandas = _pandas()
        parts = [_parts(own) for own in (scores, self._values)]
        make = delayed(_series, pure=False)
        meta = self._values._meta
        name = getattr(meta, "name", None)
        index = pandas.Index([], dtype=meta.dtype, name=name)
        return dask.dataframe.from_delayed(
            [make(*pair, name) for pair in zip(*parts, strict=True)],
            meta=pandas.Series([], index, dtype=np.float64, name="score"),
            verify_meta=False,
        )

    @override
    def of(self, places: Sequence[Place], client: Client | Literal[False]) -> list[Any]:
        return _fetched(_parts(self._values), places, client)


def _fetched(
    parts: Sequence[Any], places: Sequence[Place], client: Client | Literal[False]
) -> list[Any]:
    """Keys of some rows; the parts that these are in are computed, once each."""
    rows: dict[int, list[int]] = {}
    for place in places:
        rows.setdefault(place.part, []).append(place.row)
    take = delayed(_take, pure=False)
    tasks = [take(parts[part], own) for part, own in rows.items()]
    if client is False:
        taken = dask.compute(*tasks, scheduler="synchronous")
    else:
        taken = client.gather(client.compute(tasks))
    found = {
        (part, row): value
        for (part, own), values in zip(rows.items(), taken, strict=True)
        for row, value in zip(own, values, strict=True)
    }
    return [found[place.part, place.row] for place in places]


def _parts(collection: Any) -> list[Any]:
    return list(np.ravel(collection.to_delayed()))


def _take(values: Any, rows: list[int]) -> list[Any]:
    """Keys of some rows of a part, as objects of Python where they are numbers."""
    values = values if hasattr(values, "tolist") else list(values)
    if max(rows) >= len(values):
        raise DataError(
            f"key has {len(values)} values in a part that had at least {max(rows) + 1} "
            "rows; it must be cut as the data are, and be the same each time"
        )
    if hasattr(values, "iloc"):
        return list(values.iloc[rows].tolist())
    if isinstance(values, np.ndarray):
        return list(values[rows].tolist())
    return [values[row] for row in rows]


def _series(scores: Any, keys: Any, name: Any) -> Any:
    pandas = _pandas()
    index = pandas.Index(keys, name=name, tupleize_cols=False)
    return pandas.Series(np.asarray(scores), index, name="score")


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise OptionError(
            "scores by key are a pandas.Series; pip install daskdl[dataframe]"
        ) from error
    return pandas


class Keyed(NamedTuple):
    """Data without their keys, and the keys."""

    X: Any
    keys: Keys | None


def keyed(X: Any, key: Any) -> Keyed:
    """Take the keys off some data.

    Args:
        X: The data.
        key: None; the name of a column of X; a sequence, or for a ``dask.array`` one,
            with a value per row. Of a bag, whether it has pairs (key, example): these
            stay in it.

    Raises:
        OptionError: If such a key does not go with such data.

    Example:
        >>> keyed(np.zeros((2, 3)), "id")
        Traceback (most recent call last):
        daskdl.errors.OptionError: key='id' must name a column of a table, and X is a \
ndarray; give one value for each row
    """
    if key is None:
        return Keyed(X, None)
    if isinstance(key, bool):
        _check_bag(X, key)
        return Keyed(X, None)
    if isinstance(key, str):
        return _of_column(X, key)
    if is_dask_array(key):
        return Keyed(X, Lazy(_cut_alike(X, key)))
    if is_lazy(X):
        raise OptionError(
            "key must be lazy where X is: the name of a column, a dask.array of one "
            f"axis, or True for a bag of pairs (key, example); got a {_kind(key)}"
        )
    return Keyed(X, Listed(_values(key)))


def apart(bag: Any) -> Keyed:
    """A bag of pairs (key, example) as a bag of examples, and the keys."""
    return Keyed(bag.map(_second), Lazy(bag.map(_first)))


def _check_bag(X: Any, key: bool) -> None:
    if not is_bag(X):
        raise OptionError(
            f"key={key} says whether a bag has pairs (key, example), and X is a "
            f"{_kind(X)}"
        )


def _of_column(X: Any, key: str) -> Keyed:
    pandas_frame = is_frame(X) and hasattr(X, "iloc")
    if not (is_dask_frame(X) or pandas_frame) or X.ndim != 2:
        raise OptionError(
            f"key={key!r} must name a column of a table, and X is a {_kind(X)}; give "
            "one value for each row"
        )
    if key not in X.columns:
        raise OptionError(
            f"key={key!r} must name a column of X, which has {list(X.columns)}"
        )
    column, others = X[key], X.drop(columns=[key])
    keys = Lazy(column) if is_dask_frame(X) else Listed(column.tolist(), key)
    return Keyed(others, keys)


def _cut_alike(X: Any, key: Any) -> Any:
    """A ``dask.array`` of keys in the blocks of the first array of X."""
    first = batching.leaves(X)[0] if isinstance(X, tuple | dict) else X
    if not is_dask_array(first) or key.ndim != 1:
        raise OptionError(
            "key must be a dask.array of one axis only where X is a dask.array, got "
            f"{key.ndim} axes for a {_kind(first)}"
        )
    if not np.isnan([*first.chunks[0], *key.chunks[0]]).any():
        if len(first) != len(key):
            raise DataError(
                f"key must have one value for each row, got {len(key)} for "
                f"{len(first)} rows"
            )
        return key.rechunk({0: first.chunks[0]})
    if key.numblocks[0] != first.numblocks[0]:
        raise DataError(
            "key must have the blocks of X where their lengths are not known, got "
            f"{key.numblocks[0]} for {first.numblocks[0]}"
        )
    return key


def _values(key: Any) -> Sequence[Any]:
    if isinstance(key, Tensor):
        key = as_numpy(key)
    if np.ndim(key) != 1 and not isinstance(key, list | tuple):
        raise OptionError(
            "key must be the name of a column, or have one value for each row along "
            f"one axis, got a {_kind(key)}"
        )
    values: Sequence[Any] = key.tolist() if hasattr(key, "tolist") else list(key)
    return values


def _first(pair: Any) -> Any:
    return pair[0]


def _second(pair: Any) -> Any:
    return pair[1]


def _kind(value: Any) -> str:
    return type(value).__name__


# The very classes, for one that is derived from them may compute anything.
_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, CrossEntropyOfProbabilities)
_OF_LIKE_SHAPES = (
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.CrossEntropyLoss,  # of probabilities of classes
    nn.HingeEmbeddingLoss,
    nn.HuberLoss,
    nn.KLDivLoss,
    nn.L1Loss,
    nn.MSELoss,
    nn.MultiLabelMarginLoss,
    nn.MultiLabelSoftMarginLoss,
    nn.PoissonNLLLoss,
    nn.SmoothL1Loss,
    nn.SoftMarginLoss,
)


class Losses(NamedTuple):
    """What a model did on each example of a batch."""

    losses: Tensor  # float64, on the CPU, one per row
    output: Any  # of the whole batch; None if the model was called row by row


def example_losses(
    module: nn.Module, objective: Objective, batch: Batch, *, by_rows: bool
) -> Losses:
    """Compute the loss of each example.

    Args:
        module: In evaluation mode, so that no row depends on another.
        objective: A loss of outputs and labels, or a step of the user's own, which is
            called with one row at a time.
        batch: Where the module is.
        by_rows: Whether outputs have a row for each of the batch, see `has_rows`; if
            not, the model is called with one row at a time, too.

    Returns:
        Of a loss with ``reduction="sum"`` the sum within each row, else the mean there,
        weighted as the loss does; NaN for a row of which the loss ignores everything.

    Example:
        >>> batch = torch.tensor([[1.0, 3.0], [0.0, 0.0]]), torch.zeros(2, 2)
        >>> example_losses(nn.Identity(), nn.MSELoss(), batch, by_rows=True).losses
        tensor([5., 0.], dtype=torch.float64)
    """
    if isinstance(objective, OwnStep) or not by_rows:
        each = [batch_loss(objective, module, _one(batch, i)) for i in _each(batch)]
        return Losses(_plain(each), None)
    x, y = batch
    output = module(x)
    return Losses(_losses_of(objective, output, y), output)


def has_rows(module: nn.Module, x: Tree) -> bool:
    """Whether outputs have one row for each of the inputs, tried on two and on three.

    Args:
        module: In evaluation mode.
        x: Two rows.

    Example:
        >>> x = torch.zeros(2, 5)
        >>> has_rows(nn.Linear(5, 3), x), has_rows(nn.Flatten(0), x)
        (True, False)
    """
    three = batching.rows(x, [0, 1, 0])
    outputs = [module(batching.mapped(torch.clone, rows)) for rows in (x, three)]
    return all(map(_has_rows, outputs, (2, 3)))


def _has_rows(output: Any, rows: int) -> bool:
    """Mappings and tuples of other classes would not be the same when they are cut."""
    if isinstance(output, tuple | dict):
        inner = list(output.values() if isinstance(output, dict) else output)
        plain = type(output) in (tuple, dict) or hasattr(output, "_fields")
        return plain and bool(inner) and all(_has_rows(leaf, rows) for leaf in inner)
    return isinstance(output, Tensor) and output.ndim > 0 and len(output) == rows


def _losses_of(loss: Loss, output: Any, y: Tree) -> Tensor:
    together = _together(loss, output, y)
    if together is not None:
        return together.double().cpu()
    return _plain(
        [loss(_row(output, i), _row(y, i)) for i in range(batching.length(y))]
    )


def _together(loss: Any, output: Any, y: Any) -> Tensor | None:
    """The losses of all rows at once; None where that may be something else."""
    if not (isinstance(output, Tensor) and isinstance(y, Tensor)):
        return None
    if type(loss) in _OF_CLASSES and is_classification(output, y):
        values = _within_rows(_unreduced(loss, output, y))
        total = values.sum(1)
        if loss.reduction == "sum":
            return total
        return total / _within_rows(_weights(loss, y, values.dtype)).sum(1)
    if type(loss) is nn.MultiMarginLoss and output.ndim == 2 and y.ndim == 1:
        return _unreduced(loss, output, y)
    if type(loss) in _OF_LIKE_SHAPES and output.shape == y.shape:
        if not all(_same_for_rows(tensor, output) for tensor in loss.buffers()):
            return None
        values = _unreduced(loss, output, y)
        if values.ndim == 0:  # the rows of one axis were taken for classes
            return None
        values = _within_rows(values)
        return values.mean(1) if loss.reduction == "mean" else values.sum(1)
    return None


def _unreduced(loss: Any, output: Tensor, y: Tensor) -> Tensor:
    each = copy.copy(loss)  # threads share it
    each.reduction = "none"
    values: Tensor = each(output, y)
    return values


def _within_rows(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1)


def _weights(loss: Any, y: Tensor, dtype: torch.dtype) -> Tensor:
    """What each label counts in a mean."""
    counted: Tensor = y != loss.ignore_index
    if loss.weight is None:
        return counted.to(dtype)
    weights: Tensor = loss.weight[y.where(counted, 0)] * counted
    return weights


def _same_for_rows(weight: Tensor, output: Tensor) -> bool:
    """Whether a weight is stretched along the rows, or else is one for each row."""
    return weight.numel() == 1 or weight.ndim < output.ndim


def _plain(losses: list[Tensor]) -> Tensor:
    together = torch.stack([loss.detach().reshape(()) for loss in losses])
    return together.double().cpu()


def _each(batch: Batch) -> range:
    return range(rows_in(batch))


def _one(batch: Batch, i: int) -> Batch:
    """A batch of one."""
    return batching.of_both(lambda tree: _row(tree, i), batch)


def _row(tree: Tree, i: int) -> Tree:
    return batching.rows(tree, slice(i, i + 1))


# Those that add ``weight_decay * parameter`` to the gradient, which is what a term
# ``0.5 * weight_decay * parameter ** 2`` of the loss does.
_ADD_TO_GRADIENT = (
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.SGD,
)


def penalty_of(model: nn.Module, optimizer: Optimizer) -> float:
    """What is added to the loss of each step, whatever the examples.

    Args:
        model: Of Keras it may have regularisers of its weights.
        optimizer: Of its parameters.

    Raises:
        OptionError: If the optimizer is that of another model, or see below.
    """
    own = {id(parameter) for parameter in model.parameters()}
    groups = optimizer.param_groups
    if any(id(p) not in own for group in groups for p in group["params"]):
        raise OptionError(
            "regularization=True needs the optimizer of the model, got an optimizer_ "
            "with parameters that are not those of model_"
        )
    return penalty_of_weights(optimizer) + _of_regularisers(model)


def penalty_of_weights(optimizer: Optimizer) -> float:
    """Compute ``0.5 * weight_decay`` times the sum of squares, over all groups.

    Args:
        optimizer: Of the model; its parameters are read only.

    Raises:
        OptionError: If it decays the weights in another way than by the gradient, as
            AdamW does: that is no term of any loss.

    Example:
        >>> import torch
        >>> weights = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> penalty_of_weights(torch.optim.SGD([weights], weight_decay=0.5))
        6.25
    """
    total = 0.0
    for group in optimizer.param_groups:
        decay = float(group.get("weight_decay", 0))
        if not decay:
            continue
        decoupled = group.get("decoupled_weight_decay", False)
        if decoupled or not isinstance(optimizer, _ADD_TO_GRADIENT):
            raise OptionError(
                "regularization=True needs an optimizer whose weight decay is a term "
                f"of the loss, such as SGD's or Adam's, got {type(optimizer).__name__} "
                f"with weight_decay={decay:g}, which is taken off the weights apart "
                "from the gradient; use regularization=False"
            )
        squares = [p.detach().double().square().sum().item() for p in group["params"]]
        total += 0.5 * decay * sum(squares)
    return total


def _of_regularisers(model: nn.Module) -> float:
    """Of the weights: on a copy that has not looked at any rows."""
    fresh = copied(model)
    if not isinstance(fresh, Penalised):
        return 0.0
    with torch.no_grad():
        penalty = fresh.penalty()
    return 0.0 if penalty is None else penalty.item()


class Guessed(NamedTuple):
    """As `daskdl.evaluation.per_example.Guesses`, in numpy's arrays."""

    labels: np.ndarray
    predicted: np.ndarray
    probabilities: np.ndarray | None


class Scored(NamedTuple):
    """What a model did on each of some rows."""

    scores: np.ndarray  # float64
    ignored: np.ndarray  # bool, whether the loss passes over all labels of a row
    guessed: Guessed | None  # None: there is no one class index for each row


@dataclass(frozen=True)
class ExampleScorer:
    """Scores each of some rows; picklable.

    Attributes:
        model: Not changed.
        loss: What is made of its outputs, or a step.
        batch_size: Rows per forward pass, where there is one for several rows.
        transform: What is made of each batch before, or None.
        by_rows: Whether outputs have a row for each of the batch.
        penalty: Added to each score.
    """

    model: PackedModel
    loss: Packed[Objective]
    batch_size: int
    transform: Transform | None
    by_rows: bool
    penalty: float

    def scored(self, rows: Rows) -> Scored:
        """Score rows, in order; there may be none.

        Raises:
            ModelError: If the transform changes how many rows there are.
        """
        device = auto_device()
        module = self.model.module(lambda copy: copy.eval().to(device))
        loss = self.loss.shared(lambda copy: on_device(copy, device))
        dtype = floating_dtype(module)
        made = [
            self._scored(
                module, loss, to_device(*self._transformed(batch), device, dtype)
            )
            for batch in batches([whole(rows)], self.batch_size)
        ]
        return joined(made)

    def _transformed(self, batch: Batch) -> Batch:
        if self.transform is None:
            return batch
        rows = rows_in(batch)
        made = self.transform(batch)
        check_rows_kept(made, rows)
        return made

    def _scored(self, module: nn.Module, loss: Objective, batch: Batch) -> Scored:
        # What a step of the user's own computes may need gradients with respect to x.
        own = isinstance(loss, OwnStep)
        with torch.no_grad() if own else torch.inference_mode():
            losses, output = example_losses(module, loss, batch, by_rows=self.by_rows)
            found = guesses_of(loss, output, batch[1])
            passed = ignored(loss, batch[1])
        return Scored(
            losses.numpy() + self.penalty,
            np.zeros(len(losses), bool) if passed is None else passed.numpy(),
            None if found is None else _guessed(found),
        )


def check_rows_kept(made: Batch, rows: int) -> None:
    """Refuse what a transform has made of a batch, if it has other rows.

    Raises:
        ModelError: With the shape that has not as many rows as there were.
    """
    for leaf in batching.named_both(made).values():
        if tuple(leaf.shape[:1]) != (rows,):
            raise ModelError(
                "transform must return as many rows as it gets, so that each has a "
                f"score, got the shape {tuple(leaf.shape)} for {rows} rows"
            )


def joined(scored: Sequence[Scored]) -> Scored:
    """One after the other.

    Example:
        >>> joined([])
        Scored(scores=array([], dtype=float64), ignored=array([], dtype=bool), \
guessed=None)
    """
    scores = np.concatenate([np.zeros(0), *(own.scores for own in scored)])
    passed = np.concatenate([np.zeros(0, bool), *(own.ignored for own in scored)])
    guessed = [own.guessed for own in scored if own.guessed is not None]
    if not guessed or len(guessed) < len(scored):
        return Scored(scores, passed, None)
    columns = list(zip(*guessed, strict=True))
    return Scored(scores, passed, Guessed(*map(_column, columns)))


def _column(parts: Sequence[Any]) -> Any:
    return None if any(part is None for part in parts) else np.concatenate(parts)


def _guessed(found: Guesses) -> Guessed:
    chances = found.probabilities
    return Guessed(
        found.labels.numpy(),
        found.predicted.numpy(),
        None if chances is None else chances.numpy(),
    )


COLUMNS = (
    *("loss", "label", "predicted", "probability"),
    *("part", "row", "number", "key"),
)


@dataclass(frozen=True)
class WorstExample:
    """One example, and what a model did on it.

    Attributes:
        loss: Of a batch that has only it.
        part: Where it came from: the URL of a file, or the name of a partition.
        row: Its row there, from 0.
        number: Its row in the whole data, from 0; None if they have no order.
        key: That was given for it, or None.
        label: A class index; None if the labels are no such, one for each row.
        predicted: The class with the largest output; None likewise.
        probability: Of the label; None if the loss does not say what outputs are.
        x: The row itself, arrays without the axis of rows, before any transform.
        y: Its labels, likewise, or None.
    """

    loss: float
    part: str
    row: int
    number: int | None = None
    key: Any = None
    label: int | None = None
    predicted: int | None = None
    probability: float | None = None
    x: Tree = field(default=None, repr=False, compare=False)
    y: Tree = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, repr=False)
class WorstExamples(Sequence[WorstExample]):
    """The worst examples, worst first; a sequence of `WorstExample`.

    Attributes:
        examples: All of them.
        rows: Of the data that were looked at.
        classes: Names of the labels 0, 1, ... if there are names.

    Example:
        >>> found = WorstExample(2.5, "part 0", 3, number=3, label=1, predicted=0)
        >>> print(WorstExamples((found,), rows=10))
        the worst 1 of 10 examples
              loss  label     predicted       p  where
            2.5000  1         0               -  row 3 (part 0, row 3)
    """

    examples: tuple[WorstExample, ...]
    rows: int
    classes: Sequence[str] | None = None

    @overload
    def __getitem__(self, index: int) -> WorstExample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[WorstExample]: ...
    @override
    def __getitem__(self, index: int | slice) -> WorstExample | Sequence[WorstExample]:
        return self.examples[index]

    @override
    def __len__(self) -> int:
        return len(self.examples)

    @override
    def __iter__(self) -> Iterator[WorstExample]:
        return iter(self.examples)

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame`, a row for each without x and y; needs pandas.

        Raises:
            OptionError: If pandas is missing.
        """
        try:
            import pandas
        except ImportError as error:
            raise OptionError(
                "to_pandas needs pandas; pip install daskdl[dataframe]"
            ) from error
        rows = [[getattr(one, name) for name in COLUMNS] for one in self.examples]
        return pandas.DataFrame(rows, columns=list(COLUMNS))

    @override
    def __repr__(self) -> str:
        return f"<WorstExamples: {len(self)} of {self.rows}>"

    @override
    def __str__(self) -> str:
        guessed = any(one.predicted is not None for one in self.examples)
        names = f"  {'label':8}  {'predicted':9}  {'p':>6}" if guessed else ""
        lines = [
            f"the worst {len(self)} of {self.rows} examples",
            f"{'loss':>10}{names}  where",
            *(self._line(one, guessed) for one in self.examples),
        ]
        return "\n".join(lines)

    def _line(self, one: WorstExample, guessed: bool) -> str:
        middle = ""
        if guessed:
            label, predicted = self._name(one.label), self._name(one.predicted)
            chance = "-" if one.probability is None else f"{one.probability:.4f}"
            middle = f"  {label:8}  {predicted:9}  {chance:>6}"
        where = f"{one.part}, row {one.row}"
        if one.number is not None:
            where = f"row {one.number} ({where})"
        key = "" if one.key is None else f", key {one.key!r}"
        return f"{one.loss:10.4f}{middle}  {where}{key}"

    def _name(self, number: int | None) -> str:
        if number is None:
            return "-"
        known = self.classes is not None and 0 <= number < len(self.classes)
        return str(self.classes[number]) if self.classes and known else str(number)


class Found(NamedTuple):
    """An example in the order of the data."""

    part: int
    example: WorstExample


def worst_of(found: Iterable[Found], top: int) -> list[Found]:
    """The so many worst ones, worst first.

    Example:
        >>> losses = [1.0, math.nan, 3.0, 3.0]
        >>> found = [Found(0, WorstExample(x, "", i)) for i, x in enumerate(losses)]
        >>> [one.example.row for one in worst_of(found, 3)]
        [1, 2, 3]
    """
    return heapq.nsmallest(top, found, key=_rank)


def _rank(found: Found) -> tuple[bool, float, int, int]:
    """Smaller is worse."""
    loss = found.example.loss
    finite = not math.isnan(loss)
    return finite, -loss if finite else 0.0, found.part, found.example.row


def worst_rows(scored: Scored, top: int, wrong_only: bool) -> np.ndarray:
    """Which of some rows are the worst.

    Args:
        scored: Of the rows; those that the loss ignores are passed over.
        top: At most so many.
        wrong_only: Leave out what was predicted right, where that is known.
    """
    chosen = ~scored.ignored
    if wrong_only and scored.guessed is not None:
        chosen &= scored.guessed.predicted != scored.guessed.labels
    rows = np.flatnonzero(chosen)
    scores = scored.scores[rows]
    missing = np.isnan(scores)
    order = np.lexsort((rows, -np.where(missing, 0, scores), ~missing))
    return rows[order[:top]]


def example_of(
    row: int, where: tuple[str, int], scored: Scored, rows: Rows
) -> WorstExample:
    """One of some rows as a record of its own, with copies of what is in it.

    Args:
        row: Its number among these rows.
        where: The name of the part, and its row there.
        scored: Of all these rows.
        rows: That were loaded.
    """

    def copied(tree: Tree) -> Tree:
        return batching.mapped(lambda leaf: np.array(leaf[row]), tree)

    x, y = batching.of_both(copied, rows)
    loss = float(scored.scores[row])
    guess = _guess(scored.guessed, row)
    return WorstExample(loss, *where, **guess, x=x, y=y)


def _guess(guessed: Guessed | None, row: int) -> dict[str, Any]:
    if guessed is None:
        return {}
    chances = guessed.probabilities
    return {
        "label": int(guessed.labels[row]),
        "predicted": int(guessed.predicted[row]),
        "probability": None if chances is None else float(chances[row]),
    }


NOTHING = np.zeros(0)  # scores of no rows


@dataclass(frozen=True)
class Reading:
    """How parts come to be scored.

    Attributes:
        labels: What labels are held to; None: they are not looked at.
        skips: Whether what cannot be read is left out.
    """

    labels: LabelCheck | None
    skips: bool

    def rows(self, source: Source, part: int, rows: int) -> Iterator[Rows]:
        """Yield a part, bit by bit where it cannot be had otherwise.

        Raises:
            DataError: If it has a label that the loss does not accept. What loading
                it raises comes out.
        """
        try:
            for some in rows_of_part(source, part, rows):
                if self.labels is not None:
                    self.labels.check(some[1], source.name(part))
                yield some
        except UNREADABLE as error:
            if not is_left_out(error, source.name(part), self.skips):
                raise


@dataclass(frozen=True)
class PartScores:
    """Scores one part.

    Attributes:
        scorer: Scores its rows.
        reading: How it comes.
    """

    scorer: ExampleScorer
    reading: Reading

    def __call__(self, source: Source, part: int) -> np.ndarray:
        """The score of each of its rows, float64."""
        some = self.reading.rows(source, part, self.scorer.batch_size)
        return self.of_rows(some)

    def of_rows(self, some: Iterator[Rows]) -> np.ndarray:
        """Those of rows, one after the other."""
        return np.concatenate([NOTHING, *(self.scorer.scored(r).scores for r in some)])

    def of_lazy(self, some: Iterator[Rows]) -> np.ndarray:
        """Those of rows that somebody else has loaded; their labels are looked at.

        Raises:
            DataError: If the loss does not accept one.
        """
        return self.of_rows(map(self._checked, some))

    def _checked(self, rows: Rows) -> Rows:
        if self.reading.labels is not None:
            self.reading.labels.check(rows[1])
        return rows


class PartWorst(NamedTuple):
    """What is left of a part."""

    rows: int  # that it has
    found: list[Found]


@dataclass(frozen=True)
class WorstOfPart:
    """Finds the worst examples of one part.

    Attributes:
        scorer: Scores them.
        reading: How parts come.
        top: How many are kept, of each part too.
        wrong_only: Whether those that were predicted right are left out.
    """

    scorer: ExampleScorer
    reading: Reading
    top: int
    wrong_only: bool

    def __call__(self, source: Source, part: int) -> PartWorst:
        """Those of a part, worst first."""
        count, found = 0, list[Found]()
        name = source.name(part)
        for rows in self.reading.rows(source, part, self.scorer.batch_size):
            scored = self.scorer.scored(rows)
            more = [
                Found(
                    part, example_of(int(row), (name, count + int(row)), scored, rows)
                )
                for row in worst_rows(scored, self.top, self.wrong_only)
            ]
            found = worst_of([*found, *more], self.top)
            count += len(scored.scores)
        return PartWorst(count, found)


class Given(NamedTuple):
    """Data to be scored, as the user gave them."""

    X: Any
    y: Any = None
    key: Any = None


class Scores(NamedTuple):
    """How they are scored."""

    model: nn.Module  # not changed, whatever mode it is in
    objective: Objective
    read: ReadOptions
    penalty: float = 0.0  # added to each score
    classes: Sequence[str] | None = None  # names of labels that the model knows


def known_source(given: Given, how: Scores, client: Client | Literal[False]) -> Source:
    """The data, of which enough is known to begin; of bags and lists `Examples`."""
    check_module(how.model)
    check_loss(how.objective)
    labelled = not isinstance(how.objective, OwnStep)
    source = source_of(given.X, given.y, how.read, labelled=labelled)
    check_same_classes(source, how.classes)
    if how.read.skips:
        return infer_metadata(source, client, skips=True)
    if is_bag(given.X) or is_lazy_list(given.X):
        source = Examples(given.X, given.key)
    return with_first_rows(source, client)


def prepared(
    source: Source, how: Scores, *, here: bool, wrong_only: bool = False
) -> tuple[ExampleScorer, Reading]:
    """Rehearse on two rows, so that what does not fit is found here.

    Args:
        source: Of which some rows are known.
        how: With which model, and how they are read.
        here: It is all done in this process.
        wrong_only: Whether it has to be known what is wrong.
    """
    transform = how.read.transform
    own = isinstance(how.objective, OwnStep)
    packed = PackedModel(how.model, here=here)
    loss = Packed(how.objective, "step" if own else "loss")
    with preserved_random_state():
        module = packed.unpack()
        run = dry_run(module, source.first, transform, how.objective)
        if run.labels is not None:
            run.labels.check_source(source)
        check_rows_kept(run.batch, SHOWN_ROWS)
        by_rows = _rehearse(module, loss.unpack(), run.batch, wrong_only)
    scorer = ExampleScorer(
        packed, loss, how.read.batch_size, transform, by_rows, how.penalty
    )
    return scorer, Reading(run.labels, how.read.skips)


def _rehearse(
    module: nn.Module, loss: Objective, batch: Batch, wrong_only: bool
) -> bool:
    """Whether outputs have a row for each of the inputs.

    Raises:
        ModelError: If the loss cannot be had of one row.
        OptionError: If it is not known what is wrong.
    """
    own = isinstance(loss, OwnStep)
    try:
        with torch.no_grad():
            by_rows = not own and has_rows(module, batch[0])
            output = example_losses(module, loss, batch, by_rows=by_rows).output
    except USER_ERRORS as error:
        raise ModelError(
            f"{'step' if own else 'loss'} failed on a batch of one row, which is how "
            f"each example gets a score: {error}"
        ) from error
    if wrong_only and guesses_of(loss, output, batch[1]) is None:
        raise OptionError(
            "wrong_only=True needs a loss, labels that are one class index for each "
            "row, and a model that gives one output for each class"
        )
    return by_rows


def score_examples(given: Given, how: Scores, client: Client | Literal[False]) -> Any:
    """Compute the loss of each example.

    Args:
        given: Data of any kind.
        how: With which model, and how they are read.
        client: A synchronous client; False: in this process.

    Returns:
        See :meth:`daskdl.Trainer.score_examples`.

    Raises:
        DataError: If the data cannot be used.
        ModelError: If model and loss do not fit the data.
        OptionError: If an option does not go with the data.

    Example:
        >>> from torch import nn
        >>> from daskdl.data.inputs import ReadOptions
        >>> given = Given(np.array([[1.0], [3.0]]), np.zeros((2, 1)))
        >>> how = Scores(nn.Identity(), nn.MSELoss(), ReadOptions(2))
        >>> score_examples(given, how, False)
        array([1., 9.])
    """
    X, keys = keyed(given.X, given.key)
    if is_lazy(X) and how.read.skips:
        raise OptionError(
            "on_bad_batch must be 'raise' for Dask's collections, whose scores are "
            "computed later, by Dask"
        )
    source = known_source(given._replace(X=X), how, client)
    if keys is not None:
        keys.check(source)
    own = PartScores(*prepared(source, how, here=client is False and not is_lazy(X)))
    if is_lazy(X):
        assert isinstance(source, Collections)
        scores = lazy_outputs(X, source, own.of_lazy, NOTHING, client, given.y)
    else:
        scores = _like(X, _all_scores(source, own, client))
    return scores if keys is None else keys.with_scores(scores)


def worst_examples(
    given: Given,
    how: Scores,
    client: Client | Literal[False],
    *,
    top: int = 50,
    wrong_only: bool = False,
) -> WorstExamples:
    """Find the examples with the largest losses; other arguments as above.

    Args:
        given: Data of any kind.
        how: With which model, and how they are read.
        client: A synchronous client; False: in this process.
        top: How many.
        wrong_only: Leave out those that were predicted right.

    Raises:
        DataError: If the data cannot be used.
        ModelError: If model and loss do not fit the data.
        OptionError: If an option does not go with the data.
    """
    check_count("top", top)
    X, keys = _with_keys_apart(given, how, client)
    source = known_source(Given(X, given.y, False), how, client)
    if isinstance(source, Examples):  # all have one shape, and are rows of a part
        rows_of = source_of(X, None, how.read, labelled=False)
        rows_of.first = source.first
        source = rows_of
    if keys is not None:
        keys.check(source)
    known = prepared(source, how, here=client is False, wrong_only=wrong_only)
    finding = WorstOfPart(*known, top, wrong_only)
    rows: dict[int, int] = {}
    worst: list[Found] = []
    for part, left in map_parts(_spread(source, client), finding, client, send=True):
        rows[part] = left.rows
        worst = worst_of([*worst, *left.found], top)
    if keys is not None:
        keys.check_count(sum(rows.values()))
    places = _places(worst, rows, source)
    own = [None] * len(worst) if keys is None else keys.of(places, client)
    located = [
        replace(
            one.example, number=None if source.sequential else place.number, key=name
        )
        for one, place, name in zip(worst, places, own, strict=True)
    ]
    names = source.classes or how.classes
    return WorstExamples(tuple(located), sum(rows.values()), names)


def _spread(source: Source, client: Client | Literal[False]) -> Source:
    """The same data in as many shards as there are workers, if they are in shards."""
    return source if client is False else split_stream(source, len(workers_of(client)))


def _all_scores(
    source: Source, own: PartScores, client: Client | Literal[False]
) -> np.ndarray:
    """In order; where rows of a known number could not be read, NaN."""
    spread = _spread(source, client)
    scores = dict(map_parts(spread, own, client, send=True))
    unscored = [part for part in sorted(scores) if not len(scores[part])]
    if own.reading.skips and unscored:  # why, is in the logs of the workers
        logger.warning("%s parts gave nothing to score: %s", len(unscored), unscored)
    if source.lengths is not None:
        for part, rows in enumerate(source.lengths):
            missing = np.full(rows - len(scores[part]), np.nan)
            scores[part] = np.concatenate([scores[part], missing])
    return np.concatenate([NOTHING, *(scores[part] for part in sorted(scores))])


def _with_keys_apart(
    given: Given, how: Scores, client: Client | Literal[False]
) -> Keyed:
    """Data without keys; of a bag, too, whose first example says if it has such."""
    X, keys = keyed(given.X, given.key)
    if not is_bag(X):
        return Keyed(X, keys)
    source = known_source(given, how, client)
    has_keys = source.reader.keyed if isinstance(source, Examples) else given.key
    return apart(X) if has_keys else Keyed(X, None)


def _like(X: Any, scores: np.ndarray) -> Any:
    """Scores as X is: a tensor, a series of pandas, or else an array."""
    leaves = batching.leaves(X) if isinstance(X, tuple | dict) else [X]
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        return torch.from_numpy(scores)
    if is_frame(X) and hasattr(X, "index"):
        import pandas

        return pandas.Series(scores, index=X.index, name="score")
    return scores


def _places(
    found: Sequence[Found], rows: Mapping[int, int], source: Source
) -> list[Place]:
    """Where examples are, in the order of the parts."""
    lengths = source.lengths or [rows[part] for part in sorted(rows)]
    starts = [0, *itertools.accumulate(lengths)]
    return [Place(part, one.row, starts[part] + one.row) for part, one in found]
