"""What a newcomer does before it joins, so that nobody waits for its first step.

A first step imports, compiles and connects for seconds; the others, who may be only
`max_staleness` steps ahead of it, would stand still meanwhile.
"""

import torch

from daskdl.data.batches import floating_dtype, tensors
from daskdl.data.models import trainable
from daskdl.data.rehearsal import random_state_left_alone, transformed
from daskdl.packed import copied
from daskdl.training.base import TrainingMaster
from daskdl.training.stepping import Stepper, Stepping
from daskdl.training.task import Recipe


def warm_up(
    recipe: Recipe, master: TrainingMaster, stepping: Stepping, device: torch.device
) -> None:
    """Do once, on a copy of the model, what the first step does.

    What the user's code raises comes out as it is: the real step would raise it too.

    Args:
        recipe: Callables with a state of their own are called once more.
        master: Warms up what it does between steps.
        stepping: How a step is made.
        device: Where the replica computes.
    """
    module = copied(recipe.model).to(device)
    with random_state_left_alone():
        batch = transformed(tensors(recipe.rows), recipe.transform)
        optimizer = recipe.optimizer(trainable(module))
        stepper = Stepper(module, recipe.objective, optimizer, stepping, device)
        stepper.backward([batch])
        stepper.update(scale=1.0)
        master.warm_up(device, floating_dtype(module))
