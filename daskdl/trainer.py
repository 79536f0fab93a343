"""The user's object: fit, evaluate, predict."""

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import torch
from distributed import Client
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from daskdl.callbacks import Callback
from daskdl.cluster import check_outlives
from daskdl.data.arrays import is_dask_array
from daskdl.data.checks import check_data, trainable
from daskdl.data.rehearsal import ClassRange
from daskdl.errors import OptionError, RunError
from daskdl.history import History
from daskdl.objective import Loss, objective_of
from daskdl.packed import Packed, PackedModel
from daskdl.sites import site_of
from daskdl.steps import unpack_rows
from daskdl.training.adoption import Moved, adopt, starting_model
from daskdl.training.base import Outcome, TrainingMaster
from daskdl.training.driver import Driver
from daskdl.training.follow import Follower
from daskdl.training.learning_rate import Scheduling
from daskdl.training.merge import Final
from daskdl.training.method import Method
from daskdl.training.options import check_fit, check_trainer
from daskdl.training.oversight import Oversight
from daskdl.training.sharing import GradientSharing
from daskdl.training.stepping import Stepping
from daskdl.training.task import Recipe, TaskOptions
from daskdl.vectors import FlatParameters, grid_for

OUTBOX_BYTES = 2**20  # more would only grow old; the residual is the better queue
INBOX_BYTES = 64 * 2**20  # of decoded entries; beyond it they are folded


