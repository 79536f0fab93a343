"""The user's object: fit, evaluate, predict."""

import dataclasses
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import torch
from distributed import Client
from torch import nn
from torch.optim import Optimizer

from daskdl.callbacks import Callback
from daskdl.cluster import check_outlives
from daskdl.data.arrays import first_rows, is_dask_array
from daskdl.data.rehearsal import ClassRange, random_state_left_alone
from daskdl.data.validate import (
    check_data,
    check_module,
    check_step,
    check_validation,
    trainable,
)
from daskdl.errors import OptionError, RunError
from daskdl.history import History
from daskdl.packed import Packed, PackedModel
from daskdl.sites import site_of
from daskdl.training.base import Outcome, TrainingMaster
from daskdl.training.driver import Driver
from daskdl.training.follow import Follower
from daskdl.training.merge import Final
from daskdl.training.optimizer_state import restore_
from daskdl.training.options import check_fit, check_trainer
from daskdl.training.sharing import GradientSharing
from daskdl.training.task import Loss, Recipe, TaskOptions
from daskdl.vectors import FlatParameters, grid_for

logger = logging.getLogger(__name__)

OUTBOX_BYTES = 2**20  # more would only grow old; the residual is the better queue
INBOX_BYTES = 64 * 2**20  # of decoded entries; beyond it they are folded


