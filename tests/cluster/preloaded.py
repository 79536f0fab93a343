"""What processes of `killable` have loaded before they are forked; no thread of it."""

import importlib

import torch

from daskdl import GradientSharing

importlib.import_module("torch._dynamo")  # an optimizer does
importlib.import_module("tests.cluster.killable")
torch.set_num_threads(1)
GradientSharing().warm_up(torch.device("cpu"), torch.float32)  # numba's functions