@dataclass(eq=False)
class Trainer:
    """Train a PyTorch model on a Dask cluster, or with threads of this process.

    With ``client=False`` there is no cluster and no scheduler: the replicas are
    ``replicas_per_worker`` threads of this process; see the page on how it works.

    Args:
        model: An `nn.Module`, which is copied, or a function that returns one.
        loss: ``loss(model(x), y)``, a scalar tensor. Left out if `step` is given.
        optimizer: Makes a `torch.optim.Optimizer` from a list of the trainable
            parameters; it has to be given.
        master: The way of training.
        client: A synchronous `distributed.Client`; None: the default one, else a
            `LocalCluster` that is closed again; False: none, see above.
        device: Where replicas compute: ``"auto"`` is CUDA where a worker has it, its
            devices shared out evenly among its replicas, else the CPU; or a torch
            device.
        seed: Of the model's start (if it is a function), of shuffling and of
            dropout: replica i seeds torch with ``seed + i``.
        callbacks: See :class:`daskdl.Callback`.
        progress: Show a bar while fitting; None: if standard error is a terminal.
        autocast: Training computes forward passes under `torch.autocast` in this
            dtype, ``torch.bfloat16``, or ``torch.float16`` with a
            `torch.amp.GradScaler` of each replica. Whatever scores or predicts
            computes in the model's own dtype.
        accumulate: Batches of `batch_size` rows for each step of the optimizer, one
            after the other; with a mean loss the step is that of one large batch.
        clip_grad_norm: Largest norm of all gradients together, > 0, after
            accumulation and before the optimizer; None: any.
        step: ``step(model, (x, y))``, the mean loss of a batch, a scalar tensor, for
            models whose forward pass is not ``model(x)``. Of validation and
            evaluation there is then the loss only.
        scheduler: Makes a `torch.optim.lr_scheduler.LRScheduler` from an optimizer.
            At the end of an epoch all go on from the one that is farthest, and
            `ReduceLROnPlateau` gets the validation loss, or the mean training loss.
        scheduler_every: Step it after each ``"epoch"``, or ``"step"`` of a replica.
        telemetry_every: Steps of a replica for each row of `history.steps`; ``"auto"``:
            10, or more where rows would take 1 % of the time; None: no rows.
        max_loss_rise: A fit ends when a replica's loss stays above its first one by so
            many times that, or 1 if that is larger; None: it does not.

    Attributes:
        model_: The trained model, an ordinary module on the CPU.
        optimizer_: Its optimizer, with the replicas' averaged state.
        scheduler_: Of that optimizer, or None; the next fit goes on from it.
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
    loss: Loss | None = None
    # A default only because `loss` before it has one.
    optimizer: Callable[[Any], Optimizer] = None  # type: ignore[assignment]
    _: KW_ONLY
    master: TrainingMaster = field(default_factory=GradientSharing)
    client: Client | Literal[False] | None = None
    device: str | torch.device = "auto"
    seed: int = 0
    callbacks: Sequence[Callback] = ()
    progress: bool | None = None
    autocast: torch.dtype | None = None
    accumulate: int = 1
    clip_grad_norm: float | None = None
    step: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor] | None = None
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    scheduler_every: Literal["epoch", "step"] = "epoch"
    telemetry_every: int | Literal["auto"] | None = "auto"
    max_loss_rise: float | None = 10.0

    model_: nn.Module = field(init=False, repr=False)
    optimizer_: Optimizer = field(init=False, repr=False)
    scheduler_: LRScheduler | None = field(init=False, repr=False)
    history_: History = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_trainer(
            self.master, self.device, self.seed, self.callbacks, self.progress
        )
        self._method()
        self._moved: Moved | None = None
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
            One row for each epoch, as in `history_`.

        Raises:
            DataError: If the data cannot be trained on; no worker was touched.
            ModelError: If model, loss, step or optimizer cannot be used, likewise.
            OptionError: If another argument cannot, the scheduler included, likewise.
            ReplicaError: If the user's code raised on a worker.
            DivergedError: If the loss became NaN or infinite, or ran away.
            RunError: If the run ended early for another reason. In these three
                cases `model_` is what all replicas agreed on last.
        """
        check_fit(epochs, batch_size, shuffle)
        check_data(X, y)
        method, model = self._method(), getattr(self, "model_", None)
        if model is None:
            model = starting_model(self.model, self.seed)
        labels = method.check(model, X, y, validation)
        recipe = method.recipe(model, self._moved, self.callbacks, (X, y))
        phases = {"train": (X, y)}
        if validation is not None:
            phases["validation"] = validation
        options = self._options(model, epochs, batch_size, shuffle, phases, labels)
        with site_of(self.client) as site, site.stage(options, phases) as stage:
            if self.master.averages:
                method.warn(model, len(stage.seats))
            return self._run(Driver(stage), options, recipe, model, len(X) * epochs)

    def evaluate(self, X: Any, y: Any, *, batch_size: int = 64) -> dict[str, float]:
        """Score `model_`, on the cluster or in this process.

        Args:
            X: Inputs, of the kinds that :meth:`fit` takes.
            y: Labels.
            batch_size: Rows per forward pass.

        Returns:
            ``"loss"``, and for class indices ``"accuracy"``, means over all rows;
            with a `step` the loss only.
        """
        with site_of(self.client) as site:
            objective = self._method().objective
            return site.evaluate(self._fitted(), objective, X, y, batch_size)

    def predict(self, X: Any, *, batch_size: int = 64) -> Any:
        """Apply `model_(x)` to every row, on the cluster or in this process.

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

    def _method(self) -> Method:
        return Method(
            objective_of(self.loss, self.step),
            self.optimizer,
            Stepping(self.autocast, self.accumulate, self.clip_grad_norm),
            Scheduling(self.scheduler, self.scheduler_every),
            Oversight(self.telemetry_every, self.max_loss_rise),
        )

    def _options(
        self,
        model: nn.Module,
        epochs: int,
        batch_size: int,
        shuffle: bool,
        phases: Collection[str],
        labels: ClassRange | None,
    ) -> TaskOptions:
        method, flat = self._method(), FlatParameters(PackedModel(model).unpack())
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
            validates="validation" in phases,
            labels=labels,
            size=flat.size,
            grid=grid_for(flat),
            last=self._sent,
            outbox_bytes=OUTBOX_BYTES,
            inbox_bytes=INBOX_BYTES,
            timeouts=self.master.timeouts(),
            stepping=method.stepping,
            oversight=method.oversight,
        )

    def _run(
        self,
        driver: Driver,
        options: TaskOptions,
        recipe: Packed[Recipe],
        model: nn.Module,
        rows: int,
    ) -> History:
        self.history_ = History()
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
        self.optimizer_ = self.optimizer(trainable(model))
        scheduling = self._method().scheduling
        self._moved = adopt(self.optimizer_, scheduling, final, self._moved)
        self.scheduler_ = self._moved.rate.scheduler
        self._sent = final.outcome or self._sent
        self.history_.steps.extend(unpack_rows(final.steps))
