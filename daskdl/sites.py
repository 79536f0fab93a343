"""Where a trainer's work is done: on a Dask cluster, or in this process.

What follows from the choice is here, and in the two kinds of
:class:`~daskdl.training.stage.Stage` and :class:`~daskdl.training.stores.Store`.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from distributed import Client
from torch import nn
from typing_extensions import override

from daskdl import evaluation
from daskdl.cluster import check_installed, client_of
from daskdl.data import trees
from daskdl.data.checks import of_validation, rows_like
from daskdl.data.datasets.iterable_style import sharded
from daskdl.data.exports.options import ExportOptions
from daskdl.data.exports.temporary import temporary_batches
from daskdl.data.looking import looked_at, small_together
from daskdl.data.options import ReadOptions
from daskdl.data.source import Source, rows_in
from daskdl.data.supplies import supply_of
from daskdl.inference.options import OutputOptions
from daskdl.inference.prediction import predict
from daskdl.metrics.evaluation import Evaluation
from daskdl.metrics.wanted import Wanted
from daskdl.objective import Objective
from daskdl.timeouts import Timeouts
from daskdl.training.cluster_stage import ClusterStage, Limits
from daskdl.training.devices import check_device
from daskdl.training.local_stage import LocalStage
from daskdl.training.options import FitOptions
from daskdl.training.seats import most_replicas, replicas_here, seats_of
from daskdl.training.stage import Stage
from daskdl.training.task import TaskOptions

RELAY_BYTES = 8 * 2**20  # for each replica
FILE_BYTES = 4 * 2**20  # of a batch file for one run: large enough to be worth a look

Sources = Mapping[str, Source]  # by "train" and "validation"


class Site(ABC):
    """Does what a trainer is asked for.

    Attributes:
        client: Of the cluster; False: there is none.
    """

    client: Client | Literal[False]

    @abstractmethod
    def check_device(self, device: str) -> None:
        """Refuse a device that is not there, if that can be seen from here.

        Raises:
            OptionError: What is missing.
        """

    @contextlib.contextmanager
    def ready(self, sources: Sources, fit: FitOptions, seed: int) -> Iterator[Sources]:
        """Make the data ready to be trained on.

        Args:
            sources: As given.
            fit: How they are read.
            seed: Of the shuffling.

        Yields:
            Sources of which enough is known.
        """
        ready = dict(sources)
        for phase, source in sources.items():
            named = of_validation() if phase == "validation" else nullcontext()
            with named:
                ready[phase] = looked_at(source, self.client, skips=fit.read.skips)
        with contextlib.ExitStack() as ending:
            if fit.approach == "export":
                options = _export_options(ready["train"], fit, seed)
                exported = temporary_batches(ready["train"], options, self.client)
                ready["train"] = ending.enter_context(exported)
            yield {phase: small_together(source) for phase, source in ready.items()}

    @abstractmethod
    def stage(
        self, options: TaskOptions, sources: Sources
    ) -> AbstractContextManager[Stage]:
        """Prepare a run: choose its replicas, and put the data where they are."""

    def evaluate(
        self,
        model: nn.Module,
        loss: Objective | None,
        source: Source,
        read: ReadOptions,
        wanted: Wanted | None,
    ) -> Evaluation:
        """See :func:`daskdl.evaluation.evaluate`."""
        return evaluation.evaluate(model, loss, source, read, self.client, wanted)

    def predict(
        self, model: nn.Module, X: Any, read: ReadOptions, wanted: OutputOptions
    ) -> Any:
        """See :func:`daskdl.inference.prediction.predict`."""
        return predict(model, X, read, self.client, wanted)


class Cluster(Site):
    """The workers of a Dask cluster.

    Args:
        client: A synchronous client.
    """

    client: Client

    def __init__(self, client: Client) -> None:
        self.client = client

    @override
    def check_device(self, device: str) -> None:
        pass  # the first replica says so

    @override
    @contextlib.contextmanager
    def ready(self, sources: Sources, fit: FitOptions, seed: int) -> Iterator[Sources]:
        check_installed(self.client)
        with super().ready(sources, fit, seed) as ready:
            yield ready

    @override
    @contextlib.contextmanager
    def stage(self, options: TaskOptions, sources: Sources) -> Iterator[Stage]:
        most = most_replicas(rows_in(sources["train"]), options.step_rows)
        seats = seats_of(options.master, self.client, most)
        workers = sorted(set(seats.values()))
        bound = Timeouts.from_config().bound("request")
        with contextlib.ExitStack() as stack:
            supplies = {
                phase: stack.enter_context(
                    supply_of(sharded(own, len(seats)), self.client, workers, bound)
                )
                for phase, own in sources.items()
            }
            limits = Limits(RELAY_BYTES, most)
            yield ClusterStage(self.client, options, seats, supplies, limits)

    @override
    def predict(
        self, model: nn.Module, X: Any, read: ReadOptions, wanted: OutputOptions
    ) -> Any:
        check_installed(self.client)
        return super().predict(model, X, read, wanted)


class Process(Site):
    """This process alone: replicas are threads."""

    client: Literal[False] = False

    @override
    def check_device(self, device: str) -> None:
        check_device(device)

    @override
    @contextlib.contextmanager
    def stage(self, options: TaskOptions, sources: Sources) -> Iterator[Stage]:
        most = most_replicas(rows_in(sources["train"]), options.step_rows)
        replicas = replicas_here(options.master, most)
        own = {phase: sharded(source, replicas) for phase, source in sources.items()}
        yield LocalStage(options, replicas, own)


def _export_options(source: Source, fit: FitOptions, seed: int) -> ExportOptions:
    """Files of some size, whatever the size of a batch."""
    size = fit.read.batch_size
    rows = rows_like(source)
    row_bytes = max(trees.nbytes(rows) // trees.length(rows[0]), 1)
    batches = max(FILE_BYTES // (row_bytes * size), 1)
    return ExportOptions(size, batches, seed if fit.shuffle else None)


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
