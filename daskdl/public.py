"""The public names of daskdl, imported together when the first of them is used.

They have a separate module, so that ``import daskdl`` imports neither torch nor
distributed, and type checkers see plain imports.
"""

from daskdl.callbacks import (
    Callback,
    Checkpoint,
    EarlyStopping,
    EpochBegin,
    Evaluate,
    FitBegin,
    FitEnd,
    LayerMonitor,
    PrintProgress,
    Step,
    TensorBoard,
)
from daskdl.compression.residuals import (
    KeepResidual,
    ResidualClipping,
    ResidualPostProcessor,
)
from daskdl.compression.thresholds import (
    AdaptiveThreshold,
    FixedThreshold,
    SampledThreshold,
    TargetSparsityThreshold,
    ThresholdAlgorithm,
)
from daskdl.config import VERSION as __version__
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
from daskdl.evaluation.evaluate import evaluate
from daskdl.evaluation.report import Evaluation
from daskdl.inference.predictor import Predictor
from daskdl.observe.history import History, RunRecord, Stopping
from daskdl.observe.tables import LayerTable, StepTable
from daskdl.observe.timeline import Timeline
from daskdl.planning.cost_model import Network
from daskdl.planning.plan import Plan, plan
from daskdl.trainer import Trainer, predict
from daskdl.training.base import Exchange, ReplicaContext, TrainingMaster
from daskdl.training.gradient_sharing import GradientSharing
from daskdl.training.parameter_averaging import ParameterAveraging

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
    "Exchange",
    "FitBegin",
    "FitEnd",
    "FixedThreshold",
    "GradientSharing",
    "History",
    "KeepResidual",
    "LayerMonitor",
    "LayerTable",
    "ModelError",
    "Network",
    "OptionError",
    "ParameterAveraging",
    "Plan",
    "Predictor",
    "PrintProgress",
    "ReplicaContext",
    "ReplicaError",
    "ResidualClipping",
    "ResidualPostProcessor",
    "RunError",
    "RunRecord",
    "SampledThreshold",
    "SaveError",
    "Step",
    "StepTable",
    "Stopping",
    "TargetSparsityThreshold",
    "TensorBoard",
    "ThresholdAlgorithm",
    "Timeline",
    "Trainer",
    "TrainingMaster",
    "WaitTimeoutError",
    "__version__",
    "evaluate",
    "plan",
    "predict",
]
