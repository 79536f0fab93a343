"""The main interface: :class:`Trainer` and :func:`predict`.

This module collects the user's options and delegates to training, evaluation,
inference and saving; the function works without a trainer, for any model.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, Literal, ParamSpec, Self, TypeVar

import torch
from distributed import Client
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from daskdl.callbacks import Callback
from daskdl.data.batching import Transform, Weighted
from daskdl.data.checks import optimizer_function
from daskdl.data.inputs import (
    Approach,
    OnBad,
    ReadOptions,
    batch_options,
    compose,
    scaling_of,
    source_of,
    warn_of_scaling,
)
from daskdl.errors import OptionError
from daskdl.evaluation.evaluate import evaluate_model
from daskdl.evaluation.per_example import (
    penalty_of,
    score_examples,
)
from daskdl.evaluation.report import Evaluation
from daskdl.inference.predict import Postprocess
from daskdl.inference.predict import predict as predict_with
from daskdl.inference.predictor import Predictor
from daskdl.keras.compiled import Compiled, resolved_loss
from daskdl.losses import class_probabilities, facts_of
from daskdl.objective import Loss, Objective, objective_of
from daskdl.observe.history import History
from daskdl.training import trainer_state
from daskdl.training.base import TrainingMaster
from daskdl.training.checkpointing import resume_plan
from daskdl.training.epoch_control import Scheduling
from daskdl.training.fit import FitRun, steps_of_replica
from daskdl.training.fit_spec import FitSpec, FitState, starting_model
from daskdl.training.gradient_sharing import GradientSharing
from daskdl.training.optimizer_step import Stepping
from daskdl.training.trainer_state import TrainerState
from daskdl.util import client_or_process

P = ParamSpec("P")
T = TypeVar("T")

# Keywords of other libraries, or of another call: what to write instead.
_INSTEAD = {
    keyword: call
    for keywords, call in [
        (
            "validation_data eval_set eval_dataset val_dataloaders",
            "fit(..., validation=(X_val, y_val))",
        ),
        ("validation_split", "fit(..., validation=0.1)"),
        (
            "epochs max_epochs n_epochs num_epochs num_train_epochs",
            "fit(..., epochs=3)",
        ),
        ("batch_size", "fit(..., batch_size=32)"),
        (
            "loader storage_options",
            "fit(daskdl.data.files(url, loader=loader, storage_options=options), ...)",
        ),
        ("collate_fn", "fit(daskdl.data.dataset(dataset, collate_fn=collate_fn), ...)"),
        ("train_dataloader train_dataloaders train_dataset", "fit(dataset)"),
        ("resume_from_checkpoint ckpt_path", "fit(..., resume=folder)"),
        ("criterion loss_fn loss_function", "Trainer(..., loss=loss)"),
        ("class_weight", "Trainer(..., loss=CrossEntropyLoss(weight=weights))"),
        ("learning_rate base_lr", "Trainer(..., lr=0.1)"),
        ("lr_scheduler", "Trainer(..., scheduler=make_scheduler)"),
        ("precision fp16 bf16", "Trainer(..., autocast=torch.bfloat16)"),
        (
            "accumulate_grad_batches gradient_accumulation_steps",
            "Trainer(..., accumulate=4)",
        ),
        ("gradient_clip_val max_grad_norm", "Trainer(..., clip_grad_norm=1.0)"),
        ("random_state", "Trainer(..., seed=0)"),
        ("verbose verbosity", "Trainer(..., progress=True)"),
        ("callbacks", "Trainer(..., callbacks=[callback])"),
        ("logger", "Trainer(..., callbacks=[TensorBoard(folder)])"),
        ("patience", "Trainer(..., callbacks=[EarlyStopping(patience=3)])"),
        ("accelerator", "Trainer(..., device='cuda')"),
        ("devices num_nodes num_workers n_jobs", "Trainer(..., client=client)"),
    ]
    for keyword in keywords.split()
}


def _with_answers(function: Callable[P, T]) -> Callable[P, T]:
    """Make a foreign keyword end in an error that says what to write instead."""
    keywords = inspect.signature(function).parameters.keys()

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for keyword in kwargs.keys() - keywords:
            if keyword in _INSTEAD:
                name = function.__qualname__.removesuffix(".__init__")
                raise TypeError(
                    f"{name}() has no argument {keyword!r}; write "
                    f"{_INSTEAD[keyword]} instead"
                )
        return function(*args, **kwargs)

    return call


@_with_answers
def predict(
    model: nn.Module,
    X: Any,
    *,
    client: Client | Literal[False] | None = None,
    batch_size: int | None = None,
    output: str | int | None = None,
    postprocess: Postprocess | None = None,
    keyed: bool | None = None,
    transform: Transform | None = None,
    label: Any = None,
) -> Any:
    """Apply any model to every row, as :meth:`Trainer.predict` does.

    Args:
        model: Any module, in training or evaluation mode; not changed.
        X: Inputs, of any type that :meth:`Trainer.fit` takes.
        client: A synchronous `distributed.Client`; None: the default client, else a
            temporary `LocalCluster`; False: this process.
        batch_size: Rows per forward pass. None: those of a `DataLoader`, or 64.
        output: Name or position of one of the model's outputs, see
            :meth:`Trainer.predict`.
        postprocess: Applied to the outputs of each batch, see :meth:`Trainer.predict`.
        keyed: Whether outputs have keys, see :meth:`Trainer.predict`.
        transform: Applied to each batch, see :class:`Trainer`.
        label: Column, or key, of `X` to leave out.

    Returns:
        The outputs in order, lazy if the data are lazy, see :meth:`Trainer.predict`.

    Raises:
        DataError: If the data cannot be used.
        ModelError: If the model does not fit the data.
        OptionError: If another argument cannot be used.

    Example:
        >>> import numpy as np
        >>> predict(nn.Flatten(), np.zeros((2, 3, 4)), client=False).shape
        (2, 12)
    """
    X, read = ReadOptions.scoring(X, batch_size, transform, label)
    return predict_with(
        model,
        X,
        read,
        client,
        output=output,
        postprocess=postprocess,
        keyed=keyed,
    )


@dataclass(eq=False)
class Trainer:
    """Train a PyTorch model on a Dask cluster, or with threads of this process.

    With ``client=False`` there is no cluster and no scheduler: the replicas are
    ``replicas_per_worker`` threads of this process; see the page on how it works.

    Args:
        model: An `nn.Module`, which is copied, or a function that returns one; the
            function runs again for each copy of a module that cannot be pickled. For
            Keras models see `daskdl.keras`; if it is compiled, it has the defaults of
            loss, optimizer and metrics. Submodules in evaluation mode, such as a frozen
            backbone, stay in it; a model that is all in evaluation mode is trained.
        loss: ``loss(model(x), y)``, a scalar tensor; or the name of one, such as
            ``"cross_entropy"``, ``"mse"`` or one of Keras, a loss of Keras, or a dict
            of these by output, whose sum it is. Of an output with ``logits``, as
            transformers' models return it, the loss and metrics get these. None: the
            model gets y as ``labels``, or finds labels in x, and returns an object or
            a dict with ``loss``; data then need no y. None, too, if `step` is given.
        optimizer: A class of `torch.optim` or its name, such as ``"adamw"``, with `lr`;
            or a function that makes an optimizer from a list of the trainable
            parameters, or from the model, if its argument is called ``module`` or
            ``model``. Required. It may change between fits: new hyperparameters take
            effect and the state is kept; another class, other parameters, or an option
            that needs other state, such as amsgrad, resets the state.
        lr: Learning rate of an optimizer given as a class or its name, > 0; None: the
            default of the class. Other options: `functools.partial` of the class, or a
            function.
        master: Training master: how replicas exchange updates.
        client: A synchronous `distributed.Client`; None: the default client, else a
            temporary `LocalCluster`; False: no cluster, see above.
        device: Device of the replicas: ``"auto"`` is CUDA on workers that have it,
            with devices divided evenly among the worker's replicas, else the CPU; or a
            torch device.
        seed: Seeds model initialisation (if `model` is a function), shuffling and
            dropout: replica i seeds torch with ``seed + i``.
        callbacks: See :class:`daskdl.Callback`.
        progress: Show a progress bar; None: at a terminal and in a notebook.
        autocast: Training computes forward passes under `torch.autocast` in this
            dtype, ``torch.bfloat16``, or ``torch.float16`` with a
            `torch.amp.GradScaler` for each replica. Evaluation and prediction compute
            in the model's own dtype.
        accumulate: Batches of `batch_size` rows for each optimizer step; with a mean
            loss the step equals that of one large batch, also if a loss of torch or
            Keras ignores labels or has class weights.
        clip_grad_norm: Largest total norm of the gradients, > 0, applied after
            accumulation and before the optimizer step; None: no clipping.
        step: ``step(model, (x, y))`` returns the mean loss of a batch, a scalar tensor,
            for models whose forward pass is not ``model(x)``. ``(loss, logs)``, or a
            dict with ``"loss"``, also logs other numbers or scalar tensors of the
            batch: their means over the examples become columns of the history, and
            `val_NAME` on validation data. Validation and evaluation report only these.
        scheduler: Makes a `torch.optim.lr_scheduler.LRScheduler` from an optimizer. At
            the end of an epoch all replicas continue from the most advanced schedule.
        scheduler_every: Step the scheduler after each ``"epoch"``, or each ``"step"``
            of a replica.
        scheduler_monitor: Column of the history that `ReduceLROnPlateau` gets, see
            `monitor` of :class:`~daskdl.EarlyStopping`; None: ``"val_loss"``, or
            ``"loss"`` without validation data.
        telemetry_every: Steps of a replica per row of `history.steps`; ``"auto"``: 10,
            or more so that rows take less than 1 % of the time; None: no rows.
        transform: Callable that maps a batch (x, y) of tensors, or of tuples and dicts
            of tensors, to a batch, such as a fitted `daskdl.data.Standardize`. It runs
            on the worker, on every batch for training, evaluation and prediction; y is
            None without labels.
        metrics: Metrics of the validation data in each fit, `val_NAME` in the history,
            and the default of `metrics` in :meth:`evaluate`.
        max_loss_rise: The fit ends with a `DivergedError` when a replica's loss stays
            more than ``max_loss_rise * max(1, |first loss|)`` above its first loss;
            None: no limit.

    Attributes:
        model_: The trained model, an ordinary module on the CPU, in evaluation mode.
        optimizer_: Optimizer of `model_`, with the replicas' averaged state.
        scheduler_: Scheduler of `optimizer_`, or None; the next fit continues from it.
        history_: The rows of the last fit.
        classes_: Names of the labels 0, 1, ... if the data of the last fit name them;
            labels that are text are numbered in their order.

    Raises:
        OptionError: If an option is out of range.

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
    loss: Any = None
    # A default only because `loss` before it has one.
    optimizer: str | Callable[..., Optimizer] = None  # type: ignore[assignment]
    _: KW_ONLY
    lr: float | None = None
    master: TrainingMaster = field(default_factory=GradientSharing)
    client: Client | Literal[False] | None = None
    device: str | torch.device = "auto"
    seed: int = 0
    callbacks: Sequence[Callback] = ()
    progress: bool | None = None
    autocast: torch.dtype | None = None
    accumulate: int = 1
    clip_grad_norm: float | None = None
    step: Callable[[nn.Module, tuple[Tensor, Tensor]], Any] | None = None
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    scheduler_every: Literal["epoch", "step"] = "epoch"
    scheduler_monitor: str | None = None
    telemetry_every: int | Literal["auto"] | None = "auto"
    max_loss_rise: float | None = 10.0
    transform: Transform | None = None
    metrics: Any = None

    model_: nn.Module = field(init=False, repr=False)
    optimizer_: Optimizer = field(init=False, repr=False)
    scheduler_: LRScheduler | None = field(init=False, repr=False)
    history_: History = field(init=False, repr=False)
    classes_: Sequence[str] | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        own = Compiled.of(self.model)
        if own is not None and self.loss is None and self.step is None:
            self.loss = own.loss
        self.loss = resolved_loss(self.loss)
        if own is not None:
            if self.optimizer is None and own.optimizer is not None:
                self.optimizer = own.optimizer
            if self.metrics is None and self.step is None:
                self.metrics = own.metrics_beside(self.loss)
        self._spec()
        self._state = FitState()

    @_with_answers
    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        epochs: int = 1,
        batch_size: int | None = None,
        validation: Any = None,
        sample_weight: Any = None,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        transform: Transform | None = None,
        label: Any = None,
        on_bad_batch: OnBad = "raise",
        prefetch: int = 2,
        approach: Approach = "direct",
        resume: Any = None,
    ) -> History:
        """Train the model; later calls continue from `model_` and unsent residuals.

        Args:
            X: Inputs, rows first: numpy arrays, torch tensors, pandas and pyarrow
                tables, `dask.array`, `dask.dataframe`, or tuples and dicts of these,
                which the model gets by position and by keyword if its forward takes
                them, else as one argument.
                Or inputs and labels together: `dask.bag`, lists of Delayed objects
                and futures, torch datasets, a `DataLoader`, paths and URLs,
                `daskdl.data` sources; see the page on data. A list has an item for
                each example.
            y: Labels of the same length and types; text becomes class numbers.
            epochs: Number of passes over the data, >= 1.
            batch_size: Rows per batch of each replica, >= 1. None: those of a
                `DataLoader`, or 32.
            validation: (X, y), or data that include labels. The agreed model is scored
                on them after each epoch, or in the epochs of an
                :class:`~daskdl.Evaluate`. Or a fraction of the rows, such as 0.1, which
                are chosen at random from the trainer's seed, and not trained on.
            sample_weight: Weight of each row in the loss, >= 0, for data in memory: an
                array, tensor or series. The loss of a step is the sum of weight * loss
                over the sum of the weights, and so is that of an epoch in the history.
                `validation` may be (X, y, sample_weight) then; of a
                fraction of the rows, the weights count.
            shuffle: New random order in each epoch, from the seed. None: as in a
                `DataLoader`, else True.
            drop_last: Leave out incomplete batches, at the end of a replica's epoch and
                before rows of another shape. `examples` in the history excludes them.
                None: as in a `DataLoader`, else False.
            transform: Applied to each batch before the trainer's own transform, also to
                batches of `validation`.
            label: Column of a table, or key of dicts, with the labels; all others are
                inputs. It holds for `validation` too.
            on_bad_batch: ``"skip"``: parts that cannot be read are left out, and
                counted in `history_`.
            prefetch: Number of batches to load ahead, in whole parts and at least the
                next part; 0: no prefetching.
            approach: ``"export"``: pack the rows first, read the packed files in all
                epochs, and delete them at the end; ``daskdl.export.url`` sets the
                folder.
            resume: URL of one checkpoint, or of a folder in which a
                :class:`~daskdl.Checkpoint` wrote several, of which the newest is used;
                or a `Checkpoint`, for a URL that needs `storage_options`. Training
                continues from there instead of from `model_`, and `epochs` includes
                the epochs before the checkpoint. True: the folder of the `Checkpoint`
                among `callbacks`, if it has a checkpoint yet.

        Returns:
            One row for each epoch, as in `history_`.

        Raises:
            SaveError: If there is no checkpoint to resume, or one cannot be written.
            DataError: If the data cannot be used. Errors of this and the next two kinds
                are raised before any worker is used where no loaded data are needed.
            ModelError: If model, loss, step or optimizer cannot be used.
            OptionError: If another argument cannot be used.
            ReplicaError: If the user's code raised on a worker.
            DivergedError: If the loss, or a parameter, became NaN or infinite or ran
                away.
            RunError: If the run ended early for another reason. After this error and
                the two above, `model_` is the last state that all replicas agreed on.
                If all replicas or the scheduler were lost, also with a
                WaitTimeoutError, `model_` is the newest such state that had reached
                the client; a note of the error identifies it.
        """
        X, spec = self._fit_spec(
            X,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            transform=transform,
            label=label,
            on_bad_batch=on_bad_batch,
            epochs=epochs,
            prefetch=prefetch,
            approach=approach,
        )
        if sample_weight is not None:
            spec, y = spec.weighted(), Weighted(y, sample_weight)
        resumed = resume_plan(resume, self.callbacks)
        if resumed is not None:
            read = replace(
                spec.read, columns=resumed.columns, scaled_by=resumed.scaled_by
            )
            spec = replace(spec, read=read)
        sources = spec.sources(X, y, validation, self.classes_)
        model = getattr(self, "model_", None) if resumed is None else None
        if model is None:
            model = starting_model(self.model, self.seed)
        run = FitRun(spec, model, self._state, resumed)
        with client_or_process(self.client) as client, run.prepare(sources, client):
            self.history_, self.classes_ = run.history, run.classes
            try:
                run.train()
            finally:  # keeps the trained state if the fit ends early
                self._state = run.settle_(model)
                if run.result is not None:
                    self._show(model)
        return self.history_

    def steps(
        self,
        X: Any,
        epochs: int = 1,
        batch_size: int | None = None,
        *,
        validation: Any = None,
        drop_last: bool | None = None,
        label: Any = None,
    ) -> int:
        """Return how many steps each replica will make in a fit, for schedules.

        These are steps of the optimizer. The number is exact for one replica, and for
        several with ``max_staleness=0``, of which the last may make fewer. Otherwise it
        is what each makes if all are equally fast: a faster one makes more, and
        ``scheduler_every="step"`` counts the steps of the replica with the most. Rows
        of several shapes, and a replica that waits for data, make batches and groups
        that are not full, so more steps.

        Args:
            X: Inputs, as for :meth:`fit`. Where lengths are unknown, each part is
                loaded once to count its rows.
            epochs: See :meth:`fit`.
            batch_size: See :meth:`fit`.
            validation: See :meth:`fit`; only a fraction of the rows counts.
            drop_last: See :meth:`fit`.
            label: See :meth:`fit`.

        Raises:
            DataError: If the data cannot be used.
            OptionError: If the data are a stream, or an argument cannot be used.

        Example:
            >>> trainer = Trainer(nn.Linear(2, 1), nn.MSELoss(), "sgd", client=False)
            >>> trainer.steps(torch.zeros(100, 2), epochs=3, batch_size=32)
            12
        """
        X, spec = self._fit_spec(
            X, batch_size=batch_size, drop_last=drop_last, label=label, epochs=epochs
        )
        read = replace(spec.read, scaled_by=None)  # only the rows count
        source = source_of(X, None, read, labelled=False)
        with client_or_process(self.client) as client:
            return steps_of_replica(spec, source, client, validation)

    @property
    def feature_names_in_(self) -> Sequence[str] | Mapping[str, Sequence[str]] | None:
        """Names of the columns of X in the order that the model was trained on.

        For several tables, a dict of the names by place, such as ``"X['left']"``. None
        if X had no names, as an array has none, and before the first fit.
        """
        columns = self._state.columns or {}
        names = {place: own for place, own in columns.items() if place.startswith("X")}
        return names.get("X", names or None)

    def reset(self) -> None:
        """Forget all fits: the next one begins as the first one did.

        The model is that of the class again; a function makes it from the same seed.
        Attributes that the user's callbacks keep are theirs.
        """
        for name in ("model_", "optimizer_", "scheduler_", "history_"):
            vars(self).pop(name, None)
        self.classes_, self._state = None, FitState()

    @_with_answers
    def evaluate(
        self,
        X: Any,
        y: Any = None,
        *,
        metrics: Any = None,
        sample_weight: Any = None,
        batch_size: int | None = None,
        transform: Transform | None = None,
        label: Any = None,
        on_bad_batch: OnBad = "raise",
    ) -> Evaluation:
        """Evaluate `model_` in one pass, on the cluster or in this process.

        The result does not depend on how the data are partitioned; see the page on
        evaluation.

        Args:
            X: Inputs, or inputs and labels, of any type that :meth:`fit` takes.
            y: Labels, or None if `X` includes them.
            metrics: Metrics beside the loss; None: those of the trainer, or, if it has
                none, accuracy, if labels are classes, or 0 and 1 with a binary loss.
                They are a name such as ``"accuracy"``, ``"f1"`` or ``"r2"``; a function
                ``f(y_true, y_pred)``, such as those of scikit-learn; a preset,
                ``"classification"``, ``"binary"``, ``"multilabel"``, ``"regression"``
                or ``"calibration"``, or one of their classes in `daskdl.metrics`; a
                torchmetrics metric or `MetricCollection`; a mapping of names to
                functions and metrics, or of outputs to lists of metrics; or a list of
                these.
            sample_weight: Weight of each row in loss and accuracy, >= 0, for data in
                memory; not with metrics, of which those of the trainer are left out.
            batch_size: Rows per forward pass. None: those of a `DataLoader`, or 64.
            transform: See :meth:`fit`.
            label: Column, or key, of `X` that has the labels, see :meth:`fit`.
            on_bad_batch: Treatment of parts that cannot be read, see :meth:`fit`.

        Returns:
            A dict of all metrics over all rows, which prints as a report; with a
            `step` it contains only ``"loss"`` and what the step logs.

        Raises:
            DataError: If the data cannot be used, or the loss or a metric does not
                accept a label.
            ModelError: If the model, its outputs or the loss cannot be used.
            OptionError: If another argument cannot be used.
        """
        X, read = self._read(X, batch_size, transform, label, on_bad_batch)
        if metrics is None and sample_weight is None:
            metrics = self.metrics or None
        return evaluate_model(
            self._trained_model(),
            X,
            y,
            self._objective,
            metrics,
            sample_weight,
            read=read,
            client=self.client,
            classes=self.classes_,
        )

    def score(self, X: Any, y: Any = None, **options: Any) -> float:
        """Return the accuracy for labels that are classes, else R2, on all rows.

        Args:
            X: See :meth:`evaluate`.
            y: See :meth:`evaluate`.
            options: Other arguments of :meth:`evaluate`, except for `metrics`.
        """
        from daskdl.evaluation.metric_names import SCORE

        return float(self.evaluate(X, y, metrics=SCORE, **options)["score"])

    @_with_answers
    def score_examples(
        self,
        X: Any,
        y: Any = None,
        *,
        key: Any = None,
        regularization: bool = False,
        batch_size: int | None = None,
        transform: Transform | None = None,
        label: Any = None,
        on_bad_batch: OnBad = "raise",
    ) -> Any:
        """Compute the loss of each example, as the loss of a batch of one.

        Args:
            X: Inputs, or inputs and labels, of any type that :meth:`fit` takes.
            y: Labels, or None if `X` includes them.
            key: Keys for the scores: the name of a table column, which is then no
                input; a sequence with one value per row, for data in memory, datasets
                and files; a one-dimensional `dask.array`, if the data are a
                `dask.array`; for bags and lists of Delayed lists, whether their items
                are pairs (key, example). None: detected for these, as with `keyed` of
                :meth:`predict`; no keys for other data.
            regularization: Add the penalty that weight decay, and the regularisers of
                a Keras model, stand for: the same number for each example.
            batch_size: Rows per forward pass. None: those of a `DataLoader`, or 64.
            transform: See :meth:`fit`.
            label: Column, or key, of `X` that has the labels, see :meth:`fit`.
            on_bad_batch: Treatment of parts that cannot be read. With ``"skip"`` the
                scores of a part, or of the bad files of a part of several, are NaN if
                the number of their rows is known, else left out.

        Returns:
            One float64 number per example, in order: a tensor for tensors, a pandas
            series for pandas, a numpy array for other data in memory; for Dask's
            collections a lazy `dask.array`, series, bag, or list of Delayed. With keys,
            a series indexed by key, or a bag or lists of pairs (key, score).

        Raises:
            OptionError: If an option does not apply to the data, or if the optimizer's
                weight decay, such as AdamW's, is not a term of the loss.
        """
        X, read = self._read(X, batch_size, transform, label, on_bad_batch)
        model = self._trained_model()
        penalty = penalty_of(model, self.optimizer_) if regularization else 0.0
        return score_examples(
            model,
            self._objective,
            X,
            y,
            read=read,
            client=self.client,
            key=key,
            penalty=penalty,
            classes=self.classes_,
        )

    @_with_answers
    def predict(
        self,
        X: Any,
        *,
        batch_size: int | None = None,
        output: str | int | None = None,
        postprocess: Postprocess | None = None,
        keyed: bool | None = None,
        transform: Transform | None = None,
        label: Any = None,
    ) -> Any:
        """Apply `model_(x)` to every row, on the cluster or in this process.

        Args:
            X: Inputs, of any type that :meth:`fit` takes; labels are ignored. Items of
                a bag, or of a list of Delayed lists, may be pairs (key, x) and differ
                in shape. One worker reads a stream, and several the parts of a
                `daskdl.data.Stream` with `parts`.
            batch_size: Rows per forward pass. None: those of a `DataLoader`, or 64.
            output: Name, such as ``"logits"``, or position of one of the model's
                outputs; None: all outputs.
            postprocess: Maps the outputs of each batch to outputs with the same rows;
                both are tensors, or tuples and dicts of tensors. Runs on the worker.
            keyed: For bags and lists, whether the items are pairs (key, x). None:
                detected from the first item; text, bytes, a UUID or a date is a key,
                and so is a whole number before arrays, or a tuple of these. For files,
                True returns a lazy `dask.bag` of pairs (key, output): the key is the
                path or URL of the file if each file is one example, else a pair of
                that and the row in the file.
            transform: See :meth:`fit`; its y is None.
            label: Column, or key, of `X` to leave out, such as that of the labels.

        Returns:
            The outputs in order: for Dask's collections a lazy collection of the same
            type, with the same partitions and keys or index; a dataframe or series with
            the same index for pandas; a tensor for tensors; a numpy array for other
            data. If the model returns tuples or dicts, so does `predict`; but for
            dataframes, a dict of outputs with one number per row becomes one dataframe
            with these columns, and a single output with as many columns as `classes_`
            gets these names. To write lazy outputs from the workers, call Dask's
            `to_zarr`, `to_parquet` or `to_textfiles`.

        Raises:
            OptionError: If the outputs would be lazy and there is no cluster to compute
                them.
        """
        X, read = self._read(X, batch_size, transform, label)
        return predict_with(
            self._trained_model(),
            X,
            read,
            self.client,
            output=output,
            postprocess=postprocess,
            keyed=keyed,
            names=self.classes_,
        )

    def predict_proba(self, X: Any, **options: Any) -> Any:
        """Return the probability of each class for every row, as `predict` does.

        Args:
            X: See :meth:`predict`.
            options: Other arguments of :meth:`predict`, except for `postprocess`.

        Returns:
            (n, classes); with a binary loss and one score per row (n, 2), with several
            labels per row the probability of each, (n, labels).

        Raises:
            OptionError: If the loss does not say what the scores are.
        """
        if facts_of(self._objective)[1] is None:
            raise OptionError(
                "predict_proba needs a loss of classes, such as CrossEntropyLoss or "
                f"BCEWithLogitsLoss, got {self.loss!r}; a loss of your own has an "
                "attribute scale, which is 'logits', 'probabilities' or "
                "'log_probabilities'"
            )
        convert = functools.partial(class_probabilities, loss=self._objective)
        return self.predict(X, postprocess=convert, **options)

    @_with_answers
    def predictor(
        self,
        *,
        replicas: int = 2,
        batch_limit: int = 32,
        wait_ms: float = 0.0,
        queue_limit: int = 1024,
        transform: Transform | None = None,
        output: str | int | None = None,
    ) -> Predictor:
        """Serve the current `model_` to calls from many threads.

        The replicas are on the cluster, or threads of this process. Close the
        predictor, preferably with ``with``. See :class:`daskdl.Predictor`, also for
        errors.

        Args:
            replicas: Number of model copies, in the workers' memory.
            batch_limit: Most rows of a batch, and of one call.
            wait_ms: Longest time that a batch waits for more rows, milliseconds.
            queue_limit: Most rows that may wait for a replica.
            transform: See :meth:`fit`; its y is None.
            output: Name or position of the only output to return; None: all.
        """
        transform = compose(transform, self.transform)
        read = ReadOptions(transform=transform, columns=self._state.columns)
        columns = read.expected_columns  # refuses a normalizer of other columns
        warn_of_scaling(scaling_of(None, transform), self._state.scaled_by)
        predictor = Predictor(
            self._trained_model(),
            replicas=replicas,
            batch_limit=batch_limit,
            wait_ms=wait_ms,
            queue_limit=queue_limit,
            transform=transform,
            output=output,
            client=self.client,
        )
        predictor.columns = columns
        return predictor

    def save(
        self,
        url: Any,
        optimizer: bool = True,
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Save everything needed to predict, evaluate and continue fitting.

        Tensors become safetensors files, everything else JSON; nothing is pickled. An
        earlier save is replaced once all files are written: atomically, unless the file
        system cannot rename a file onto an existing one, as WebHDFS cannot.

        Args:
            url: A folder: a path, or an fsspec URL such as ``s3://bucket/run-17``.
            optimizer: Also save the state of optimizer, scheduler, thresholds and
                residuals; otherwise the next fit of the loaded trainer resets them.
            storage_options: fsspec options of `url`, such as credentials.

        Raises:
            OptionError: If there is no `model_` yet, or an object cannot be saved.
            SaveError: If the folder cannot be written.
        """
        self._trained_model()
        arguments = {name: getattr(self, name) for name in self._argument_names()}
        state = TrainerState(
            arguments, self.model_, self._state, self.history_, self.classes_
        )
        trainer_state.save(state, url, optimizer, storage_options)

    @classmethod
    def load(
        cls,
        url: Any,
        *,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        loss: Loss | None = None,
        optimizer: str | Callable[..., Optimizer] | None = None,
        client: Client | Literal[False] | None = None,
        trusted: Sequence[str] = (),
        storage_options: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> Self:
        """Load a trainer that continues from the saved state.

        Loading executes no code from the files. It imports and calls only known classes
        and functions, which the page on saving lists, and those in `trusted`.

        Args:
            url: The folder of the save.
            model: Replaces the saved argument of the class; None: as it was saved.
            loss: Likewise.
            optimizer: Likewise; the saved `lr` goes with it.
            client: See the class.
            trusted: Names of modules or packages, such as ``["my_nets"]``, whose
                classes and functions a save may import and call with saved arguments.
            storage_options: fsspec options of `url`, such as credentials.
            others: Other arguments of the class; they replace the saved ones.

        Raises:
            SaveError: If the save is missing, damaged, foreign or too new.
            OptionError: If arguments have to be passed; the message names each, and
                the reason.
        """
        own = {"model": model, "loss": loss, "optimizer": optimizer}
        passed = {name: one for name, one in own.items() if one is not None} | others
        if optimizer is not None:
            passed.setdefault("lr", None)
        names = cls._argument_names()
        state = trainer_state.load(url, names, passed, trusted, storage_options)
        trainer = cls(client=client, **state.arguments)
        trainer._state = state.fit_state
        trainer.history_, trainer.classes_ = state.history, state.classes
        trainer._show(state.model)
        return trainer

    @classmethod
    def _argument_names(cls) -> list[str]:
        """Return the arguments that are saved: all but the client."""
        return [f.name for f in fields(cls) if f.init and f.name != "client"]

    def _trained_model(self) -> nn.Module:
        if not hasattr(self, "model_"):
            raise OptionError("the trainer has no model_ yet; call fit first")
        return self.model_

    @property
    def _objective(self) -> Objective:
        objective: Objective = objective_of(self.loss, self.step)
        return objective

    def _read(
        self,
        X: Any,
        batch_size: int | None,
        transform: Transform | None,
        label: Any,
        on_bad_batch: OnBad = "raise",
    ) -> tuple[Any, ReadOptions]:
        transform = compose(transform, self.transform)
        X, read = ReadOptions.scoring(X, batch_size, transform, label, on_bad_batch)
        return X, self._after_fits(read)

    def _fit_spec(
        self,
        X: Any,
        *,
        batch_size: int | None,
        drop_last: bool | None,
        label: Any,
        shuffle: bool | None = None,
        transform: Transform | None = None,
        on_bad_batch: OnBad = "raise",
        **options: Any,
    ) -> tuple[Any, FitSpec]:
        """Return the data, the dataset of a `DataLoader`, and the options of a fit."""
        passed = {
            "batch_size": batch_size,
            "shuffle": shuffle,
            "drop_last": drop_last,
        }
        defaults = {"batch_size": 32, "shuffle": True, "drop_last": False}
        X, batches = batch_options(X, passed, defaults)
        read = ReadOptions(
            batches.pop("batch_size"),
            compose(transform, self.transform),
            on_bad_batch,
            label,
        )
        return X, self._spec(read=self._after_fits(read), **batches, **options)

    def _after_fits(self, read: ReadOptions) -> ReadOptions:
        """Add what the rows are compared with: those of the last fit."""
        state = self._state
        return replace(read, columns=state.columns, scaled_by=state.scaled_by)

    def _spec(self, **fit: Any) -> FitSpec:
        """Check the options of this trainer, and those of one fit."""
        return FitSpec(
            self._objective,
            optimizer_function(self.optimizer, self.lr),
            self.master,
            Stepping(self.autocast, self.accumulate, self.clip_grad_norm),
            Scheduling(self.scheduler, self.scheduler_every, self.scheduler_monitor),
            self.device,
            self.seed,
            self.callbacks,
            self.progress,
            self.telemetry_every,
            self.max_loss_rise,
            self.metrics or None,
            **fit,
        )

    def _show(self, model: nn.Module) -> None:
        trained = self._state.optimizer
        if trained is not None:
            self.model_, self.optimizer_ = model.eval(), trained.optimizer
            self.scheduler_ = trained.rate.scheduler


Trainer.__init__ = _with_answers(Trainer.__init__)  # type: ignore[method-assign]
