"""The loss of each example, and which are the worst, with every worker doing a part."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from distributed import Client
from torch import Tensor

from daskdl.config import check_count
from daskdl.data import batching
from daskdl.data.collections import Collections, is_bag, is_lazy
from daskdl.data.datasets.iterable_style import sharded
from daskdl.data.frames.columns import is_frame
from daskdl.data.futures import workers_of
from daskdl.data.passes import each_part
from daskdl.data.source import Source
from daskdl.data.sources import source_of
from daskdl.errors import OptionError
from daskdl.lazy_outputs import lazy_outputs
from daskdl.outputs.examples import Examples
from daskdl.per_example.keyed import Keyed, apart, keyed
from daskdl.per_example.keys import Place
from daskdl.per_example.parts import NOTHING, PartScores, WorstOfPart
from daskdl.per_example.rehearsal import Given, Scores, known_source, prepared
from daskdl.per_example.worst import Found, WorstExamples, worst_of

logger = logging.getLogger(__name__)


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
        >>> from daskdl.data.options import ReadOptions
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
        rows_of = source_of(X, None, how.read.source(None, labelled=False))
        rows_of.first = source.first
        source = rows_of
    if keys is not None:
        keys.check(source)
    known = prepared(source, how, here=client is False, wrong_only=wrong_only)
    finding = WorstOfPart(*known, top, wrong_only)
    rows: dict[int, int] = {}
    worst: list[Found] = []
    for part, left in each_part(_spread(source, client), finding, client, send=True):
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
    return source if client is False else sharded(source, len(workers_of(client)))


def _all_scores(
    source: Source, own: PartScores, client: Client | Literal[False]
) -> np.ndarray:
    """In order; where rows of a known number could not be read, NaN."""
    spread = _spread(source, client)
    scores = dict(each_part(spread, own, client, send=True))
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
    has_keys = source.reading.keyed if isinstance(source, Examples) else given.key
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
