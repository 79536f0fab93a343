"""Keras models: from JSON and from files, trained as modules of torch.

Keras itself is imported at the first use; it is the extra `keras`.
"""

from daskdl.keras.load import from_config, from_saved
from daskdl.keras.module import CrossEntropyOfProbabilities, KerasModule

__all__ = [
    "CrossEntropyOfProbabilities",
    "KerasModule",
    "from_config",
    "from_saved",
]
