"""State in a folder: named tensors and JSON, put there at once, and no pickle.

No trainer: :mod:`daskdl.training.trainer_state` encodes one.
"""
