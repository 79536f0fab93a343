"""The loss of each example.

This module decides which losses are computed for a whole batch at once, and how keys
identify examples.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from dask.base import is_dask_collection
from dask.delayed import delayed
from distributed import Client
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from daskdl.data import batching, checks, unreadable
from daskdl.data import source as sources
from daskdl.data.batching import Batch, Rows, Tree
from daskdl.data.dask_collections import Collections
from daskdl.data.inputs import ReadOptions, infer_metadata, source_of
from daskdl.data.source import SHOWN_ROWS, Pieces, Source
from daskdl.data.tables import as_numpy, is_dask_array
from daskdl.errors import DataError, ModelError, OptionError
from daskdl.evaluation.evaluate import (
    Scorer,
    map_split,
    warn_of_unscored,
    without_gradients,
)
from daskdl.inference.lazy import (
    Apply,
    lazy_outputs,
    partition_outputs,
    with_first_rows,
)
from daskdl.keras.module import CrossEntropyOfProbabilities
from daskdl.objective import Objective, OwnStep, Penalized, batch_loss, call, scored
from daskdl.observe.history import check_log_names
from daskdl.process_settings import device_name
from daskdl.serialization import Packed, PackedModel, copied
from daskdl.util import check_outlives, client_or_process


def score_examples(
    model: nn.Module,
    objective: Objective,
    X: Any,
    y: Any = None,
    *,
    read: ReadOptions,
    client: Client | Literal[False] | None,
    key: Any = None,
    device: str | torch.device = "auto",
    penalty: float = 0.0,
    classes: Sequence[str] | None = None,
) -> Any:
    """Compute the loss of each example, see :meth:`daskdl.Trainer.score_examples`."""
    checks.check_module(model)
    checks.check_loss(objective)
    inputs, column = column_apart(X, key)
    labelled = not isinstance(objective, OwnStep)
    source = source_of(inputs, y, read, labelled=labelled, classes=classes)
    keys = column or keys_of(source, key, type(X).__name__)
    if source.lazy:
        check_outlives(client)
        if read.skips:
            raise OptionError(
                "on_bad_batch must be 'raise' for Dask collections, because their "
                "scores are computed lazily"
            )
    checks.check_same_classes(source, classes)
    if keys is not None and keys.lazy and isinstance(source, Collections):
        source = source.beside(keys.values)
    with client_or_process(client) as cluster:
        if read.skips:
            source = infer_metadata(source, cluster, skips=True)
        else:
            keyed = key if isinstance(key, bool) else None
            source = with_first_rows(source, cluster, keyed)
        if keys is not None:
            keys.check(source)
        here = cluster is False and not source.lazy
        scorer = _scorer(
            model,
            objective,
            source,
            read,
            device_name(device),
            penalty=penalty,
            here=here,
        )
        if isinstance(source, Collections):
            losses = scorer.checked_losses
            if keys is not None:
                return keys.index_lazily(source, losses, cluster)
            return lazy_outputs(source, losses, np.zeros(0), cluster)
        parts = dict(map_split(source, scorer, cluster))
        warn_of_unscored(read, [part for part in parts if not len(parts[part])])
        for part, rows in enumerate(source.lengths or ()):
            unread = np.full(rows - len(parts[part]), np.nan)
            parts[part] = np.concatenate([parts[part], unread])
        in_order = (parts[part] for part in sorted(parts))
        scores = np.concatenate([np.zeros(0), *in_order])
    if keys is not None:
        return keys.index(scores)
    return _converted(scores, X) if source.in_memory else scores


def _converted(scores: np.ndarray, X: Any) -> Any:
    """Return scores as a tensor, a pandas series or an array, depending on X."""
    if all(isinstance(leaf, Tensor) for leaf in batching.leaves(X)):
        return torch.from_numpy(scores)
    if hasattr(X, "iloc"):
        import pandas

        return pandas.Series(scores, index=X.index, name="score")
    return scores


# ---- scoring


@dataclass(frozen=True)
class ExampleScorer(Scorer):
    """Scores each row of a part."""

    by_rows: bool  # see `has_rows`
    penalty: float  # added to each loss

    def __call__(self, source: Source, part: int) -> np.ndarray:
        """Return the losses of a part, float64; NaN where a file cannot be read."""
        return self._positioned_losses(self._readable(source, part))

    def checked_losses(self, blocks: Iterable[Rows]) -> np.ndarray:
        """Check the labels of blocks of rows, and return the losses, float64."""
        return self._positioned_losses(self._checked(blocks))

    def _positioned_losses(self, blocks: Iterable[tuple[int, Rows]]) -> np.ndarray:
        """Return the losses of blocks with their positions, with NaN in gaps."""
        losses, count = [np.zeros(0)], 0
        for start, rows in blocks:
            block_losses = self._losses(rows)
            losses += [np.full(start - count, np.nan), block_losses]
            count = start + len(block_losses)
        return np.concatenate(losses)

    def _checked(
        self, blocks: Iterable[Rows], name: str = ""
    ) -> Iterator[tuple[int, Rows]]:
        """Check labels, and yield each block with the position of its first row."""
        start = 0
        for rows in blocks:
            self._check(rows, name)
            yield start, rows
            start += batching.length(rows)

    def _check(self, rows: Rows, name: str) -> None:
        if self.label_check is not None:
            self.label_check.check(rows[1], name)

    def _readable(self, source: Source, part: int) -> Iterator[tuple[int, Rows]]:
        """Yield the readable rows of a part, checked, with their positions."""
        name = source.name(part)
        try:
            yield from self._checked(source.stream(part, self.batch_size), name)
        except unreadable.UNREADABLE as error:
            files = source.pieces(part) if self.skips else ()
            if not unreadable.is_left_out(error, name, self.skips, files):
                raise
            yield from self._readable_files(source, part, files)

    def _readable_files(
        self, source: Source, part: int, files: Pieces
    ) -> Iterator[tuple[int, Rows]]:
        """Yield the rows of readable files, with their positions.

        If each file is one example, unreadable files have a position too.
        """
        usable = dict(
            unreadable.consistent_pieces(
                unreadable.load_each(files, skips=True), self._check
            )
        )
        one_each = source.lengths is not None and source.lengths[part] == len(files)
        one_each &= all(batching.length(rows) == 1 for rows in usable.values())
        start = 0
        for name, _ in files:
            if name in usable:
                yield start, usable[name]
                start += batching.length(usable[name])
            elif one_each:
                start += 1

    def _losses(self, rows: Rows) -> np.ndarray:
        """Return the loss of each row, in order, float64."""
        module, objective, device = self.unpacked()
        dtype = batching.floating_dtype(module)
        losses = [np.zeros(0)]
        for batch in batching.batches([batching.all_rows(rows)], self.batch_size):
            transformed = batch
            if self.transform is not None:
                transformed = self.transform(batch)
                check_rows_kept(transformed, batching.length(batch))
            x, y = transformed
            on_device = batching.to_device(x, y, device, dtype)
            with without_gradients(objective):
                batch_losses = example_losses(
                    module, objective, on_device, by_rows=self.by_rows
                )
            losses.append(batch_losses.numpy() + self.penalty)
        return np.concatenate(losses)


def check_rows_kept(transformed: Batch, rows: int) -> None:
    """Raise a ModelError if a transform has changed the number of rows."""
    for leaf in batching.leaves_by_name(transformed).values():
        if tuple(leaf.shape[:1]) != (rows,):
            raise ModelError(
                "transform must return as many rows as it receives, because each row "
                f"has a score, got the shape {tuple(leaf.shape)} for {rows} rows"
            )


def _scorer(
    model: nn.Module,
    objective: Objective,
    source: Source,
    read: ReadOptions,
    device: str,
    *,
    here: bool,
    penalty: float = 0.0,
) -> ExampleScorer:
    """Return a scorer after a dry run on two rows."""
    kind = "step" if isinstance(objective, OwnStep) else "loss"
    packed = PackedModel(model, here=here)
    loss = Packed(objective, kind)
    with checks.preserved_random_state():
        module = packed.unpack()
        run = checks.dry_run(module, source.first_rows, read.transform, objective)
        check_log_names(run.logs)
        if run.labels is not None:
            run.labels.check_source(source)
        check_rows_kept(run.batch, SHOWN_ROWS)
        try:
            with torch.no_grad():
                by_rows = kind == "loss" and has_rows(module, run.batch[0])
                example_losses(module, loss.unpack(), run.batch, by_rows=by_rows)
        except unreadable.USER_ERRORS as error:
            raise ModelError(
                f"{kind} failed on a batch of one row, but each example is scored as "
                f"such a batch: {error}"
            ) from error
    return ExampleScorer(
        packed,
        loss,
        read.batch_size,
        read.transform,
        run.labels,
        read.skips,
        device,
        by_rows,
        penalty,
    )


def has_rows(module: nn.Module, x: Tree) -> bool:
    """Whether the output has one row per input row, tried with two and three rows.

    Args:
        module: Called twice.
        x: Inputs of two rows.
    """

    def fits(output: Any, rows: int) -> bool:
        if isinstance(output, tuple | dict):
            inner = list(output.values() if isinstance(output, dict) else output)
            # Slicing may not preserve other mappings and tuples.
            plain = type(output) in (tuple, dict) or hasattr(output, "_fields")
            return plain and bool(inner) and all(fits(leaf, rows) for leaf in inner)
        return isinstance(output, Tensor) and output.ndim > 0 and len(output) == rows

    three_rows = batching.rows(x, [0, 1, 0])
    outputs = [
        scored(call(module, batching.tree_map(torch.clone, inputs)))
        for inputs in (x, three_rows)
    ]
    return all(map(fits, outputs, (2, 3)))


# Losses of torch and Keras that are means over rows; subclasses may not be.
_CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss, CrossEntropyOfProbabilities)
_ROW_LOSSES = (
    *_CLASS_LOSSES,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.HingeEmbeddingLoss,
    nn.HuberLoss,
    nn.KLDivLoss,
    nn.L1Loss,
    nn.MSELoss,
    nn.MultiLabelMarginLoss,
    nn.MultiLabelSoftMarginLoss,
    nn.MultiMarginLoss,
    nn.PoissonNLLLoss,
    nn.SmoothL1Loss,
    nn.SoftMarginLoss,
)


def example_losses(
    module: nn.Module, objective: Objective, batch: Batch, *, by_rows: bool
) -> Tensor:
    """Return the loss of each example as a batch of one, float64 on the CPU."""
    rows = [slice(i, i + 1) for i in range(batching.length(batch))]
    if isinstance(objective, OwnStep) or not by_rows:
        examples = (batching.rows(batch, row) for row in rows)
        losses = [batch_loss(objective, module, example) for example in examples]
    else:
        x, y = batch
        output = scored(call(module, x))
        vectorized = _vectorized_losses(objective, output, y)
        if vectorized is not None:
            return vectorized.double().cpu()
        losses = [
            objective(batching.rows(output, row), batching.rows(y, row)) for row in rows
        ]
    return torch.stack([loss.detach().reshape(()) for loss in losses]).double().cpu()


def _vectorized_losses(loss: Any, output: Any, y: Any) -> Tensor | None:
    """Return the losses of all rows, or None if rows may depend on each other."""
    if type(loss) not in _ROW_LOSSES or not (
        isinstance(output, Tensor) and isinstance(y, Tensor)
    ):
        return None
    classes = checks.is_classification(output, y)
    if not classes and (
        output.shape != y.shape
        # A weight may have an axis of rows.
        or any(b.numel() > 1 and b.ndim >= output.ndim for b in loss.buffers())
    ):
        return None
    unreduced = copy.copy(loss)  # threads share the loss
    unreduced.reduction = "none"
    values: Tensor = unreduced(output, y)
    if not values.ndim:  # the loss interpreted the axis of rows as classes
        return None
    values = values.reshape(len(values), -1)
    if loss.reduction != "mean":  # "sum", or "batchmean", which divides by one row
        return values.sum(1)
    if not classes or type(loss) not in _CLASS_LOSSES:
        return values.mean(1)
    counted: Tensor = y != loss.ignore_index
    weights = counted.to(values.dtype)
    if loss.weight is not None:
        weights = loss.weight[y.where(counted, 0)] * counted
    return values.sum(1) / weights.reshape(len(values), -1).sum(1)


# Optimizers that add ``weight_decay * parameter`` to the gradient, which is the
# gradient of ``0.5 * weight_decay * parameter ** 2``.
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
    """Return the penalty of weight decay and regularizers.

    Weight decay adds ``0.5 * weight_decay * sum of squares`` for each parameter group.
    """
    parameters = {id(parameter) for parameter in model.parameters()}
    total = 0.0
    for group in optimizer.param_groups:
        if any(id(p) not in parameters for p in group["params"]):
            raise OptionError(
                "regularization=True needs the optimizer of the model, but optimizer_ "
                "has parameters that do not belong to model_"
            )
        decay = float(group.get("weight_decay", 0))
        if not decay:
            continue
        decoupled = group.get("decoupled_weight_decay", False)
        if decoupled or not isinstance(optimizer, _ADD_TO_GRADIENT):
            raise OptionError(
                "regularization=True needs an optimizer whose weight decay is a term "
                f"of the loss, such as SGD's or Adam's, got {type(optimizer).__name__} "
                f"with weight_decay={decay:g}, which is decoupled from the gradient; "
                "use regularization=False"
            )
        squares = [p.detach().double().square().sum().item() for p in group["params"]]
        total += 0.5 * decay * sum(squares)
    fresh = copied(model)  # without activity penalties of earlier rows
    if isinstance(fresh, Penalized):
        with torch.no_grad():
            penalty = fresh.penalty()
        total += 0.0 if penalty is None else penalty.item()
    return total


# ---- keys


@dataclass(frozen=True)
class Keys:
    """One key for each example."""

    values: Any  # a list in order, or a Dask collection partitioned like the data
    name: str | None = None  # of the table column that contains the keys

    def check(self, source: Source) -> None:
        """Check that data for keys in memory have an order and the same length."""
        if self.lazy:
            return
        if source.sequential:
            raise OptionError(
                "key must be None for sequential data, because the rows of several "
                "shards arrive interleaved, in no fixed order"
            )
        rows = sources.rows_in(source)
        if rows is not None:
            self.check_count(rows)

    def check_count(self, rows: float) -> None:
        """Raise a DataError if the number of rows is not that of the keys in memory."""
        if rows != len(self.values):
            raise DataError(
                f"key must have one value for each row, got {len(self.values)} for "
                f"{rows} rows"
            )

    @property
    def lazy(self) -> bool:
        """Whether the keys are a Dask collection."""
        return not isinstance(self.values, list)

    def index(self, scores: Any) -> Any:
        """Return scores as a series indexed by these keys, which are in memory."""
        _check_pandas()
        self.check_count(len(scores))
        return _series(scores, self.values, self.name)

    def index_lazily(
        self, source: Collections, losses: Apply, client: Client | Literal[False]
    ) -> Any:
        """Return a lazy series of the scores, indexed by these keys.

        The last collection of the source must be `values`.
        """
        _check_pandas()
        import dask.dataframe
        import pandas

        meta = self.values._meta
        name = getattr(meta, "name", None)
        index = pandas.Index([], dtype=meta.dtype, name=name)
        series_of_part = delayed(_series_of_part, pure=False)
        scores = partition_outputs(source, losses, client)
        values = source.partitions.delayed(client)
        return dask.dataframe.from_delayed(
            [
                series_of_part(part_scores, part_values, name)
                for part_scores, part_values in zip(scores, values, strict=True)
            ],
            meta=pandas.Series([], index, dtype=np.float64, name="score"),
            verify_meta=False,
        )


def _check_pandas() -> None:
    try:
        import pandas  # noqa: F401
    except ImportError as error:
        raise OptionError(
            "scores with keys are a pandas.Series: pip install 'daskdl[dataframe]'"
        ) from error


def column_apart(X: Any, key: Any) -> tuple[Any, Keys | None]:
    """Take the column named by `key` out of a table; leave other keys alone."""
    if not isinstance(key, str):
        return X, None
    if not hasattr(X, "iloc") or X.ndim != 2:
        raise OptionError(
            f"key={key!r} must be a column of a table, but X is a {type(X).__name__}; "
            "pass a sequence with one value for each row"
        )
    if key not in X.columns:
        raise OptionError(
            f"key={key!r} must be a column of X, which has {list(X.columns)}"
        )
    column = X[key] if is_dask_collection(X) else X[key].tolist()
    return X.drop(columns=[key]), Keys(column, key)


def keys_of(source: Source, key: Any, kind: str) -> Keys | None:
    """Return the keys in a sequence or a ``dask.array``; None if there are none.

    Keys of collections are cut like the rows.

    Args:
        source: The data without keys.
        key: The argument of `score_examples`.
        kind: Type of X, for messages.
    """
    if isinstance(key, bool) and not source.keyable:
        raise OptionError(
            f"key={key} applies only to a bag, or a list of Delayed objects and "
            f"futures; X is a {kind}"
        )
    if key is None or isinstance(key, bool):
        return None
    rows = source if isinstance(source, Collections) and not source.keyable else None
    if is_dask_array(key):
        if rows is None or key.ndim != 1:
            raise OptionError(
                "a dask.array as key must be one-dimensional and needs a dask.array or "
                f"a dataframe as X; the key has {key.ndim} axes, and X is a {kind}"
            )
        return Keys(rows.aligned(key, "key"))
    if source.lazy and rows is None:
        raise OptionError(
            f"a {kind} as X has its keys in its examples, pairs (key, example), and "
            f"key=True; got a {type(key).__name__}"
        )
    if isinstance(key, Tensor):
        key = as_numpy(key)
    if np.ndim(key) != 1 and not isinstance(key, list | tuple):
        raise OptionError(
            "key must be the name of a column, or a one-dimensional sequence with one "
            f"value for each row, got a {type(key).__name__}"
        )
    if rows is None:
        return Keys(key.tolist() if hasattr(key, "tolist") else list(key))
    values = np.asarray(key, None if hasattr(key, "dtype") else object)
    return Keys(rows.aligned(values, "key"))


def _series_of_part(outputs: Sequence[np.ndarray], values: list[Any], name: Any) -> Any:
    """Return the scores of a part as a series; the last of `values` are the keys."""
    return _series(outputs[0], values[-1], name)


def _series(scores: Any, keys: Any, name: Any) -> Any:
    import pandas

    index = pandas.Index(keys, name=name, tupleize_cols=False)
    return pandas.Series(np.asarray(scores), index, name="score")
