"""The arguments of a trainer as JSON: each in the way that suits it, or not at all.

Each is a mapping that says how it was written:

==========================================  ==========================================
``{"value": ...}``                          plain, see :mod:`daskdl.saving.plain`
``{"layers": ...}``                         see :mod:`daskdl.saving.layers`
``{"import": ...}``, ``{"partial": ...}``   see :mod:`daskdl.saving.makers`
``{"normaliser": ...}``                     as `daskdl.data.Normalisation.to_dict`
``{"both": [..., ...]}``                    two transforms, one after the other
``{"pass": "why"}``                         has to be given to `Trainer.load` again
==========================================  ==========================================
"""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from daskdl.callbacks import (
    Callback,
    Checkpoint,
    EarlyStopping,
    Evaluate,
    FailureInjection,
)
from daskdl.residuals import KeepResidual, ResidualClipping, ResidualPostProcessor
from daskdl.saving.plain import Plain
from daskdl.saving.trust import NOTHING, Trust
from daskdl.thresholds import (
    AdaptiveThreshold,
    FixedThreshold,
    LayerThresholds,
    LinkThreshold,
    TargetSparsityThreshold,
    ThresholdAlgorithm,
)
from daskdl.training.base import TrainingMaster
from daskdl.training.gradient_sharing import GradientSharing
from daskdl.training.parameter_averaging import ParameterAveraging

# In the order in which they are read; those of a trainer besides its client.
NAMES = (
    "model",
    "loss",
    "optimizer",
    "master",
    "device",
    "seed",
    "callbacks",
    "progress",
    "autocast",
    "accumulate",
    "clip_grad_norm",
    "step",
    "scheduler",
    "scheduler_every",
    "telemetry_every",
    "max_loss_rise",
    "transform",
)
# Written by the names they have here: a name stays when a class moves.
KNOWN: Mapping[str, type] = {
    kind.__name__: kind
    for kind in (
        GradientSharing,
        ParameterAveraging,
        AdaptiveThreshold,
        FixedThreshold,
        TargetSparsityThreshold,
        LinkThreshold,
        LayerThresholds,
        ResidualClipping,
        KeepResidual,
        FailureInjection,
        Checkpoint,
        EarlyStopping,
        Evaluate,
    )
}
BASES = (TrainingMaster, ThresholdAlgorithm, ResidualPostProcessor, Callback)
# What those make that are called.
MADE: Mapping[str, type] = {
    "model": nn.Module,
    "loss": Tensor,
    "optimizer": Optimizer,
    "step": Tensor,
    "scheduler": LRScheduler,
    "transform": tuple,
}


def plain_with(tensors: dict[str, Tensor], trust: Trust = NOTHING) -> Plain:
    """Writes and reads the values of arguments.

    Args:
        tensors: Beside the JSON; writing adds to them.
        trust: What may be imported, and called with arguments, when reading.
    """
    return Plain(KNOWN, BASES, tensors, trust)
