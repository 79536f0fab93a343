"""The user's object: fit, evaluate, predict, save, load."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, Self

import torch
from distributed import Client
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from daskdl.callbacks.base import Callback
from daskdl.data.batches import Transform
from daskdl.data.formats.loaders import Loader
from daskdl.data.options import Approach, OnBad, ReadOptions, one_of
from daskdl.fitted import saves
from daskdl.fitted.arguments import NAMES
from daskdl.fitted.fitted import Fitted
from daskdl.fitting import Fitting
from daskdl.history import History
from daskdl.objective import Loss, objective_of
from daskdl.run import Run, begun
from daskdl.sites import site_of
from daskdl.trained.trained import Trained
from daskdl.training.adoption import Standing, starting_model
from daskdl.training.base import TrainingMaster
from daskdl.training.learning_rate import Scheduling
from daskdl.training.method import Method
from daskdl.training.options import FitOptions, TrainerOptions
from daskdl.training.oversight import Oversight
from daskdl.training.resumption import resumption_of
from daskdl.training.sharing import GradientSharing
from daskdl.training.stepping import Stepping


@dataclass(eq=False)
class Trainer(Trained):
    """Train a PyTorch model on a Dask cluster, or with threads of this process.

    With ``client=False`` there is no cluster and no scheduler: the replicas are
    ``replicas_per_worker`` threads of this process; see the page on how it works.

    Args:
        model: An `nn.Module`, which is copied, or a function that returns one, and is
            called again for each copy of one that cannot be pickled; also of Keras, see
            `daskdl.keras`.
        loss: ``loss(model(x), y)``, a scalar tensor. Left out if `step` is given.
        optimizer: Makes a `torch.optim.Optimizer` from a list of the trainable
            parameters; it has to be given. Between fits another one may take its
            place: hyperparameters that are new count, and the state stays; with another
            class, other parameters, or an option that needs another state, such as
            amsgrad, it begins anew.
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
        transform: Callable of a batch (x, y) of tensors, or of tuples and dicts of
            them, that returns such a batch; applied to every batch that this trainer
            trains on, scores or predicts, on the worker; y is None where there are
            no labels. A fitted `daskdl.data.Standardize`, for one.
        max_loss_rise: A fit ends when a replica's loss stays above its first one by so
            many times that, or 1 if that is larger; None: it does not.

    Attributes:
        model_: The trained model, an ordinary module on the CPU.
        optimizer_: Its optimizer, with the replicas' averaged state.
        scheduler_: Of that optimizer, or None; the next fit goes on from it.
        history_: The rows of the last fit.
        classes_: Names of the labels 0, 1, ... if the data of the last fit have such.

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
    transform: Transform | None = None

    model_: nn.Module = field(init=False, repr=False)
    optimizer_: Optimizer = field(init=False, repr=False)
    scheduler_: LRScheduler | None = field(init=False, repr=False)
    history_: History = field(init=False, repr=False)
    classes_: Sequence[str] | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        self._options()
        self._method(self.transform)
        self._standing = Standing()

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        epochs: int = 1,
        batch_size: int = 32,
        validation: Any = None,
        shuffle: bool = True,
        drop_last: bool = False,
        transform: Transform | None = None,
        loader: Loader | Callable[..., Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
        on_bad_batch: OnBad = "raise",
        prefetch: int = 2,
        approach: Approach = "direct",
        resume: Any = None,
    ) -> History:
        """Train; calling it again goes on from `model_`, and from what was not sent.

        Args:
            X: Inputs, rows first: numpy arrays, torch tensors, pandas and pyarrow
                tables, `dask.array`, `dask.dataframe`, or tuples and dicts of these.
                Or inputs and labels together: `dask.bag`, lists of Delayed objects
                and futures, datasets of torch, paths and URLs, `daskdl.data` sources;
                see the page on data.
            y: Labels of the same length, of the same kinds.
            epochs: How many times to go through the data, >= 1.
            batch_size: Rows per step of each replica, >= 1.
            validation: (X, y), or what has both, on which the agreed model is scored
                after each epoch, or after those of an :class:`~daskdl.Evaluate`.
            shuffle: New random order in each epoch, from the seed.
            drop_last: Leave out what does not fill a batch at the end of a replica's
                epoch, and before rows of another shape, fewer than `batch_size` rows
                each time. They are not among the `examples` of the history.
            transform: Of each batch, before that of the trainer; of `validation` too.
            loader: Makes (x, y) of a file: a function of its path, or one of those in
                `daskdl.data`; None: by the files' extension.
            collate_fn: Makes (x, y) of a list of `batch_size` items of a dataset.
            on_bad_batch: ``"skip"``: parts that cannot be read are left out, and
                counted in `history_`.
            prefetch: Parts with rows of so many batches are loaded while one is
                trained on, and the next part in any case; 0: none.
            approach: ``"export"``: write batch files first, which all epochs read,
                and which are deleted in the end; where: ``daskdl.export.url``.
            resume: Where a :class:`~daskdl.Checkpoint` has written: go on from the
                newest one there, or from this one, in place of `model_`, and train
                until `epochs` are done, those before it included. True: where the one
                among `callbacks` writes, if there is one yet.

        Returns:
            One row for each epoch, as in `history_`.

        Raises:
            SaveError: If there is no checkpoint to resume, or one cannot be written.
            DataError: If the data cannot be trained on. What can be seen without
                loading any is seen before a worker is touched.
            ModelError: If model, loss, step or optimizer cannot be used, likewise.
            OptionError: If another argument cannot, the scheduler included, likewise.
            ReplicaError: If the user's code raised on a worker.
            DivergedError: If the loss became NaN or infinite, or ran away, or if
                parameters did.
            RunError: If the run ended early for another reason. In these three
                cases `model_` is what all replicas agreed on last. If all of them
                or the scheduler were lost, also by a WaitTimeoutError, it is the
                newest such state that had reached the client; a note says which.
        """
        both = one_of(transform, self.transform)
        read = ReadOptions(batch_size, both, loader, collate_fn, on_bad_batch)
        fit = FitOptions(read, epochs, shuffle, prefetch, approach, drop_last)
        method = self._method(read.transform)
        resumed = resumption_of(resume, self.callbacks)
        standing = self._standing if resumed is None else resumed.standing
        fitting = Fitting(method, self._options(), fit, standing, resumed)
        sources = fitting.sources(X, y, validation)
        model = getattr(self, "model_", None) if resumed is None else None
        if model is None:
            model = starting_model(self.model, self.seed)
        with site_of(self.client) as site, begun(fitting, model, sources, site) as run:
            self.history_, self.classes_ = run.history, run.classes
            try:
                run.train()
            finally:  # what was trained until it ended early is not lost
                self._adopt(model, run)
        return self.history_

    def save(self, url: Any, optimizer: bool = True) -> None:
        """Save what is needed to predict, to evaluate and to fit on.

        Tensors become safetensors files, all else JSON; nothing is pickled. A save that
        was there before is replaced at once, when all files are written.

        Args:
            url: A folder: a path, or a URL of fsspec such as ``s3://bucket/run-17``.
            optimizer: Also the state of optimizer, scheduler and thresholds, and what
                replicas have not sent; without it the next fit begins these anew.

        Raises:
            OptionError: If there is no `model_` yet, or something cannot be saved.
            SaveError: If nothing can be written there.
        """
        self._fitted()
        arguments = {name: getattr(self, name) for name in NAMES}
        standing, history = self._standing, self.history_
        fitted = Fitted(arguments, self.model_, standing, history, self.classes_)
        saves.save(fitted, url, optimizer)

    @classmethod
    def load(
        cls,
        url: Any,
        *,
        client: Client | Literal[False] | None = None,
        trusted: Sequence[str] = (),
        **passed: Any,
    ) -> Self:
        """Make a trainer that goes on where the saved one was.

        Executes nothing that the files contain and imports nothing that they name. Of
        classes and functions it calls those that are known to make what is needed; the
        page on saving says which.

        Args:
            url: Where it was saved.
            client: See the class.
            trusted: Names of modules, or of packages, such as ``["my_nets"]``: what a
                save names there is imported, and called with the arguments it has.
            passed: Other arguments of the class, in place of those that were saved.

        Raises:
            SaveError: If there is nothing, or it is damaged, foreign or too new.
            OptionError: Naming each argument that has to be passed, and why.
        """
        fitted = saves.load(url, passed, trusted)
        trainer = cls(client=client, **fitted.arguments)
        trainer._standing = fitted.standing
        trainer.history_, trainer.classes_ = fitted.history, fitted.classes
        trainer._show(fitted.model)
        return trainer

    def _method(self, transform: Transform | None) -> Method:
        return Method(
            objective_of(self.loss, self.step),
            self.optimizer,
            Stepping(self.autocast, self.accumulate, self.clip_grad_norm),
            Scheduling(self.scheduler, self.scheduler_every),
            Oversight(self.telemetry_every, self.max_loss_rise),
            transform,
        )

    def _options(self) -> TrainerOptions:
        return TrainerOptions(
            self.master, self.device, self.seed, self.callbacks, self.progress
        )

    def _adopt(self, model: nn.Module, run: Run) -> None:
        self._standing = run.settle_(model)
        if run.final is not None:
            self._show(model)

    def _show(self, model: nn.Module) -> None:
        moved = self._standing.moved
        if moved is not None:
            self.model_ = model
            self.optimizer_, self.scheduler_ = moved.optimizer, moved.rate.scheduler
