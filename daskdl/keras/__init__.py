"""Keras models: from JSON and from files, trained as modules of torch.

Keras itself is imported at the first use; it is the extra `keras`.
"""

from daskdl.keras.losses import CrossEntropyOfProbabilities
from daskdl.keras.module import KerasModule
from daskdl.keras.reading import from_config, from_saved

__all__ = [
    "CrossEntropyOfProbabilities",
    "KerasModule",
    "from_config",
    "from_saved",
]
