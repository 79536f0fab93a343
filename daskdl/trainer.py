"""What users call: :class:`Trainer`, :func:`evaluate` and :func:`predict`."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, Self

import torch
from distributed import Client
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from daskdl.callbacks import Callback
from daskdl.cluster import check_installed, check_outlives, client_or_process
from daskdl.data.batching import Transform
from daskdl.data.checks import check_same_classes
from daskdl.data.collections import is_lazy
from daskdl.data.formats.loaders import Loader
from daskdl.data.options import Approach, OnBad, ReadOptions, one_of
from daskdl.data.sources import source_of
from daskdl.errors import OptionError
from daskdl.evaluation import evaluate as evaluate_source
from daskdl.fitted import saves
from daskdl.fitted.arguments import NAMES
from daskdl.fitted.fitted import TrainerState
from daskdl.history import History
from daskdl.inference.options import OutputOptions, Postprocess
from daskdl.inference.prediction import predict as predict_with
from daskdl.metrics.evaluation import Evaluation
from daskdl.metrics.wanted import Wanted
from daskdl.objective import Loss, Objective, OwnStep, objective_of
from daskdl.per_example.rehearsal import Given as GivenRows
from daskdl.per_example.rehearsal import Scores
from daskdl.per_example.scores import score_examples, worst_examples
from daskdl.per_example.weight_decay import penalty_of
from daskdl.per_example.worst import WorstExamples
from daskdl.serving.predictor import Predictor
from daskdl.training.base import TrainingMaster
from daskdl.training.checkpointing import resume_plan
from daskdl.training.epoch_control import Scheduling
from daskdl.training.fit import FitRun
from daskdl.training.fit_spec import FitSpec
from daskdl.training.fit_state import FitState, starting_model
from daskdl.training.gradient_sharing import GradientSharing
from daskdl.training.optimizer_step import Stepping


def evaluate(
    model: nn.Module,
    data: Any,
    labels: Any = None,
    *,
    loss: Loss | None = None,
    metrics: Any = None,
    client: Client | Literal[False] | None = None,
    batch_size: int = 64,
    transform: Transform | None = None,
    loader: Loader | Callable[..., Any] | None = None,
    collate_fn: Callable[..., Any] | None = None,
    on_bad_batch: OnBad = "raise",
) -> Evaluation:
    """Evaluate any model in one pass, as :meth:`Trainer.evaluate` does its own.

    Args:
        model: Any module; not changed, whatever mode it is in.
        data: Inputs, or inputs and labels, of the kinds that ``Trainer.fit`` takes.
        labels: Likewise.
        loss: ``loss(model(x), labels)``, which also says what the outputs are; None:
            it is not measured, and the first outputs show what they are.
        metrics: See `Trainer.evaluate`.
        client: A synchronous `distributed.Client`; None: the default one, else a
            `LocalCluster` that is closed again; False: in this process.
        batch_size: See `Trainer.evaluate`, as those that follow.
        transform: Of each batch.
        loader: For files.
        collate_fn: For datasets.
        on_bad_batch: What to do about unreadable parts.

    Returns:
        A dict of all measures over all rows, which prints as a report.

    Raises:
        DataError: If the data cannot be used.
        ModelError: If the model does not fit them.
        OptionError: If another argument cannot be used, or there is nothing to
            measure.

    Example:
        >>> import torch
        >>> rows, labels = torch.eye(2), torch.tensor([0, 1])
        >>> evaluate(nn.Identity(), rows, labels, client=False)
        {'accuracy': 1.0}
    """
    read = ReadOptions(batch_size, transform, loader, collate_fn, on_bad_batch)
    return _evaluate(model, data, labels, loss, metrics, client, read)


def _evaluate(
    model: nn.Module,
    data: Any,
    labels: Any,
    objective: Objective | None,
    metrics: Any,
    client: Client | Literal[False] | None,
    read: ReadOptions,
    classes: Sequence[str] | None = None,
) -> Evaluation:
    wanted = Wanted.of(metrics, objective, classes)
    labelled = not isinstance(objective, OwnStep)
    source = source_of(data, labels, read.source(None, labelled))
    check_same_classes(source, classes)
    with client_or_process(client) as found:
        return evaluate_source(model, objective, source, read, found, wanted)


def predict(
    model: nn.Module,
    data: Any,
    client: Client | Literal[False] | None = None,
    *,
    batch_size: int = 64,
    output: str | os.PathLike[str] = "same",
    postprocess: Postprocess | None = None,
    keyed: bool | None = None,
    transform: Transform | None = None,
    loader: Loader | Callable[..., Any] | None = None,
    collate_fn: Callable[..., Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """Apply any model to every row, as :meth:`Trainer.predict` does its own.

    Args:
        model: Any module; not changed, whatever mode it is in.
        data: Inputs, of the kinds that ``Trainer.fit`` takes.
        client: A synchronous `distributed.Client`; None: the default one, else a
            `LocalCluster` that is closed again; False: in this process.
        batch_size: See `Trainer.predict`, as those that follow.
        output: ``"same"``, or a folder to write to.
        postprocess: Of the outputs of each batch.
        keyed: Whether examples are pairs (key, x).
        transform: Of each batch.
        loader: For files.
        collate_fn: For datasets.
        storage_options: Of the file system of `output`.

    Returns:
        The outputs in order, lazy if the data are; or `Predictions`.

    Raises:
        DataError: If the data cannot be used.
        ModelError: If the model does not fit them.
        OptionError: If another argument cannot be used.

    Example:
        >>> import numpy as np
        >>> predict(nn.Flatten(), np.zeros((2, 3, 4)), client=False).shape
        (2, 12)
    """
    read = ReadOptions(batch_size, transform, loader, collate_fn)
    wanted = OutputOptions(output, postprocess, keyed, storage_options)
    return _predict(model, data, client, read, wanted)


def _predict(
    model: nn.Module,
    X: Any,
    client: Client | Literal[False] | None,
    read: ReadOptions,
    wanted: OutputOptions,
) -> Any:
    if is_lazy(X) and not wanted.writes:
        check_outlives(client)
    with client_or_process(client) as found:
        if found is not False:
            check_installed(found)
        return predict_with(model, X, read, found, wanted)


@dataclass(eq=False)
class Trainer:
    """Train a PyTorch model on a Dask cluster, or with threads of this process.

    With ``client=False`` there is no cluster and no scheduler: the replicas are
    ``replicas_per_worker`` threads of this process; see the page on how it works.

    Args:
        model: An `nn.Module`, which is copied, or a function that returns one, and is
            called again for each copy of one that cannot be pickled; also of Keras, see
            `daskdl.keras`.
        loss: ``loss(model(x), y)``, a scalar tensor. Left out if `step` is given.
        optimizer: Makes a `torch.optim.Optimizer` from a list of the trainable
            parameters; required. It may be replaced between fits: new hyperparameters
            take effect and the state stays; with another class, other parameters, or an
            option that needs other state, such as amsgrad, the state begins anew.
        master: The way of training.
        client: A synchronous `distributed.Client`; None: the default one, else a
            `LocalCluster` that is closed again; False: none, see above.
        device: Where replicas compute: ``"auto"`` is CUDA where a worker has it, with
            its devices divided evenly among its replicas, else the CPU; or a torch
            device.
        seed: For initialising the model (if it is a function), shuffling and dropout:
            replica i seeds torch with ``seed + i``.
        callbacks: See :class:`daskdl.Callback`.
        progress: Show a bar while fitting; None: if standard error is a terminal.
        autocast: Training computes forward passes under `torch.autocast` in this
            dtype, ``torch.bfloat16``, or ``torch.float16`` with a
            `torch.amp.GradScaler` for each replica. Evaluation and prediction compute
            in the model's own dtype.
        accumulate: Batches of `batch_size` rows for each optimizer step; with a mean
            loss the step is that of one large batch.
        clip_grad_norm: Largest norm of all gradients together, > 0, after
            accumulation and before the optimizer; None: any.
        step: ``step(model, (x, y))`` returns the mean loss of a batch, a scalar tensor,
            for models whose forward pass is not ``model(x)``. Validation and evaluation
            then have the loss only.
        scheduler: Makes a `torch.optim.lr_scheduler.LRScheduler` from an optimizer. At
            the end of an epoch all replicas continue from the most advanced one, and
            `ReduceLROnPlateau` gets the validation loss, or the mean training loss.
        scheduler_every: Step it after each ``"epoch"``, or ``"step"`` of a replica.
        telemetry_every: Steps of a replica for each row of `history.steps`; ``"auto"``:
            10, or more where rows would take 1 % of the time; None: no rows.
        transform: Callable of a batch (x, y) of tensors, or of tuples and dicts of
            them, that returns such a batch; applied to every batch that this trainer
            trains on, scores or predicts, on the worker; y is None where there are
            no labels. A fitted `daskdl.data.Standardize`, for one.
        max_loss_rise: A fit ends when a replica's loss stays above its first one by
            this many times the first one, or 1 if that is larger; None: it does not.

    Attributes:
        model_: The trained model, an ordinary module on the CPU.
        optimizer_: Its optimizer, with the replicas' averaged state.
        scheduler_: Of that optimizer, or None; the next fit goes on from it.
        history_: The rows of the last fit.
        classes_: Names of the labels 0, 1, ... if the data of the last fit have any.

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
        self._spec()
        self._state = FitState()

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
            drop_last: Leave out incomplete batches, at the end of a replica's epoch and
                before rows of another shape. `examples` in the history does not count
                them.
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
                newest one there, or from this one, instead of `model_`, and train until
                `epochs` are done, including those before it. True: where the one among
                `callbacks` writes, if there is one yet.

        Returns:
            One row for each epoch, as in `history_`.

        Raises:
            SaveError: If there is no checkpoint to resume, or one cannot be written.
            DataError: If the data cannot be trained on. What can be checked without
                loading data is checked before a worker is touched.
            ModelError: If model, loss, step or optimizer cannot be used, likewise.
            OptionError: If another argument cannot be used, likewise.
            ReplicaError: If the user's code raised on a worker.
            DivergedError: If the loss, or a parameter, became NaN or infinite or ran
                away.
            RunError: If the run ended early for another reason. In these three cases
                `model_` is the state that all replicas agreed on last. If all replicas
                or the scheduler were lost, also with a WaitTimeoutError, it is the
                newest such state that had reached the client; a note says which.
        """
        spec = self._spec(
            read=self._read(batch_size, transform, loader, collate_fn, on_bad_batch),
            epochs=epochs,
            shuffle=shuffle,
            drop_last=drop_last,
            prefetch=prefetch,
            approach=approach,
        )
        resumed = resume_plan(resume, self.callbacks)
        sources = spec.sources(X, y, validation)
        model = getattr(self, "model_", None) if resumed is None else None
        if model is None:
            model = starting_model(self.model, self.seed)
        run = FitRun(spec, model, self._state, resumed)
        with client_or_process(self.client) as client, run.prepare(sources, client):
            self.history_, self.classes_ = run.history, run.classes
            try:
                run.train()
            finally:  # what was trained until it ended early is not lost
                self._state = run.settle_(model)
                if run.result is not None:
                    self._show(model)
        return self.history_

    def evaluate(
        self,
        data: Any,
        labels: Any = None,
        *,
        metrics: Any = None,
        batch_size: int = 64,
        transform: Transform | None = None,
        loader: Loader | Callable[..., Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
        on_bad_batch: OnBad = "raise",
    ) -> Evaluation:
        """Evaluate `model_` in one pass, on the cluster or in this process.

        The result does not depend on how the data are partitioned; see the page on
        evaluation.

        Args:
            data: Inputs, or inputs and labels, of the kinds that :meth:`fit` takes as
                `X`.
            labels: As it takes them as `y`.
            metrics: What is measured beside the loss: ``"classification"``,
                ``"binary"``, ``"multilabel"``, ``"regression"``, ``"calibration"``, or
                one of their classes in `daskdl.metrics`; metrics of torchmetrics, one,
                a `MetricCollection`, or a mapping of names to them; or a sequence of
                all these. None: accuracy, if labels are class indices.
            batch_size: Rows per forward pass.
            transform: See :meth:`fit`, as those that follow.
            loader: For files.
            collate_fn: For datasets.
            on_bad_batch: What to do about parts that cannot be read.

        Returns:
            A dict of all measures over all rows, which prints as a report; with a
            `step` it has ``"loss"`` only.

        Raises:
            DataError: If the data cannot be used, or there is a label that the loss or
                a metric does not accept.
            ModelError: If the model, its outputs, or the loss cannot be.
            OptionError: If another argument cannot.
        """
        read = self._read(batch_size, transform, loader, collate_fn, on_bad_batch)
        return _evaluate(
            self._trained_model(),
            data,
            labels,
            self._objective,
            metrics,
            self.client,
            read,
            self.classes_,
        )

    def score_examples(
        self,
        data: Any,
        labels: Any = None,
        *,
        key: Any = None,
        regularization: bool = False,
        batch_size: int = 64,
        transform: Transform | None = None,
        loader: Loader | Callable[..., Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
        on_bad_batch: OnBad = "raise",
    ) -> Any:
        """Compute the loss of each example, that of a batch which has only it.

        Args:
            data: Inputs, of the kinds that :meth:`fit` takes.
            labels: Likewise.
            key: Names the scores. The name of a column of a table, which is then no
                input; a sequence with a value for each row of data in memory, of a
                dataset or of files; a `dask.array` of one axis where the data are one.
                For a bag, whether it is of pairs (key, example), as `keyed` of
                :meth:`predict`. None: they come without.
            regularization: Add what weight decay, and regularisers of a Keras model,
                stand for: the same number for each.
            batch_size: Rows per forward pass.
            transform: See :meth:`fit`, as those that follow.
            loader: For files.
            collate_fn: For datasets.
            on_bad_batch: What to do about parts that cannot be read. With ``"skip"``
                their scores are NaN where the number of rows is known, else left out.

        Returns:
            One float64 number per example, in order: a tensor of tensors, a series of
            pandas, and of all else in memory a numpy array; of Dask's collections a
            lazy `dask.array`, series, bag, or list of Delayed. With keys a series
            indexed by them, or a bag of pairs (key, score).

        Raises:
            OptionError: If an option does not go with the data, or if the optimizer's
                weight decay is no term of the loss, as AdamW's.
        """
        read = self._read(batch_size, transform, loader, collate_fn, on_bad_batch)
        model = self._trained_model()
        penalty = penalty_of(model, self.optimizer_) if regularization else 0.0
        if is_lazy(data):
            check_outlives(self.client)
        how = Scores(model, self._objective, read, penalty, self.classes_)
        with client_or_process(self.client) as client:
            return score_examples(GivenRows(data, labels, key), how, client)

    def errors(
        self,
        data: Any,
        labels: Any = None,
        *,
        top: int = 50,
        wrong_only: bool = False,
        key: Any = None,
        batch_size: int = 64,
        transform: Transform | None = None,
        loader: Loader | Callable[..., Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
        on_bad_batch: OnBad = "raise",
    ) -> WorstExamples:
        """Find the examples with the largest losses, and where they came from.

        Args:
            data: Inputs, of the kinds that :meth:`fit` takes.
            labels: Likewise.
            top: How many to return, >= 1; no process keeps more of a part.
            wrong_only: Leave out those that were predicted right; for labels that are
                one class index for each row.
            key: See :meth:`score_examples`.
            batch_size: Rows per forward pass.
            transform: See :meth:`fit`, as those that follow.
            loader: For files.
            collate_fn: For datasets.
            on_bad_batch: What to do about parts that cannot be read.

        Returns:
            The worst first; a loss that is NaN is the worst. Of equal ones the first
            in the data comes first. Rows of which the loss ignores all labels are
            passed over.

        Raises:
            OptionError: If an option does not go with the data.
        """
        read = self._read(batch_size, transform, loader, collate_fn, on_bad_batch)
        model = self._trained_model()
        how = Scores(model, self._objective, read, classes=self.classes_)
        given = GivenRows(data, labels, key)
        with client_or_process(self.client) as client:
            return worst_examples(given, how, client, top=top, wrong_only=wrong_only)

    def predict(
        self,
        X: Any,
        *,
        batch_size: int = 64,
        output: str | os.PathLike[str] = "same",
        postprocess: Postprocess | None = None,
        keyed: bool | None = None,
        transform: Transform | None = None,
        loader: Loader | Callable[..., Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Apply `model_(x)` to every row, on the cluster or in this process.

        Args:
            X: Inputs, of the kinds that :meth:`fit` takes; labels that come with them
                are passed over. In a bag, and in a list of Delayed objects that are
                lists of examples, these may be pairs (key, x), and of any shapes.
            batch_size: Rows per forward pass.
            output: ``"same"``: what came in comes out. Or a folder, as a URL of fsspec
                or a path, that the workers write to, part by part: Parquet for a
                `dask.dataframe`, else safetensors. A run that was interrupted goes on
                with the parts that are missing when it is begun again.
            postprocess: Of the outputs of each batch, tensors, in tuples or dicts if
                the model returns such; returns tensors with the same rows, or such of
                them. It runs on the worker.
            keyed: Whether the examples of bags and lists are pairs (key, x); None: they
                are if the first begins with text, bytes, a UUID or a date, or with a
                whole number or a tuple of these before arrays.
            transform: See :meth:`fit`, as those that follow; y is None for it.
            loader: For files.
            collate_fn: For datasets.
            storage_options: Of the file system of `output`, for fsspec.

        Returns:
            The outputs in order. Of Dask's collections, lazy ones of the same kind, in
            the same partitions and with the same keys or index; a tensor of tensors,
            and of all else a numpy array. Where the outputs are tuples or dicts, such
            of these; but of a `dask.dataframe`, a dict of outputs with one number for
            each row is one dataframe with these columns. Its columns are `classes_`
            where there are as many outputs. With a folder, :class:`Predictions`.

        Raises:
            OptionError: If it would be lazy, and no cluster is there to compute it; or
                if the folder has predictions of another model, data or options.
        """
        read = self._read(batch_size, transform, loader, collate_fn)
        wanted = OutputOptions(
            output, postprocess, keyed, storage_options, self.classes_
        )
        return _predict(self._trained_model(), X, self.client, read, wanted)

    def predictor(
        self,
        *,
        replicas: int = 2,
        batch_limit: int = 32,
        wait_ms: float = 2.0,
        queue_limit: int = 1024,
        transform: Transform | None = None,
    ) -> Predictor:
        """Serve `model_` to calls from many threads, on the cluster or here.

        It serves the model as it is now; see :class:`daskdl.Predictor`, also for its
        errors. Close it, best by ``with``.

        Args:
            replicas: Models in the workers' memory.
            batch_limit: Rows of a batch, and of one call.
            wait_ms: How long a call waits for others at most.
            queue_limit: Rows that may wait for a replica.
            transform: See :meth:`fit`; y is None for it.
        """
        return Predictor(
            self._trained_model(),
            replicas=replicas,
            batch_limit=batch_limit,
            wait_ms=wait_ms,
            queue_limit=queue_limit,
            transform=one_of(transform, self.transform),
            client=self.client,
        )

    def save(self, url: Any, optimizer: bool = True) -> None:
        """Save everything needed to predict, evaluate and continue fitting.

        Tensors become safetensors files, everything else JSON; nothing is pickled. An
        earlier save is replaced atomically, once all files are written.

        Args:
            url: A folder: a path, or a URL of fsspec such as ``s3://bucket/run-17``.
            optimizer: Also save the state of optimizer, scheduler, thresholds and
                residuals; without it they begin anew in the next fit.

        Raises:
            OptionError: If there is no `model_` yet, or something cannot be saved.
            SaveError: If nothing can be written there.
        """
        self._trained_model()
        arguments = {name: getattr(self, name) for name in NAMES}
        state = TrainerState(
            arguments, self.model_, self._state, self.history_, self.classes_
        )
        saves.save(state, url, optimizer)

    @classmethod
    def load(
        cls,
        url: Any,
        *,
        client: Client | Literal[False] | None = None,
        trusted: Sequence[str] = (),
        **passed: Any,
    ) -> Self:
        """Load a trainer that continues where the saved one was.

        Executes nothing that the files contain and imports nothing that they name. It
        calls only known classes and functions; the page on saving lists them.

        Args:
            url: Where it was saved.
            client: See the class.
            trusted: Names of modules or packages, such as ``["my_nets"]``: what a save
                names there is imported, and called with its saved arguments.
            passed: Other arguments of the class, instead of the saved ones.

        Raises:
            SaveError: If there is no save, or it is damaged, foreign or too new.
            OptionError: Naming each argument that has to be passed, and why.
        """
        state = saves.load(url, passed, trusted)
        trainer = cls(client=client, **state.arguments)
        trainer._state = state.fit_state
        trainer.history_, trainer.classes_ = state.history, state.classes
        trainer._show(state.model)
        return trainer

    def _trained_model(self) -> nn.Module:
        if not hasattr(self, "model_"):
            raise OptionError("the trainer has no model_ yet; call fit first")
        return self.model_

    @property
    def _objective(self) -> Objective:
        objective: Objective = objective_of(self.loss, self.step)
        return objective

    def _read(
        self, batch_size: int, transform: Transform | None, *how: Any
    ) -> ReadOptions:
        return ReadOptions(batch_size, one_of(transform, self.transform), *how)

    def _spec(self, **fit: Any) -> FitSpec:
        """Check the options of this trainer, and those of one fit."""
        return FitSpec(
            self._objective,
            self.optimizer,
            self.master,
            Stepping(self.autocast, self.accumulate, self.clip_grad_norm),
            Scheduling(self.scheduler, self.scheduler_every),
            self.device,
            self.seed,
            self.callbacks,
            self.progress,
            self.telemetry_every,
            self.max_loss_rise,
            **fit,
        )

    def _show(self, model: nn.Module) -> None:
        trained = self._state.optimizer
        if trained is not None:
            self.model_, self.optimizer_ = model, trained.optimizer
            self.scheduler_ = trained.rate.scheduler
