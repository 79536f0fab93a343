"""State in a folder: named tensors and JSON, put there at once, and no pickle.

Nothing here knows what a trainer is: :mod:`daskdl.fitted` does.
"""
