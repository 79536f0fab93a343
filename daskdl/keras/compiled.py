"""Converts a Keras model's compile settings to torch: loss, optimizer and metrics.

The settings come from `get_compile_config()` in Keras 3, and from `training_config` in
files of Keras 2. Nothing in them is imported or executed; a setting without counterpart
raises an error that names the setting. Keras itself is not needed.
"""

import difflib
import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from daskdl.errors import ModelError, OptionError
from daskdl.keras.module import EPSILON, KerasModule, compile_config
from daskdl.losses import Labels, Scale, aligned

# ---- losses


class _OneOutput:
    """A loss of one output that takes labels in the shapes that Keras accepts."""

    reduction = "mean"  # "none" if each row is weighted

    def aligned(self, output: Any, y: Any) -> tuple[Any, Any]:
        """Return outputs and labels in the shapes of torch's own losses."""
        tensors = isinstance(output, Tensor) and isinstance(y, Tensor)
        return self._aligned(output, y) if tensors else (output, y)

    def _aligned(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Give labels the shape and dtype of the outputs."""
        if output.ndim == y.ndim + 1 and output.shape[-1] == 1:
            y = y[..., None]
        elif y.ndim == output.ndim + 1 and y.shape[-1] == 1:
            y = y[..., 0]
        return output, y.to(output.dtype)


class _Crossentropy(_OneOutput):
    from_logits: bool
    label_smoothing: float

    @property
    def scale(self) -> Scale:
        """The scale of the scores."""
        return "logits" if self.from_logits else "probabilities"


class CategoricalCrossentropy(_Crossentropy, nn.NLLLoss):
    """Keras' cross-entropies of one class for each row, sparse or not.

    Scores have their classes along the last axis, (B, C) or (B, T, C). Labels are class
    indices, (B,), (B, 1) or (B, T), or one-hot rows of the shape of the scores.
    """

    labels: Labels = "classes"

    def __init__(
        self,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(ignore_index=ignore_index)
        self.from_logits = from_logits
        self.label_smoothing = label_smoothing

    @override
    def _aligned(self, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B, C) or (B, C, T), and class indices or one-hot rows alike."""
        if y.ndim == output.ndim and y.shape[-1] == 1 != output.shape[-1]:
            y = y[..., 0]
        if y.shape == output.shape and y.ndim > 1:
            y = y.movedim(-1, 1).to(output.dtype)
        elif y.is_floating_point():
            y = y.long()
        return output.movedim(-1, 1) if output.ndim > 1 else output, y

    @override
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss over the labels that are not ignored."""
        scores, y = self.aligned(input, target)
        if self.from_logits:
            logs = scores.log_softmax(1)
        else:
            shares = scores / scores.sum(1, keepdim=True)
            logs = shares.clamp(EPSILON, 1 - EPSILON).log()
        if y.shape != scores.shape and self.label_smoothing:
            y = functional.one_hot(y, scores.shape[1]).movedim(-1, 1).to(scores.dtype)
        if y.shape != scores.shape:
            return super().forward(logs, y)
        if self.label_smoothing:
            y = y * (1 - self.label_smoothing) + self.label_smoothing / y.shape[1]
        losses: Tensor = -(y * logs).sum(1)
        return losses.mean() if self.reduction == "mean" else losses


class BinaryCrossentropy(_Crossentropy, nn.Module):
    """Keras' cross-entropy of labels 0 and 1, with one score per label."""

    labels: Labels = "binary"

    def __init__(self, from_logits: bool = False, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.from_logits = from_logits
        self.label_smoothing = label_smoothing

    @override
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss over all labels."""
        scores, y = self.aligned(input, target)
        if self.label_smoothing:
            y = y * (1 - self.label_smoothing) + self.label_smoothing / 2
        if self.from_logits:
            return functional.binary_cross_entropy_with_logits(
                scores, y, reduction=self.reduction
            )
        scores = scores.clamp(EPSILON, 1 - EPSILON)
        return functional.binary_cross_entropy(scores, y, reduction=self.reduction)


_OF_NUMBERS: Mapping[str, Callable[..., Tensor]] = {
    "mean_squared_error": functional.mse_loss,
    "mean_absolute_error": functional.l1_loss,
    "huber": functional.huber_loss,
    "poisson": functools.partial(
        functional.poisson_nll_loss, log_input=False, eps=EPSILON
    ),
}


class LossOfNumbers(_OneOutput, nn.Module):
    """A regression loss of Keras, whose labels may lack the last axis."""

    labels: Labels = "numbers"

    def __init__(self, name: str = "mean_squared_error", delta: float = 1.0) -> None:
        super().__init__()
        self.name = name
        self.delta = delta

    @override
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss over all labels."""
        extra: dict[str, Any] = {"delta": self.delta} if self.name == "huber" else {}
        scores, y = self.aligned(input, target)
        return _OF_NUMBERS[self.name](scores, y, reduction=self.reduction, **extra)


class OutputLosses(nn.Module):
    """The weighted sum of the losses of several outputs, a tuple or a dict."""

    def __init__(
        self,
        losses: Sequence[nn.Module | None] = (),
        names: Sequence[str] = (),
        weights: Sequence[float] = (),
    ) -> None:
        super().__init__()
        self.losses, self.names, self.weights = losses, names, weights
        for number, (name, loss) in enumerate(zip(names, losses, strict=True)):
            if getattr(loss, "reduction", "mean") != "mean":
                raise OptionError(
                    f"loss[{name!r}] must be a mean over the rows, because the losses "
                    f"are added, got {loss!r}; use reduction='mean'"
                )
            if isinstance(loss, nn.Module):  # so that `to` moves its weights, too
                self.add_module(str(number), loss)

    def loss_of(self, name: str | int) -> nn.Module | None:
        """Return the loss of an output, by name or number."""
        if isinstance(name, str):
            return dict(zip(self.names, self.losses, strict=True)).get(name)
        return self.losses[name] if name < len(self.losses) else None

    def _each(self, tree: Any, what: str) -> list[Any]:
        names = self.names
        if isinstance(tree, dict) and tree.keys() == {*names}:
            return [tree[name] for name in names]
        if isinstance(tree, tuple) and len(tree) == len(names):
            return [*tree]
        raise ModelError(
            f"the outputs {', '.join(names)} have a loss each, so {what} must be a "
            f"tuple of {len(names)}, or a dict with these names"
        )

    def aligned(self, output: Any, y: Any) -> tuple[Any, Any]:
        """Align each output and its labels; return both as dicts by name."""
        leaves, targets = self._each(output, "outputs"), self._each(y, "labels")
        outputs, labels = {}, {}
        for i, (name, loss) in enumerate(zip(self.names, self.losses, strict=True)):
            outputs[name], labels[name] = leaves[i], targets[i]
            if loss is not None:
                outputs[name], labels[name] = aligned(loss, leaves[i], targets[i])
        return outputs, labels

    @override
    def forward(self, input: Any, target: Any) -> Tensor:
        """Return the weighted sum of the losses of all outputs that have one."""
        pairs = zip(self.paired(input, "outputs"), self.paired(target), strict=True)
        return self.combined([loss(output, y) for (loss, output), (_, y) in pairs])

    def paired(self, tree: Any, what: str = "labels") -> list[tuple[nn.Module, Any]]:
        """Return each loss with the labels, or the output, that belong to it."""
        pairs = zip(self.losses, self._each(tree, what), strict=True)
        return [(loss, leaf) for loss, leaf in pairs if loss is not None]

    def combined(self, terms: Sequence[Tensor]) -> Tensor:
        """Return the weighted sum of the values of the losses."""
        pairs = zip(self.losses, self.weights, strict=True)
        weights = [weight for loss, weight in pairs if loss is not None]
        weighted = [w * term for w, term in zip(weights, terms, strict=True)]
        total: Tensor = torch.stack(weighted).sum()
        return total


# ---- names


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _name_and_settings(spec: Any) -> tuple[str, dict[str, Any]]:
    """Return the name and settings of an object or function of Keras."""
    if isinstance(spec, str):
        return spec, {}
    if isinstance(spec, Mapping) and isinstance(spec.get("class_name"), str):
        name, config = spec["class_name"].rpartition(">")[2], spec.get("config")
        if name == "function" and isinstance(config, str):
            return config, {}
        options = dict(config) if isinstance(config, Mapping) else {}
        if name == "MeanMetricWrapper":  # written by Keras 2 for a metric
            return _name_and_settings(options.pop("fn", None))[0], options
        return name, options
    if hasattr(spec, "get_config"):
        # Private in Keras 3.11 to 3.15: `get_config` of some losses omits arguments.
        arguments = getattr(spec, "_fn_kwargs", {})
        return type(spec).__name__, {**spec.get_config(), **arguments}
    return str(getattr(spec, "__name__", spec)), {}


def _refuse(what: str, name: str, reason: str, remedy: str) -> NoReturn:
    raise OptionError(f"{what} {name!r} {reason}; {remedy}")


def _check_remaining(
    what: str, name: str, options: Mapping[str, Any], remedy: str, **neutral: Any
) -> None:
    """Refuse settings that have an effect but no counterpart."""
    neutral = {"reduction": _REDUCTIONS, "axis": (-1,), **neutral}
    for option, value in options.items():
        # The default of nearly all options is None, False, 0 or empty.
        is_set = option not in ("name", "dtype") and value
        if is_set and value not in neutral.get(option, ()):
            reason = f"has {option}={value!r}, which has no counterpart here"
            _refuse(what, name, reason, remedy)


_REDUCTIONS = ("sum_over_batch_size", "auto", "mean", "mean_with_sample_weight")
_SMOOTHED = {"from_logits": "from_logits", "label_smoothing": "label_smoothing"}
# By name: the loss, and the names of its arguments by their names in Keras.
_LOSSES: Mapping[str, tuple[Callable[..., Any], Mapping[str, str]]] = {
    "sparse_categorical_crossentropy": (
        CategoricalCrossentropy,
        {"from_logits": "from_logits", "ignore_class": "ignore_index"},
    ),
    "categorical_crossentropy": (CategoricalCrossentropy, _SMOOTHED),
    "binary_crossentropy": (BinaryCrossentropy, _SMOOTHED),
    **{name: (functools.partial(LossOfNumbers, name), {}) for name in _OF_NUMBERS},
    "huber": (functools.partial(LossOfNumbers, "huber"), {"delta": "delta"}),
    "cross_entropy": (nn.CrossEntropyLoss, {}),
    "bce_with_logits": (nn.BCEWithLogitsLoss, {}),
    "nll": (nn.NLLLoss, {}),
}
_OTHER_NAMES = {
    "bce": "binary_crossentropy",
    "mse": "mean_squared_error",
    "mae": "mean_absolute_error",
    "l1": "mean_absolute_error",
}
_LOSS_KEYS = {
    key: name
    for alias, name in (*((name, name) for name in _LOSSES), *_OTHER_NAMES.items())
    for key in (_key(alias), f"{_key(alias)}loss")
}
_SHORT = {
    "mape": "meanabsolutepercentageerror",
    "msle": "meansquaredlogarithmicerror",
    "kld": "kldivergence",
}
# Other losses of Keras as expressions of outputs p and labels y, for messages.
_EXPRESSIONS = {
    "meanabsolutepercentageerror": "100 * ((y - p) / y).abs().mean()",
    "meansquaredlogarithmicerror": "((y + 1).log() - (p + 1).log()).square().mean()",
    "logcosh": "(p - y).cosh().log().mean()",
    "kldivergence": "(y * (y / p).log()).sum(-1).mean()",
    "cosinesimilarity": "-torch.cosine_similarity(p, y, dim=-1).mean()",
    "hinge": "(1 - y * p).clamp(min=0).mean()",
    "squaredhinge": "(1 - y * p).clamp(min=0).square().mean()",
}


def loss_of(spec: Any) -> nn.Module:
    """Return torch's counterpart of a loss of Keras: a name, object or configuration.

    Raises:
        OptionError: If there is no such loss, or it has settings without a counterpart.
    """
    name, options = _name_and_settings(spec)
    key = _key(name)
    known = _LOSS_KEYS.get(key)
    if known is None:
        close = difflib.get_close_matches(key, _LOSS_KEYS, 1, cutoff=0.7)
        remedy = "pass a function of (output, labels)"
        key = _SHORT.get(key, key)
        if key in _EXPRESSIONS:
            remedy = f"pass loss=lambda p, y: {_EXPRESSIONS[key]}"
        elif close:
            remedy = f"did you mean {_LOSS_KEYS[close[0]]!r}? Or {remedy}"
        names = ", ".join(map(repr, _LOSSES))
        _refuse("loss", name, f"is not among the known names {names}", remedy)
    kind, arguments = _LOSSES[known]
    options = {n: v for n, v in options.items() if v is not None}
    settings = {arguments[n]: options.pop(n) for n in arguments if n in options}
    _check_remaining("loss", name, options, "pass a function of (output, labels)")
    loss: nn.Module = kind(**settings)
    return loss


def resolved_loss(loss: Any) -> Any:
    """Convert a name, a loss of Keras, or a dict of losses to a loss of torch.

    Keras' losses take the labels first, unlike torch's. A dict has the losses of
    several outputs by name, each with weight 1. Anything else is returned unchanged.
    """
    if isinstance(loss, Mapping) and loss and "class_name" not in loss:
        losses = [resolved_loss(output_loss) for output_loss in loss.values()]
        return OutputLosses(losses, list(loss), [1.0] * len(loss))
    kinds = {getattr(kind, "__module__", "") for kind in (loss, type(loss))}
    named = isinstance(loss, str) or "keras.src.losses.losses" in kinds
    return loss_of(loss) if named and not isinstance(loss, type) else loss


# ---- compile settings

# By name: the optimizer, and those of its settings that torch has too.
_OPTIMIZERS: Mapping[str, tuple[Any, tuple[str, ...]]] = {
    "SGD": (torch.optim.SGD, ("momentum", "nesterov")),
    "Adam": (torch.optim.Adam, ("epsilon", "amsgrad")),
    "AdamW": (torch.optim.AdamW, ("epsilon", "amsgrad")),
    "Adamax": (torch.optim.Adamax, ("epsilon",)),
    "Nadam": (torch.optim.NAdam, ("epsilon",)),
    "RMSprop": (torch.optim.RMSprop, ("rho", "momentum", "epsilon", "centered")),
    "Adagrad": (torch.optim.Adagrad, ("initial_accumulator_value", "epsilon")),
    "Adadelta": (torch.optim.Adadelta, ("rho", "epsilon")),
}
_PASS_OPTIMIZER = "pass Trainer(optimizer=...)"
_REMEDIES = {
    "global_clipnorm": "pass Trainer(optimizer=..., clip_grad_norm=...)",
    "clipnorm": "pass Trainer(optimizer=..., clip_grad_norm=...)",
    "gradient_accumulation_steps": "pass Trainer(optimizer=..., accumulate=...)",
}


def optimizer_of(spec: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a factory of torch's counterpart of an optimizer of Keras.

    Raises:
        OptionError: If torch has no such optimizer, or a setting has no counterpart.
    """
    name, options = _name_and_settings(spec)
    what = "the compiled model's optimizer"
    if name not in _OPTIMIZERS:
        known = ", ".join(_OPTIMIZERS)
        _refuse(what, name, f"must be one of {known}", _PASS_OPTIMIZER)
    kind, settings = _OPTIMIZERS[name]
    renamed = {"epsilon": "eps", "rho": "alpha" if name == "RMSprop" else "rho"}
    options = {n: v for n, v in options.items() if v is not None}
    rate = options.pop("learning_rate", options.pop("lr", None))
    if not isinstance(rate, float | int):
        shown = _name_and_settings(rate)[0]
        remedy = "pass Trainer(optimizer=..., scheduler=...)"
        _refuse(what, name, f"has the learning rate {shown}", remedy)
    arguments: dict[str, Any] = {"lr": float(f"{rate:.7g}")}  # float32 in Keras
    if name in ("Adam", "AdamW", "Adamax", "Nadam"):
        arguments["betas"] = options.pop("beta_1"), options.pop("beta_2")
    arguments |= {renamed.get(n, n): options.pop(n) for n in settings if n in options}
    if name == "Nadam":
        arguments["momentum_decay"] = 1.0  # the value of Keras
    if name in ("Adam", "AdamW"):
        decay = options.pop("weight_decay", 0.0)
        kind = torch.optim.AdamW if decay else kind
        arguments |= {"weight_decay": decay} if kind is torch.optim.AdamW else {}
    for option, remedy in _REMEDIES.items():
        if options.get(option):
            _refuse(what, name, f"has {option}={options[option]!r}", remedy)
    neutral = {
        # No effect unless `use_ema` switches moving averages on.
        "ema_momentum": (options.get("ema_momentum"),),
        "is_legacy_optimizer": (True,),
        "jit_compile": (True,),
    }
    _check_remaining(what, name, options, _PASS_OPTIMIZER, **neutral)
    return functools.partial(kind, **arguments)


class Compiled:
    """The compile settings of a Keras model, converted to torch on access."""

    def __init__(self, config: Mapping[str, Any], model: Any) -> None:
        self._config = config
        # Private in Keras 3.11 to 3.15: nothing public has the structure of outputs.
        outputs = getattr(model, "_outputs_struct", None)
        self._named = isinstance(outputs, dict)
        names = getattr(model, "output_names", ("output",))
        self._names = [*outputs] if isinstance(outputs, dict) else [*names]

    @classmethod
    def of(cls, model: Any) -> "Compiled | None":
        """Return the settings of a Keras model or module; None if it has none."""
        kind = getattr(sys.modules.get("keras"), "Model", None)
        if isinstance(model, KerasModule):
            config, model = model.compile_config, model.keras
        elif kind is not None and isinstance(model, kind):
            config = compile_config(model)
        else:
            return None
        return cls(config, model) if config else None

    @property
    def loss(self) -> Any:
        """The loss; None if there is none."""
        names = self._names
        loss, weights = self._config.get("loss"), self._config.get("loss_weights")
        if loss is None:
            return None
        several = isinstance(loss, list | tuple | Mapping) and "class_name" not in loss
        specs = _for_outputs(loss, names) if several else [loss] * len(names)
        if len(names) == 1 and not weights:
            return loss_of(specs[0])
        losses = [None if spec is None else loss_of(spec) for spec in specs]
        weights = _for_outputs(weights, names) if weights else [1.0] * len(names)
        return OutputLosses(losses, names, [1.0 if w is None else w for w in weights])

    @property
    def optimizer(self) -> Callable[[Any], torch.optim.Optimizer] | None:
        """A factory of the optimizer; None if there is none."""
        spec = self._config.get("optimizer")
        return None if spec is None else optimizer_of(spec)

    def metrics_beside(self, loss: Any) -> Any:
        """Return the metrics, by output if there are several; None without metrics.

        The outputs in a list have names if the loss does, see `OutputLosses.aligned`.
        """
        named = self._named or isinstance(loss, OutputLosses)
        settings = map(self._config.get, ("metrics", "weighted_metrics"))
        metrics = [setting for setting in settings if setting]
        if len(self._names) == 1:
            return _flat_metrics(metrics) or None
        by_output: dict[str | int, list[str]] = {}
        for setting in metrics:
            specs = _for_outputs(setting, self._names)
            for number, (name, spec) in enumerate(zip(self._names, specs, strict=True)):
                key = name if named else number
                by_output.setdefault(key, []).extend(_flat_metrics(spec))
        return {key: names for key, names in by_output.items() if names} or None


def _for_outputs(setting: Any, names: Sequence[str]) -> list[Any]:
    """Return the item of each output in a list or dict."""
    if isinstance(setting, Mapping):
        setting = setting.get("items", setting)
    if isinstance(setting, Mapping):
        return [setting.get(name) for name in names]
    if isinstance(setting, Sequence) and len(setting) == len(names):
        return list(setting)
    raise OptionError(
        f"{setting!r:.200} does not match the outputs of the compiled model, "
        f"{', '.join(names)}; pass Trainer(loss=..., metrics=...)"
    )


def _flat_metrics(metrics: Any) -> list[str]:
    if metrics is None:
        return []
    if isinstance(metrics, Mapping) and "class_name" not in metrics:
        metrics = list(metrics.values())
    is_sequence = isinstance(metrics, Mapping) and (
        metrics["class_name"] in ("__tuple__", "__list__")
    )
    if is_sequence:
        metrics = metrics["items"]
    if isinstance(metrics, list | tuple):
        return [name for metric in metrics for name in _flat_metrics(metric)]
    return [_metric_name(metrics)]


def _metric_name(metric: Any) -> str:
    """Return the name of a metric of Keras in `daskdl.evaluate`."""
    name, options = _name_and_settings(metric)
    key = _key(name)
    if key == "auc":
        return (
            "roc_auc" if options.get("curve", "ROC") == "ROC" else "average_precision"
        )
    if key in ("topkcategoricalaccuracy", "sparsetopkcategoricalaccuracy"):
        return f"top_{options.get('k', 5)}_accuracy"
    thresholds = options.get("thresholds", options.get("threshold"))
    if thresholds not in (None, 0.5, [0.5]):
        reason = f"has the thresholds {thresholds!r}"
        remedy = "pass Trainer(metrics=daskdl.metrics.BinaryMetrics(threshold=...))"
        _refuse("the compiled model's metric", name, reason, remedy)
    if key == "f1score" and options.get("average"):
        return f"f1_{options['average']}"
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
