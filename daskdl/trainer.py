"""The main interface: :class:`Trainer` and :func:`predict`.

This module collects the user's options and delegates to training, evaluation,
inference and saving. :func:`predict` applies any model, without a trainer.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar

import torch
from distributed import Client
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from daskdl.callbacks import Callback
from daskdl.data.batching import Transform, Weighted
from daskdl.data.checks import optimizer_function
from daskdl.data.inputs import (
    OnBad,
    ReadOptions,
    compose,
    loader_arguments,
    scaling_of,
    source_of,
    warn_of_scaling,
)
from daskdl.errors import OptionError, short_tracebacks
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
from daskdl.losses import class_probabilities, labels_and_scale
from daskdl.objective import Loss, Objective, objective_of
from daskdl.observe import report
from daskdl.observe.history import History
from daskdl.training import trainer_state
from daskdl.training.base import TrainingMaster
from daskdl.training.checkpointing import resume_plan
from daskdl.training.epoch_control import Scheduling
from daskdl.training.fit import FitRun, steps_of_replica
from daskdl.training.fit_spec import (
    Approach,
    FitSpec,
    FitState,
    display_name,
    starting_model,
)
from daskdl.training.gradient_sharing import GradientSharing
from daskdl.training.optimizer_step import Stepping
from daskdl.training.trainer_state import TrainerState
from daskdl.util import check_client, client_or_process

P = ParamSpec("P")
T = TypeVar("T")

# What to write instead of keywords of other libraries or of another method.
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
        ("run_name experiment_name", "fit(..., name='resnet-lr3')"),
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


def _with_hints(function: Callable[P, T]) -> Callable[P, T]:
    """Refuse arguments that other libraries take; the error says what to write."""
    parameters = inspect.signature(function).parameters
    positional = [name for name, p in parameters.items() if p.kind != p.KEYWORD_ONLY]
    by_keyword = [f"{name}=" for name in parameters if name not in positional]
    name = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if len(args) > len(positional):
            allowed = ", ".join(
                argument for argument in positional if argument != "self"
            )
            raise TypeError(
                f"{name}() takes only {allowed} by position, got "
                f"{len(args) - ('self' in positional)} arguments; pass the others by "
                f"keyword: {' '.join(by_keyword)}"
            )
        for keyword in kwargs.keys() - parameters.keys():
            if keyword in _INSTEAD:
                raise TypeError(
                    f"{name}() has no argument {keyword!r}; write "
                    f"{_INSTEAD[keyword]} instead"
                )
        return function(*args, **kwargs)

    return short_tracebacks(call)


@_with_hints
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
    device: str | torch.device = "auto",
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
        device: Device of the model on each worker: a torch device; or ``"auto"``: CUDA.
            Workers without CUDA use their CPU.

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
        device=device,
    )


@dataclass(eq=False)
class Trainer:
    """Train a PyTorch model on a Dask cluster, or with threads of this process.

    With ``client=False`` there is neither a cluster nor a scheduler: the replicas are
    ``replicas_per_worker`` threads of this process; see the page on how it works.

    Args:
        model: An `nn.Module`, which is copied, or a function that returns one; the
            function runs again for each copy of a module that cannot be pickled. For
            Keras models, see `daskdl.keras`; a compiled model sets the defaults of
            loss, optimizer and metrics. Submodules in evaluation mode, such as a frozen
            backbone, stay in this mode; if all are in evaluation mode, all are trained.
        loss: A function ``loss(model(x), y)`` that returns a scalar tensor; the name of
            one, such as ``"cross_entropy"``, ``"mse"`` or one of Keras' names; a loss
            of Keras; or a dict of these by output, which are summed. If the output has
            ``logits``, like those of transformers' models, the loss and the metrics
            receive them. None: the model receives y as ``labels``, or finds labels in
            x, and returns an object or a dict with ``loss``; y is then optional. Leave
            `loss` out as well if you pass `step`.
        optimizer: A class of `torch.optim` or its name, such as ``"adamw"``, with `lr`;
            or a function that creates an optimizer from a list of the trainable
            parameters, or from the model, if its argument is called ``module`` or
            ``model``. Required. It may change between fits: new hyperparameters take
            effect and the state is kept; another class, other parameters, or an option
            that needs other state, such as amsgrad, resets the state.
        lr: Learning rate of an optimizer passed as a class or a name, > 0; None: the
            default of the class. For other options, pass a `functools.partial` of the
            class, or a function.
        master: Training master, which decides how replicas exchange updates.
        client: A synchronous `distributed.Client`, not an address; None: the default
            client, else a temporary `LocalCluster`; False: no cluster, see above.
        device: Device of the replicas: ``"cuda"``: the worker's CUDA devices, divided
            evenly among its replicas; ``"auto"``: the same, or the CPU without CUDA; or
            another torch device, such as ``"cpu"`` or ``"cuda:1"``.
        seed: Seed of model initialization (if `model` is a function), shuffling and
            dropout: replica i seeds torch with ``seed + i``.
        callbacks: A list of :class:`daskdl.Callback`; one alone needs no list.
        progress: Show a progress bar; None: at a terminal and in a notebook.
        autocast: dtype of the forward passes in training, under `torch.autocast`:
            ``torch.bfloat16``, or ``torch.float16`` with a `torch.amp.GradScaler` for
            each replica. Evaluation and prediction use the model's own dtype.
        accumulate: Batches of `batch_size` rows per optimizer step. With a mean loss,
            the step equals that of one large batch, even if a loss of torch or Keras
            ignores labels or has class weights.
        clip_grad_norm: Largest total norm of the gradients, > 0, applied after
            accumulation and before the optimizer step; None: no clipping.
        step: Function ``step(model, (x, y))`` that returns the mean loss of a batch, a
            scalar tensor, for models whose forward pass is not ``model(x)``. The
            function may also return ``(loss, logs)``, or a dict with ``"loss"``, to log
            other numbers or scalar tensors of the batch: their means over the examples
            become columns of the history, `val_NAME` on validation data. Validation and
            evaluation report only the loss and these means.
        scheduler: Function that creates a `torch.optim.lr_scheduler.LRScheduler` from
            an optimizer. At the end of an epoch, all replicas continue from the most
            advanced schedule.
        scheduler_every: Step the scheduler after each ``"epoch"``, or each ``"step"``
            of a replica.
        scheduler_monitor: Column of the history that `ReduceLROnPlateau` gets, see
            `monitor` of :class:`~daskdl.EarlyStopping`; None: ``"val_loss"``, or
            ``"loss"`` without validation data.
        telemetry_every: Steps of a replica per row of `history.steps`; ``"auto"``: 10,
            or as many as keep the rows below 1 % of the time; None: no rows.
        transform: Function that maps a batch (x, y) of tensors, or of tuples and dicts
            of tensors, to a batch, such as a fitted `daskdl.data.Standardize`. It runs
            on the worker, on every batch for training, evaluation and prediction; y is
            None without labels.
        metrics: Metrics of the validation data in each fit, `val_NAME` in the history;
            also the default of `metrics` in :meth:`evaluate`.
        max_loss_rise: Largest rise of a replica's loss, in units of
            ``max(1, |first loss|)``, above its first loss; if the loss stays higher,
            the fit ends with a `DivergedError`. None: no limit.

    Attributes:
        model_: The trained model, an ordinary module on the CPU, in evaluation mode.
        optimizer_: Optimizer of `model_`, with the replicas' averaged state.
        scheduler_: Scheduler of `optimizer_`, or None; the next fit continues from it.
        history_: The rows of the last fit.
        classes_: Names of the labels 0, 1, ..., if the data of the last fit name them;
            string labels are numbered in this order.

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
    # Required; it has a default because `loss`, before it, has one.
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

    if not TYPE_CHECKING:  # a type checker would take any attribute for granted

        def __getattr__(self, name: str) -> Any:
            if name in ("model_", "optimizer_", "scheduler_", "history_"):
                problem = f"the trainer has no {name} yet; call fit first"
            else:
                problem = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(problem, name=name, obj=self)

    def _repr_html_(self) -> str:
        """Render the arguments that are not the defaults, and the result."""
        rows = []
        for argument in fields(self):
            value = getattr(self, argument.name) if argument.init else None
            make = argument.default_factory
            default = argument.default if make is MISSING else make()
            if argument.init and (argument.name == "model" or value != default):
                rows.append((argument.name, display_name(value)))
        if hasattr(self, "history_"):
            rows.append(("history_", repr(self.history_)))
        return report.table(rows)

    def __post_init__(self) -> None:
        check_client(self.client)
        compiled = Compiled.of(self.model)
        if compiled is not None and self.loss is None and self.step is None:
            self.loss = compiled.loss
        self.loss = resolved_loss(self.loss)
        if compiled is not None:
            if self.optimizer is None and compiled.optimizer is not None:
                self.optimizer = compiled.optimizer
            if self.metrics is None and self.step is None:
                self.metrics = compiled.metrics_beside(self.loss)
        if isinstance(self.callbacks, Callback):
            self.callbacks = [self.callbacks]
        self._spec()
        self._state = FitState()

    @_with_hints
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
        name: str | None = None,
    ) -> History:
        """Train the model; later calls continue from `model_` and unsent residuals.

        Args:
            X: Inputs, rows first: numpy arrays, torch tensors, pandas and pyarrow
                tables, `dask.array`, `dask.dataframe`, or tuples and dicts of these,
                which are passed to the model by position and by keyword if its
                ``forward`` accepts them, otherwise as one argument.
                Or inputs and labels together: `dask.bag`, lists of Delayed objects
                and futures, torch datasets, a `DataLoader`, paths and URLs,
                `daskdl.data` sources; see the page on data. A list has one item per
                example.
            y: Labels of the same length and types; strings become class numbers.
            epochs: Number of passes over the data, >= 1.
            batch_size: Rows per batch of each replica, >= 1. None: those of a
                `DataLoader`, or 32.
            validation: Pair (X, y), or data that include labels; the agreed model is
                scored on them after each epoch, or in the epochs of an
                :class:`~daskdl.Evaluate`. Or a fraction of the rows, such as 0.1, drawn
                with the trainer's seed and excluded from training.
            sample_weight: Weight of each row in the loss, >= 0, for arrays and tables:
                an array, tensor or series, in memory or of Dask. The loss of a step,
                and of an epoch in the history, is the sum of weight * loss over the sum
                of the weights. `validation` may then be (X, y, sample_weight); a
                fraction of the rows keeps the weights.
            shuffle: Draw a new random order for each epoch, from the seed. None: as in
                a `DataLoader`, else True.
            drop_last: Drop incomplete batches, at the end of a replica's epoch and
                before rows of another shape; `examples` in the history excludes them.
                None: as in a `DataLoader`, else False.
            transform: Applied to each batch before the trainer's own transform, also to
                batches of `validation`.
            label: Column of a table, or key of dicts, that has the labels, also in
                `validation`; all other columns or keys are inputs.
            on_bad_batch: What to do with parts that cannot be read: ``"raise"`` an
                error, or ``"skip"`` them and count them in `history_`.
            prefetch: Number of batches to load ahead, in whole parts and at least the
                next part; 0: no prefetching.
            approach: ``"direct"``; or ``"export"``, which first packs the rows, reads
                the packed files in all epochs, and deletes them at the end;
                ``daskdl.export.url`` in Dask's configuration sets the folder.
            resume: URL of a checkpoint, or of the folder of a
                :class:`~daskdl.Checkpoint`, whose newest checkpoint is used; or a
                `Checkpoint`, for a URL that needs `storage_options`. Training continues
                from the checkpoint instead of from `model_`, and `epochs` includes the
                epochs before the checkpoint. True: the folder of the `Checkpoint` among
                `callbacks`; if it has no checkpoint, the fit starts from `model_`.
            name: Name of this fit on the dashboard, in logs, metrics and reports, such
                as ``"resnet-lr3"``. It need not be unique. None: the model's class and
                the time.

        Returns:
            One row for each epoch, as in `history_`.

        Raises:
            SaveError: If there is no checkpoint to resume, or one cannot be written.
            DataError: If the data cannot be used. This and the next two errors are
                raised before any worker is used, unless the check needs loaded data.
            ModelError: If model, loss, step or optimizer cannot be used.
            OptionError: If another argument cannot be used.
            ReplicaError: If the user's code raised an exception on a worker.
            DivergedError: If the loss or a parameter became NaN or infinite, or the
                loss rose too far.
            RunError: If the run ended early for another reason. After this error and
                the two above, `model_` is the last state that all replicas agreed on.
                If all replicas or the scheduler were lost, also with a
                WaitTimeoutError, `model_` is the latest such state that the client
                received; a note of the error identifies it.
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
            name=name,
        )
        if sample_weight is not None:
            spec, y = spec.weighted(), Weighted(y, sample_weight)
        plan = resume_plan(resume, self.callbacks)
        model, state = getattr(self, "model_", None), self._state
        if plan is not None:
            model = None
            state = FitState(
                epochs=plan.epochs_before,
                columns=plan.columns,
                scaled_by=plan.scaled_by,
            )
        spec = replace(spec, read=_compared_with(state, spec.read))
        sources = spec.sources(X, y, validation, self.classes_)
        if model is None:
            model = starting_model(self.model, self.seed)
        run = FitRun(spec, model, state, plan)
        with (
            client_or_process(self.client, announces=run.shows_progress) as client,
            run.prepare(sources, client),
        ):
            self.history_, self.classes_ = run.history, run.classes
            try:
                run.train()
            finally:  # keeps the trained state if the fit ends early
                self._state = run.load_result_(model)
                if run.result is not None:
                    self._set_results(model)
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
        """Return the number of optimizer steps of each replica in a fit, for schedules.

        The number is exact for one replica, and with ``max_staleness=0`` (the last
        replica may take fewer). Otherwise it assumes that all replicas are equally
        fast: a faster one takes more steps, and ``scheduler_every="step"`` counts the
        steps of the replica with the most. Rows of several shapes, and waits for data,
        lead to incomplete batches and so to more steps.

        Args:
            X: Inputs, as for :meth:`fit`. If its length is unknown, each part of the
                data is loaded once to count the rows.
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
        read = replace(spec.read, columns=self._state.columns)
        source = source_of(X, None, read, labelled=False)
        with client_or_process(self.client) as client:
            return steps_of_replica(spec, source, client, validation)

    @property
    def feature_names_in_(self) -> Sequence[str] | Mapping[str, Sequence[str]] | None:
        """Names of the columns of X, in the order in which the model was trained.

        For several tables, a dict of the names by place, such as ``"X['left']"``. None
        before the first fit, and if X had no named columns, such as an array.
        """
        columns = self._state.columns or {}
        inputs = {place: n for place, n in columns.items() if place.startswith("X")}
        return inputs.get("X", inputs or None)

    def reset(self) -> None:
        """Forget all fits, so that the next fit begins like the first one.

        The next fit starts from the argument `model`; if this is a function, the fit
        calls it with the same seed. The state of your own callbacks is not reset.
        """
        for name in ("model_", "optimizer_", "scheduler_", "history_"):
            vars(self).pop(name, None)
        self.classes_, self._state = None, FitState()

    @_with_hints
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
                none, accuracy for labels that are classes, or 0 and 1 with a binary
                loss. A metric is a name such as ``"accuracy"``, ``"f1"`` or ``"r2"``; a
                function ``f(y_true, y_pred)``, such as those of scikit-learn; a preset,
                ``"classification"``, ``"binary"``, ``"multilabel"``, ``"regression"``
                or ``"calibration"``, or one of their classes in `daskdl.metrics`; a
                torchmetrics metric or `MetricCollection`; a mapping of names to
                functions and metrics, or of outputs to lists of metrics; or a list of
                these.
            sample_weight: Weight of each row in loss and accuracy, >= 0, for arrays
                and tables, see :meth:`fit`; cannot be combined with `metrics`, and the
                trainer's own metrics are skipped.
            batch_size: Rows per forward pass. None: those of a `DataLoader`, or 64.
            transform: See :meth:`fit`.
            label: Column, or key, of `X` that has the labels, see :meth:`fit`.
            on_bad_batch: Treatment of parts that cannot be read, see :meth:`fit`.

        Returns:
            A dict of all metrics over all rows, which prints as a report; with a
            `step`, the dict contains only ``"loss"`` and the logs of the step.

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
            device=self.device,
            classes=self.classes_,
        )

    def score(self, X: Any, y: Any = None, **options: Any) -> float:
        """Return the accuracy over all rows if labels are classes, otherwise R2.

        Args:
            X: See :meth:`evaluate`.
            y: See :meth:`evaluate`.
            options: Other arguments of :meth:`evaluate`, except for `metrics`.
        """
        from daskdl.evaluation.metric_names import SCORE

        return float(self.evaluate(X, y, metrics=SCORE, **options)["score"])

    @_with_hints
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
            key: Keys of the scores: the name of a table column, which is then not an
                input; a sequence with one value per row, for all data but bags and
                lists of Delayed objects, and dataframes of Dask; a one-dimensional
                `dask.array`, if the data are one or a dataframe of Dask; for bags and
                lists of Delayed lists, whether their items are pairs (key, example).
                None: detected for bags and lists, as with `keyed` of :meth:`predict`;
                no keys for other data.
            regularization: Add the penalty of weight decay and of a Keras model's
                regularizers, which is the same number for each example.
            batch_size: Rows per forward pass. None: those of a `DataLoader`, or 64.
            transform: See :meth:`fit`.
            label: Column, or key, of `X` that has the labels, see :meth:`fit`.
            on_bad_batch: Treatment of parts that cannot be read. With ``"skip"``, the
                scores of a part, or of the bad files in a part of several files, are
                NaN if the number of rows is known; otherwise they are left out.

        Returns:
            One float64 number per example, in order: a tensor for tensors, a pandas
            series for pandas, a numpy array for other data in memory; for Dask's
            collections a lazy `dask.array`, series, bag, or list of Delayed. With keys,
            a series indexed by key, or a bag or lists of pairs (key, score).

        Raises:
            OptionError: If an option does not apply to the data, or if the optimizer's
                weight decay, such as AdamW's, is not a penalty in the loss.
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
            device=self.device,
            key=key,
            penalty=penalty,
            classes=self.classes_,
        )

    @_with_hints
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
                detected from the first item; a string, bytes, a UUID or a date is a
                key, and so is an integer before arrays, or a tuple of these. For files,
                True returns a lazy `dask.bag` of pairs (key, output): the key is the
                path or URL of the file if each file is one example, else a pair of the
                path or URL and the row in the file.
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
            device=self.device,
            names=self.classes_,
        )

    def predict_proba(self, X: Any, **options: Any) -> Any:
        """Return the probability of each class for every row, as `predict` does.

        Args:
            X: See :meth:`predict`.
            options: Other arguments of :meth:`predict`, except for `postprocess`.

        Returns:
            (n, classes); with a binary loss, (n, 2) for one score per row, and
            (n, labels) for the probability of each of several labels.

        Raises:
            OptionError: If the scale of the loss's scores is unknown.
        """
        if labels_and_scale(self._objective)[1] is None:
            raise OptionError(
                "predict_proba needs a classification loss, such as CrossEntropyLoss "
                f"or BCEWithLogitsLoss, got {self.loss!r}; give a loss of your own an "
                "attribute scale: 'logits', 'probabilities' or 'log_probabilities'"
            )
        convert = functools.partial(class_probabilities, loss=self._objective)
        return self.predict(X, postprocess=convert, **options)

    @_with_hints
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
        predictor, preferably with a ``with`` statement. For errors, see
        :class:`daskdl.Predictor`.

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
            device=self.device,
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
            model: Replaces the saved argument; None: keep it.
            loss: Replaces the saved argument; None: keep it.
            optimizer: Replaces the saved argument and the saved `lr`; None: keep them.
            client: See :class:`Trainer`.
            trusted: Names of modules or packages, such as ``["my_nets"]``, whose
                classes and functions may be imported and called with saved arguments.
            storage_options: fsspec options of `url`, such as credentials.
            others: Other arguments of :class:`Trainer`; they replace the saved ones.

        Raises:
            SaveError: If the save is missing, damaged, foreign or too new.
            OptionError: If arguments must be passed; the message names each of them,
                with the reason.
        """
        replaced = {"model": model, "loss": loss, "optimizer": optimizer}
        passed: dict[str, Any]
        passed = {n: value for n, value in replaced.items() if value is not None}
        passed |= others
        if optimizer is not None:
            passed.setdefault("lr", None)
        names = cls._argument_names()
        state = trainer_state.load(url, names, passed, trusted, storage_options)
        trainer = cls(client=client, **state.arguments)
        trainer._state = state.fit_state
        trainer.history_, trainer.classes_ = state.history, state.classes
        trainer._set_results(state.model)
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
        return objective_of(self.loss, self.step)

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
        return X, _compared_with(self._state, read)

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
        """Return the data, or the dataset of a `DataLoader`, and the fit's options."""
        X, batches = loader_arguments(
            X,
            {"batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last},
            {"batch_size": 32, "shuffle": True, "drop_last": False},
        )
        transform = compose(transform, self.transform)
        read = ReadOptions(batches.pop("batch_size"), transform, on_bad_batch, label)
        return X, self._spec(read=read, **batches, **options)

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

    def _set_results(self, model: nn.Module) -> None:
        trained = self._state.optimizer
        if trained is not None:
            self.model_, self.optimizer_ = model.eval(), trained.optimizer
            self.scheduler_ = trained.rate.scheduler


def _compared_with(state: FitState, read: ReadOptions) -> ReadOptions:
    """Add the columns and normalizers of the last fit, to compare new rows with."""
    return replace(read, columns=state.columns, scaled_by=state.scaled_by)


Trainer.__init__ = _with_hints(Trainer.__init__)  # type: ignore[method-assign]
