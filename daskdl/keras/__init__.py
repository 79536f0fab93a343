"""Keras models, loaded from JSON or files and trained as torch modules.

Keras itself is imported on first use and needs the extra `keras`.
"""

from daskdl.keras.load import from_config, from_saved
from daskdl.keras.module import CrossEntropyOfProbabilities, KerasModule

__all__ = [
    "CrossEntropyOfProbabilities",
    "KerasModule",
    "from_config",
    "from_saved",
]
