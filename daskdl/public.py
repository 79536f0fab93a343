"""The public names, which `daskdl` has as its own once one of them is asked for."""

from daskdl.callbacks.base import Callback, EpochBegin, FitBegin, FitEnd, Step
from daskdl.callbacks.checkpoint import Checkpoint
from daskdl.callbacks.early_stopping import EarlyStopping
from daskdl.callbacks.evaluate import Evaluate
from daskdl.callbacks.learning_rate_monitor import LearningRateMonitor
from daskdl.callbacks.print_progress import PrintProgress
from daskdl.errors import (
    BusyError,
    ChannelError,
    CodecError,
    DaskDLError,
    DataError,
    DivergedError,
    ModelError,
    OptionError,
    ReplicaError,
    RunError,
    SaveError,
    WaitTimeoutError,
)
from daskdl.failures import FailureInjection
from daskdl.given import evaluate, predict
from daskdl.history import History
from daskdl.metrics.evaluation import Evaluation
from daskdl.per_example.worst import WorstExample, WorstExamples
from daskdl.planning.network import Network
from daskdl.planning.plan import Plan
from daskdl.planning.planner import plan
from daskdl.predictions.predictions import Predictions
from daskdl.residuals import KeepResidual, ResidualClipping, ResidualPostProcessor
from daskdl.serving.predictor import Predictor
from daskdl.steps import StepTable
from daskdl.stopping import Stopping
from daskdl.thresholds import (
    AdaptiveThreshold,
    FixedThreshold,
    LinkThreshold,
    TargetSparsityThreshold,
    ThresholdAlgorithm,
)
from daskdl.trainer import Trainer
from daskdl.training.averaging import ParameterAveraging
from daskdl.training.base import TrainingMaster
from daskdl.training.sharing import GradientSharing
from daskdl.version import VERSION as __version__

__all__ = [
    "AdaptiveThreshold",
    "BusyError",
    "Callback",
    "ChannelError",
    "Checkpoint",
    "CodecError",
    "DaskDLError",
    "DataError",
    "DivergedError",
    "EarlyStopping",
    "EpochBegin",
    "Evaluate",
    "Evaluation",
    "FailureInjection",
    "FitBegin",
    "FitEnd",
    "FixedThreshold",
    "GradientSharing",
    "History",
    "KeepResidual",
    "LearningRateMonitor",
    "LinkThreshold",
    "ModelError",
    "Network",
    "OptionError",
    "ParameterAveraging",
    "Plan",
    "Predictions",
    "Predictor",
    "PrintProgress",
    "ReplicaError",
    "ResidualClipping",
    "ResidualPostProcessor",
    "RunError",
    "SaveError",
    "Step",
    "StepTable",
    "Stopping",
    "TargetSparsityThreshold",
    "ThresholdAlgorithm",
    "Trainer",
    "TrainingMaster",
    "WaitTimeoutError",
    "WorstExample",
    "WorstExamples",
    "__version__",
    "evaluate",
    "plan",
    "predict",
]
