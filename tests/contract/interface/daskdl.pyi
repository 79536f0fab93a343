from collections.abc import Mapping, Sequence

class DaskDLError(Exception): ...
class BusyError(DaskDLError, RuntimeError): ...
class RunError(DaskDLError, RuntimeError): ...
class ChannelError(RunError): ...
class CodecError(DaskDLError, ValueError): ...
class OptionError(DaskDLError, ValueError): ...
class DataError(OptionError): ...
class DivergedError(RunError): ...
class ModelError(OptionError): ...
class ReplicaError(RunError): ...
class SaveError(DaskDLError, ValueError): ...
class WaitTimeoutError(DaskDLError, TimeoutError): ...

class ThresholdAlgorithm:
    def next_threshold(self, residual, last): ...

class AdaptiveThreshold(ThresholdAlgorithm):
    def __init__(
        self,
        initial=0.0001,
        min_density=0.0001,
        max_density=0.01,
        decay=0.9659363289248456,
    ): ...

class Callback:
    def on_fit_begin(self, fit): ...
    def on_epoch_begin(self, epoch): ...
    def on_step_end(self, step): ...
    def on_epoch_end(self, row): ...
    def on_fit_end(self, end): ...

class Checkpoint(Callback):
    def __init__(
        self,
        url,
        every="epoch",
        *,
        keep_last=3,
        keep_every=None,
        keep_best=None,
        mode="auto",
        storage_options=None,
    ): ...

class EarlyStopping(Callback):
    def __init__(
        self,
        monitor="val_loss",
        *,
        patience=None,
        min_delta=0.0,
        mode="auto",
        target=None,
        max_seconds=None,
        every=1,
        check_finite=True,
        restore_best=True,
    ): ...

class EpochBegin(tuple):
    def __init__(self, replica, epoch, replicas, learning_rate): ...

class Evaluate(Callback):
    def __init__(self, every=1): ...

class Evaluation(Mapping):
    def plot(self, kind=None): ...
    def to_dict(self): ...
    def to_json(self): ...
    def to_pandas(self, rows=None): ...

class FitBegin(tuple):
    def __init__(
        self, replicas, epochs, epochs_before, batch_size, examples, parameters
    ): ...

class FitEnd(tuple):
    def __init__(self, history, error): ...

class FixedThreshold(ThresholdAlgorithm):
    def __init__(self, value=0.001): ...

class Exchange:
    def __init__(self, context): ...
    def before_step(self, interval): ...
    def after_step(self, interval, examples): ...
    def sync(self, interval, examples, *, ended): ...
    def agreed(self): ...
    def showing_agreed(self): ...
    def stats(self): ...
    def step_stats(self): ...
    def residual_norms(self): ...
    def admit(self): ...
    def state(self): ...
    def load_(self, common, per_replica): ...
    def result(self): ...
    def leave(self): ...

class ReplicaContext:
    def __init__(
        self,
        module,
        channel,
        replica,
        members=...,
        compression=None,
        joins=False,
        optimizer=None,
        residual=None,
        untrained=None,
    ): ...

class TrainingMaster:
    def attach(self, context): ...

class GradientSharing(TrainingMaster):
    def __init__(
        self,
        threshold=...,
        residual=...,
        apply="eager",
        update_scale="mean",
        max_staleness="auto",
        exchange_every="auto",
        warmup_steps=0,
        adapt_rate=True,
        compare_models=True,
        routing="auto",
        replicas_per_worker=1,
        min_replicas=1,
        rejoin_timeout=None,
        fan_out=8,
    ): ...
    def scale(self, replicas): ...

class History(Sequence):
    def __init__(self, rows=()): ...
    def append(self, row): ...
    def column(self, name): ...
    def plot(self, *columns): ...
    def report(self, path): ...
    def to_pandas(self): ...

class ResidualPostProcessor:
    def bound(self, exchange, threshold): ...

class KeepResidual(ResidualPostProcessor): ...

class LayerMonitor(Callback):
    def __init__(self, every=100): ...

class LayerTable(Sequence):
    def __init__(self, names=()): ...
    def column(self, name): ...
    def means(self): ...
    def to_pandas(self): ...

class Network:
    def __init__(self, bandwidth_bits_per_s, latency_s): ...
    def seconds(self, nbytes): ...

class ParameterAveraging(TrainingMaster):
    def __init__(
        self,
        frequency=5,
        average_optimizer=True,
        outer=None,
        compression=None,
        replicas_per_worker=1,
        min_replicas=1,
        rejoin_timeout=None,
        fan_out=8,
    ): ...

class Plan:
    def __init__(self, rows, advice, measured, link): ...
    def to_pandas(self): ...

