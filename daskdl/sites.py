"""Where a trainer's work is done: on a Dask cluster, or in this process.

What follows from the choice is here, and in the two kinds of
:class:`~daskdl.training.stage.Stage` and :class:`~daskdl.training.stores.Store`.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

from distributed import Client
from torch import nn
from typing_extensions import override

from daskdl import evaluation, inference
from daskdl.cluster import client_of
from daskdl.data.pieces import place
from daskdl.data.sources import source_of
from daskdl.objective import Objective
from daskdl.training.cluster_stage import ClusterStage, Limits
from daskdl.training.local_stage import LocalStage
from daskdl.training.seats import most_replicas, replicas_here, seats_of
from daskdl.training.stage import Stage
from daskdl.training.task import TaskOptions

RELAY_BYTES = 8 * 2**20  # for each replica

Phases = Mapping[str, tuple[Any, Any]]  # X and y, by "train" and "validation"


class Site(ABC):
    """Does what a trainer is asked for."""

    @abstractmethod
    def stage(
        self, options: TaskOptions, phases: Phases
    ) -> AbstractContextManager[Stage]:
        """Prepare a run: choose its replicas, and put the data where they are."""

    @abstractmethod
    def evaluate(
        self, model: nn.Module, loss: Objective, X: Any, y: Any, batch_size: int
    ) -> dict[str, float]:
        """See :func:`daskdl.evaluation.evaluate`."""

    @abstractmethod
    def predict(self, model: nn.Module, X: Any, batch_size: int) -> Any:
        """See :func:`daskdl.inference.predict`."""


class Cluster(Site):
    """The workers of a Dask cluster.

    Args:
        client: A synchronous client.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    @override
    @contextlib.contextmanager
    def stage(self, options: TaskOptions, phases: Phases) -> Iterator[Stage]:
        examples, rows = len(phases["train"][0]), options.step_rows
        seats = seats_of(options.master, self._client, examples, rows)
        with contextlib.ExitStack() as stack:
            pieces = {
                phase: stack.enter_context(
                    place(
                        *own,
                        self._client,
                        sorted(set(seats.values())),
                        batch_size=options.piece_rows(phase),
                        replicas=len(seats),
                        shuffle_seed=options.shuffle_seed,
                    )
                )
                for phase, own in phases.items()
            }
            limits = Limits(RELAY_BYTES, most_replicas(examples, rows))
            yield ClusterStage(self._client, options, seats, pieces, limits)

    @override
    def evaluate(
        self, model: nn.Module, loss: Objective, X: Any, y: Any, batch_size: int
    ) -> dict[str, float]:
        return evaluation.evaluate(
            model, loss, X, y, self._client, batch_size=batch_size
        )

    @override
    def predict(self, model: nn.Module, X: Any, batch_size: int) -> Any:
        return inference.predict(model, X, self._client, batch_size=batch_size)


class Process(Site):
    """This process alone: replicas are threads."""

    @override
    @contextlib.contextmanager
    def stage(self, options: TaskOptions, phases: Phases) -> Iterator[Stage]:
        examples, rows = len(phases["train"][0]), options.step_rows
        replicas = replicas_here(options.master, examples, rows)
        seed = options.shuffle_seed
        sources = {
            phase: source_of(*own, options.piece_rows(phase), replicas, seed)
            for phase, own in phases.items()
        }
        yield LocalStage(options, replicas, sources)

    @override
    def evaluate(
        self, model: nn.Module, loss: Objective, X: Any, y: Any, batch_size: int
    ) -> dict[str, float]:
        return evaluation.evaluate_here(model, loss, X, y, batch_size=batch_size)

    @override
    def predict(self, model: nn.Module, X: Any, batch_size: int) -> Any:
        return inference.predict_here(model, X, batch_size=batch_size)


@contextlib.contextmanager
def site_of(client: Client | Literal[False] | None) -> Iterator[Site]:
    """Yield where to work; see :func:`daskdl.cluster.client_of`.

    Args:
        client: False: in this process.
    """
    if client is False:
        yield Process()
        return
    with client_of(client) as found:
        yield Cluster(found)
