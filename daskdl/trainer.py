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
from daskdl.data.batches import Transform
from daskdl.data.checks import of_validation, trainable
from daskdl.data.collections import is_lazy
from daskdl.data.formats.loaders import Loader
from daskdl.data.labels import LabelCheck
from daskdl.data.options import Approach, OnBad, ReadOptions, one_of
from daskdl.data.pairs import pair
from daskdl.data.source import Source, is_known, rows_in
from daskdl.data.sources import source_of
from daskdl.errors import OptionError, RunError
from daskdl.history import History
from daskdl.objective import Loss, OwnStep, objective_of
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
from daskdl.training.options import FitOptions, check_trainer
from daskdl.training.oversight import Oversight
from daskdl.training.sharing import GradientSharing
from daskdl.training.small_threshold import hint_at_small_threshold
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
        check_trainer(
            self.master, self.device, self.seed, self.callbacks, self.progress
        )
        self._method(self.transform)
        self._moved: Moved | None = None
        self._sent: Outcome | None = None
        self._epochs = 0  # of all fits so far

    def fit(  # noqa: PLR0913 - as in Keras and scikit-learn, one name for each
        self,
        X: Any,
        y: Any = None,
        *,
        epochs: int = 1,
        batch_size: int = 32,
        validation: Any = None,
        shuffle: bool = True,
        transform: Transform | None = None,
        loader: Loader | Callable[..., Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
        on_bad_batch: OnBad = "raise",
        prefetch: int = 2,
        approach: Approach = "direct",
    ) -> History:
        """Train; calling it again goes on from `model_`.

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
                after each epoch.
            shuffle: New random order in each epoch, from the seed.
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

        Returns:
            One row for each epoch, as in `history_`.

        Raises:
            DataError: If the data cannot be trained on. What can be seen without
                loading any is seen before a worker is touched.
            ModelError: If model, loss, step or optimizer cannot be used, likewise.
            OptionError: If another argument cannot, the scheduler included, likewise.
            ReplicaError: If the user's code raised on a worker.
            DivergedError: If the loss became NaN or infinite, or ran away.
            RunError: If the run ended early for another reason. In these three
                cases `model_` is what all replicas agreed on last.
        """
        read = self._read(batch_size, transform, loader, collate_fn, on_bad_batch)
        fit = FitOptions(read, epochs, shuffle, prefetch, approach)
        sources = self._sources(fit, X, y, validation)
        model = getattr(self, "model_", None)
        if model is None:
            model = starting_model(self.model, self.seed)
        method = self._method(read.transform)
        labels = None
        if early := all(is_known(source) for source in sources.values()):
            labels = method.check(model, sources)
        with site_of(self.client) as site, site.ready(sources, fit, self.seed) as ready:
            if not early:
                labels = method.check(model, ready)
            recipe = method.recipe(model, self._moved, self.callbacks, ready["train"])
            options = self._options(method, model, fit, ready, labels)
            with site.stage(options, ready) as stage:
                if self.master.averages:
                    method.warn(model, len(stage.seats))
                self.classes_ = ready["train"].classes
                rows = rows_in(ready["train"])
                examples = None if rows is None else rows * epochs
                return self._run(Driver(stage), options, recipe, model, examples)

    def evaluate(
        self,
        X: Any,
        y: Any = None,
        *,
        batch_size: int = 64,
        transform: Transform | None = None,
        loader: Loader | Callable[..., Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
        on_bad_batch: OnBad = "raise",
    ) -> dict[str, float]:
        """Score `model_`, on the cluster or in this process.

        Args:
            X: Inputs, of the kinds that :meth:`fit` takes.
            y: Labels, likewise.
            batch_size: Rows per forward pass.
            transform: See :meth:`fit`, as those that follow.
            loader: For files.
            collate_fn: For datasets.
            on_bad_batch: What to do about parts that cannot be read.

        Returns:
            ``"loss"``, and for class indices ``"accuracy"``, means over all rows;
            with a `step` the loss only.
        """
        read = self._read(batch_size, transform, loader, collate_fn, on_bad_batch)
        objective = self._method(None).objective
        labelled = not isinstance(objective, OwnStep)
        source = source_of(X, y, read.source(None, labelled))
        with site_of(self.client) as site:
            return site.evaluate(self._fitted(), objective, source, read)

    def predict(
        self,
        X: Any,
        *,
        batch_size: int = 64,
        transform: Transform | None = None,
        loader: Loader | Callable[..., Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
    ) -> Any:
        """Apply `model_(x)` to every row, on the cluster or in this process.

        Args:
            X: Inputs, of the kinds that :meth:`fit` takes; labels that come with them
                are passed over.
            batch_size: Rows per forward pass.
            transform: See :meth:`fit`, as those that follow; y is None for it.
            loader: For files.
            collate_fn: For datasets.

        Returns:
            The outputs in order. Of Dask's collections, lazy ones of the same kind; a
            tensor of tensors, and of all else a numpy array. Where the model returns
            tuples or dicts, such of these.

        Raises:
            OptionError: If it would be lazy, and no cluster is there to compute it.
        """
        read = self._read(batch_size, transform, loader, collate_fn, "raise")
        if is_lazy(X):
            check_outlives(self.client)
        with site_of(self.client) as site:
            return site.predict(self._fitted(), X, read)

    def _read(
        self,
        batch_size: int,
        transform: Transform | None,
        loader: Loader | Callable[..., Any] | None,
        collate_fn: Callable[..., Any] | None,
        on_bad_batch: OnBad,
    ) -> ReadOptions:
        both = one_of(transform, self.transform)
        return ReadOptions(batch_size, both, loader, collate_fn, on_bad_batch)

    def _sources(
        self, fit: FitOptions, X: Any, y: Any, validation: Any
    ) -> dict[str, Source]:
        labelled = self.step is None
        seed = self.seed if fit.shuffle else None
        sources = {
            "train": source_of(X, y, fit.read.source(seed, labelled, self.accumulate))
        }
        if validation is not None:
            with of_validation():
                own = fit.read.source(None, labelled)
                sources["validation"] = source_of(*pair(validation), own)
        return sources

    def _fitted(self) -> nn.Module:
        if not hasattr(self, "model_"):
            raise OptionError("the trainer has no model_ yet; call fit first")
        return self.model_

    def _method(self, transform: Transform | None) -> Method:
        return Method(
            objective_of(self.loss, self.step),
            self.optimizer,
            Stepping(self.autocast, self.accumulate, self.clip_grad_norm),
            Scheduling(self.scheduler, self.scheduler_every),
            Oversight(self.telemetry_every, self.max_loss_rise),
            transform,
        )

    def _options(
        self,
        method: Method,
        model: nn.Module,
        fit: FitOptions,
        phases: Collection[str],
        labels: LabelCheck | None,
    ) -> TaskOptions:
        flat = FlatParameters(PackedModel(model).unpack())
        self.master.check(flat)
        return TaskOptions(
            run=secrets.randbits(63),
            master=self.master,
            epochs=fit.epochs,
            epochs_before=self._epochs,
            batch_size=fit.read.batch_size,
            seed=self.seed,
            shuffle=fit.shuffle,
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
            prefetch=fit.prefetch,
            skips_bad=fit.read.skips,
        )

    def _run(
        self,
        driver: Driver,
        options: TaskOptions,
        recipe: Packed[Recipe],
        model: nn.Module,
        examples: int | None,
    ) -> History:
        self.history_ = History()
        follower = Follower(
            self.history_, self.callbacks, options.size, examples, self.progress
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
        hint_at_small_threshold(self.history_[-1])
        return self.history_

    def _adopt(self, model: nn.Module, final: Final) -> None:
        final.parameters.load_into(model)
        self.model_ = model
        self.optimizer_ = self.optimizer(trainable(model))
        scheduling = self._method(None).scheduling
        self._moved = adopt(self.optimizer_, scheduling, final, self._moved)
        self.scheduler_ = self._moved.rate.scheduler
        self._sent = final.outcome or self._sent
        self.history_.steps.extend(unpack_rows(final.steps))