class Predictor:
    def __init__(
        self,
        model,
        *,
        replicas=2,
        batch_limit=32,
        wait_ms=0.0,
        queue_limit=1024,
        transform=None,
        output=None,
        client=None,
    ): ...
    def __call__(self, x, timeout_s=None): ...
    async def acall(self, x, timeout_s=None): ...
    def submit(self, x): ...
    def swap(self, model): ...
    def close(self, *, wait=True): ...
    def __enter__(self): ...

class PrintProgress(Callback):
    def __init__(self, stream=None): ...

class ResidualClipping(ResidualPostProcessor):
    def __init__(self, multiple=5.0, frequency=5): ...

class Step(tuple):
    def __init__(self, replica, epoch, number, loss, examples, learning_rate): ...
    def stop(self, reason=""): ...

class TensorBoard(Callback):
    def __init__(self, folder): ...

class Timeline(Sequence):
    def seconds(self, replica=None): ...
    def to_pandas(self): ...

class RunRecord:
    def __init__(
        self,
        began=0.0,
        seconds=...,
        options=...,
        versions=...,
        replicas=...,
        error="",
    ): ...

class StepTable(Sequence):
    def column(self, name): ...
    def to_pandas(self): ...

class Stopping:
    def __init__(
        self,
        monitor,
        reason=None,
        details="",
        scores=...,
        best_epoch=None,
        best_score=...,
        restored=False,
    ): ...

class SampledThreshold(ThresholdAlgorithm):
    def __init__(self, density=0.05): ...

class TargetSparsityThreshold(ThresholdAlgorithm):
    def __init__(self, initial=0.0001, target=0.001, decay=0.9659363289248456): ...

class Trainer:
    def __init__(
        self,
        model,
        loss=None,
        optimizer=None,
        *,
        lr=None,
        master=...,
        client=None,
        device="auto",
        seed=0,
        callbacks=(),
        progress=None,
        autocast=None,
        accumulate=1,
        clip_grad_norm=None,
        step=None,
        scheduler=None,
        scheduler_every="epoch",
        scheduler_monitor=None,
        telemetry_every="auto",
        max_loss_rise=10.0,
        transform=None,
        metrics=None,
    ): ...
    def fit(
        self,
        X,
        y=None,
        *,
        epochs=1,
        batch_size=None,
        validation=None,
        sample_weight=None,
        shuffle=None,
        drop_last=None,
        transform=None,
        loader=None,
        collate_fn=None,
        label=None,
        on_bad_batch="raise",
        storage_options=None,
        prefetch=2,
        approach="direct",
        resume=None,
    ): ...
    def steps(
        self,
        X,
        epochs=1,
        batch_size=None,
        *,
        validation=None,
        drop_last=None,
        loader=None,
        collate_fn=None,
        label=None,
        storage_options=None,
    ): ...
    def reset(self): ...
    def evaluate(
        self,
        X,
        y=None,
        *,
        metrics=None,
        sample_weight=None,
        batch_size=None,
        transform=None,
        loader=None,
        collate_fn=None,
        label=None,
        on_bad_batch="raise",
        storage_options=None,
    ): ...
    def predict(
        self,
        X,
        *,
        batch_size=None,
        output=None,
        postprocess=None,
        keyed=None,
        transform=None,
        loader=None,
        collate_fn=None,
        label=None,
        storage_options=None,
    ): ...
    def predict_proba(self, X, **options): ...
    def score(self, X, y=None, **options): ...
    def predictor(
        self,
        *,
        replicas=2,
        batch_limit=32,
        wait_ms=0.0,
        queue_limit=1024,
        transform=None,
        output=None,
    ): ...
    def score_examples(
        self,
        X,
        y=None,
        *,
        key=None,
        regularization=False,
        batch_size=None,
        transform=None,
        loader=None,
        collate_fn=None,
        label=None,
        on_bad_batch="raise",
        storage_options=None,
    ): ...
    def save(self, url, optimizer=True, *, storage_options=None): ...
    @classmethod
    def load(
        cls,
        url,
        *,
        model=None,
        loss=None,
        optimizer=None,
        client=None,
        trusted=(),
        storage_options=None,
        **others,
    ): ...

def evaluate(
    model,
    X,
    y=None,
    *,
    loss=None,
    metrics=None,
    sample_weight=None,
    client=None,
    batch_size=None,
    transform=None,
    loader=None,
    collate_fn=None,
    label=None,
    on_bad_batch="raise",
    storage_options=None,
): ...
def plan(
    model,
    batch,
    workers=64,
    link=None,
    *,
    loss=None,
    optimizer=None,
    master=None,
    threads=None,
): ...
def predict(
    model,
    X,
    *,
    client=None,
    batch_size=None,
    output=None,
    postprocess=None,
    keyed=None,
    transform=None,
    loader=None,
    collate_fn=None,
    label=None,
    storage_options=None,
): ...
