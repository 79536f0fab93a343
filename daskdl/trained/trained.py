"""All that is done with a trained model."""

from daskdl.trained.answering import Answering
from daskdl.trained.measuring import Measuring


class Trained(Measuring, Answering):
    """Has a model, or will have; see :class:`daskdl.Trainer`, which is one."""
