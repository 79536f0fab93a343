"""State in a folder: named tensors and JSON, put there at once, and no pickle.

Only :mod:`daskdl.saving.trainer_state` knows the trainer.
"""