@dataclass(eq=False)
class Trainer:
    """Train a PyTorch model on a Dask cluster, or with threads of this process.

    With ``client=False`` there is no cluster and no scheduler: the replicas are
    ``replicas_per_worker`` threads of this process, each with a copy of the model,
    and share torch's threads. Everything else is the same, with these differences.
    There is nothing to route, nobody comes later, and there is always room to send:
    `routing`, `fan_out` and `rejoin_timeout` have no effect. Blocks of a `dask.array`
    are computed one at a time by each replica, in its own thread, again in each epoch;
    nothing is kept of them. Replicas on the CPU share torch's one generator, so with
    several of them a model that draws random numbers, as dropout does, is not
    repeatable.

    Args:
        model: An `nn.Module`, which is copied, or a function that returns one.
        loss: ``loss(model(x), y)``, a scalar tensor.
        optimizer: Makes a `torch.optim.Optimizer` from a list of the trainable
            parameters.
        master: The way of training.
        client: A synchronous `distributed.Client`; None: the default client if
            there is one, else a `LocalCluster` that is closed again; False: none,
            see above.
        device: Where replicas compute: ``"auto"`` is CUDA where a worker has it, its
            devices shared out evenly among its replicas, else the CPU; or a torch
            device.
        seed: Of the model's start (if it is a function), of shuffling and of
            dropout: replica i seeds torch with ``seed + i``.
        callbacks: See :class:`daskdl.Callback`.
        progress: Show a bar while fitting; None: if standard error is a terminal.

    Attributes:
        model_: The trained model, an ordinary module on the CPU.
        optimizer_: Its optimizer, with the replicas' averaged state.
        history_: The rows of the last fit.

    Raises:
        OptionError: If an option is outside what is allowed.

    Example:
        >>> X, y = torch.randn(64, 3), torch.zeros(64, dtype=torch.int64)
        >>> trainer = Trainer(
        ...     model=lambda: nn.Linear(3, 2),
        ...     loss=nn.CrossEntropyLoss(),
        ...     optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        ...     master=GradientSharing(replicas_per_worker=2),
        ...     client=False,
        ... )
        >>> trainer.fit(X, y, batch_size=16).column("replicas")
        [2]
    """

    model: nn.Module | Callable[[], nn.Module]
    loss: Loss
    optimizer: Callable[[Any], Optimizer]
    _: KW_ONLY
    master: TrainingMaster = field(default_factory=GradientSharing)
    client: Client | Literal[False] | None = None
    device: str | torch.device = "auto"
    seed: int = 0
    callbacks: Sequence[Callback] = ()
    progress: bool | None = None

    model_: nn.Module = field(init=False, repr=False)
    optimizer_: Optimizer = field(init=False, repr=False)
    history_: History = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_trainer(
            self.master, self.device, self.seed, self.callbacks, self.progress
        )
        self._sent: Outcome | None = None
        self._epochs = 0  # of all fits so far

    def fit(
        self,
        X: Any,
        y: Any,
        *,
        epochs: int = 1,
        batch_size: int = 32,
        validation: tuple[Any, Any] | None = None,
        shuffle: bool = True,
    ) -> History:
        """Train; calling it again goes on from `model_`.

        Args:
            X: Inputs: numpy array, torch tensor or `dask.array`, rows first.
            y: Labels of the same length, of the same kinds.
            epochs: How many times to go through the data, >= 1.
            batch_size: Rows per step of each replica, >= 1.
            validation: (X, y) on which the agreed model is scored after each epoch.
            shuffle: New random order in each epoch, from the seed.

        Returns:
            One row for each epoch, also kept in `history_`.

        Raises:
            DataError: If the data cannot be trained on; no worker was touched.
            ModelError: If model, loss or optimizer cannot be used, likewise.
            ReplicaError: If the user's code raised on a worker.
            DivergedError: If the loss became NaN or infinite.
            RunError: If the run ended early for another reason. In these three
                cases `model_` is what all replicas agreed on last.
        """
        check_fit(epochs, batch_size, shuffle)
        check_data(X, y)
        model = self._starting_model()
        labels = check_step(model, self.loss, self.optimizer, X, y)
        if validation is not None:
            check_validation(model, self.loss, validation)
        recipe = Packed(self._recipe(model, X, y), "trainer")
        options = self._options(model, epochs, batch_size, shuffle, labels)
        options = dataclasses.replace(options, validates=validation is not None)
        phases = {"train": (X, y)}
        if validation is not None:
            phases["validation"] = validation
        with site_of(self.client) as site, site.stage(options, phases) as stage:
            return self._run(Driver(stage), options, recipe, model, len(X))

    def evaluate(self, X: Any, y: Any, *, batch_size: int = 64) -> dict[str, float]:
        """Score `model_`, on the cluster or in this process.

        Args:
            X: Inputs, of the kinds that :meth:`fit` takes.
            y: Labels.
            batch_size: Rows per forward pass.

        Returns:
            ``"loss"``, and for class indices ``"accuracy"``, means over all rows.
        """
        with site_of(self.client) as site:
            return site.evaluate(self._fitted(), self.loss, X, y, batch_size)

    def predict(self, X: Any, *, batch_size: int = 64) -> Any:
        """Apply `model_` to every row, on the cluster or in this process.

        Args:
            X: Inputs, of the kinds that :meth:`fit` takes.
            batch_size: Rows per forward pass.

        Returns:
            The outputs, of the kind that came in; of a `dask.array`, a lazy one.

        Raises:
            OptionError: If it would be lazy, and no cluster is there to compute it.
        """
        if is_dask_array(X):
            check_outlives(self.client)
        with site_of(self.client) as site:
            return site.predict(self._fitted(), X, batch_size)

    def _fitted(self) -> nn.Module:
        if not hasattr(self, "model_"):
            raise OptionError("the trainer has no model_ yet; call fit first")
        return self.model_

    def _starting_model(self) -> nn.Module:
        if hasattr(self, "model_"):
            return self.model_
        if isinstance(self.model, nn.Module) or not callable(self.model):
            check_module(self.model)
            # Not a deep copy: what cannot travel is then named here.
            return PackedModel(self.model).unpack()
        with random_state_left_alone():
            torch.manual_seed(self.seed)
            return self.model()

    def _recipe(self, model: nn.Module, X: Any, y: Any) -> Recipe:
        state = self.optimizer_.state_dict() if hasattr(self, "optimizer_") else None
        # The others stay here, and may hold what cannot be pickled.
        travelling = [c for c in self.callbacks if c.runs_on_workers]
        rows = first_rows(X, 2).copy(), first_rows(y, 2).copy()
        return Recipe(model, self.loss, self.optimizer, state, travelling, rows)

    def _options(
        self,
        model: nn.Module,
        epochs: int,
        batch_size: int,
        shuffle: bool,
        labels: ClassRange | None,
    ) -> TaskOptions:
        flat = FlatParameters(PackedModel(model).unpack())
        self.master.check(flat)
        return TaskOptions(
            run=secrets.randbits(63),
            master=self.master,
            epochs=epochs,
            epochs_before=self._epochs,
            batch_size=batch_size,
            seed=self.seed,
            shuffle=shuffle,
            device=str(self.device),
            validates=False,
            labels=labels,
            size=flat.size,
            grid=grid_for(flat),
            last=self._sent,
            outbox_bytes=OUTBOX_BYTES,
            inbox_bytes=INBOX_BYTES,
            timeouts=self.master.timeouts(),
        )

    def _run(
        self,
        driver: Driver,
        options: TaskOptions,
        recipe: Packed[Recipe],
        model: nn.Module,
        examples: int,
    ) -> History:
        self.history_ = History()
        rows = examples * options.epochs
        follower = Follower(
            self.history_, self.callbacks, options.size, rows, self.progress
        )
        try:
            with follower:
                driver.run(recipe, follower.follow)
        finally:  # what was trained until it ended early is not lost
            self._epochs += len(self.history_)
            if driver.final is not None:
                self._adopt(model, driver.final)
        if driver.final is None:
            raise RunError("the run ended without a result")
        return self.history_

    def _adopt(self, model: nn.Module, final: Final) -> None:
        final.parameters.load_into(model)
        self.model_ = model
        former = getattr(self, "optimizer_", None)
        self.optimizer_ = self.optimizer(trainable(model))
        if final.optimizer is not None:
            restore_(self.optimizer_, final.optimizer)
        elif former is not None:  # a run that ended early: the last state there is
            self.optimizer_.load_state_dict(former.state_dict())
        self._sent = final.outcome or self._sent
