"""Losses for models that end in probabilities, as most models of Keras do."""

from torch import Tensor, nn
from typing_extensions import override

# As in Keras: below it the logarithm of float32 says more about rounding than of data.
SMALLEST = 1e-7


class CrossEntropyOfProbabilities(nn.NLLLoss):
    """The cross-entropy of class indices, for outputs that went through a softmax.

    Torch's `CrossEntropyLoss` takes the softmax itself; after that of the model it
    would be the second one, with which training is slow and ends early.

    Args:
        As of `torch.nn.NLLLoss`.

    Example:
        >>> import torch
        >>> scores, labels = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([0])
        >>> round(CrossEntropyOfProbabilities()(scores.softmax(1), labels).item(), 4)
        0.1698
        >>> round(nn.CrossEntropyLoss()(scores, labels).item(), 4)
        0.1698
    """

    scale = "probabilities"  # not their logarithms, as metrics would have it

    @override
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input.clamp(min=SMALLEST).log(), target)
