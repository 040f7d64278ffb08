"""A network with centred inputs; their mean is among its arrays."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

CENTRE = "centre"  # name of the array
INPUT_SUMS = "input-sums"  # name of the sum of a client's inputs, as an array


class CentredInputs(nn.Module):
    """A network of the inputs less their mean.

    The mean is a buffer: it travels with the weights and is never trained. It begins as zeros; a
    strategy with ``centre=CentreInputs()`` fills in the mean over all clients. `input_shape` is
    that of one example.

    Examples
    --------
    >>> network = CentredInputs(nn.Identity(), (2,))
    >>> network.centre.copy_(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    >>> network(torch.tensor([[3.0, 3.0]]))
    tensor([[2., 1.]])
    """

    centre: Tensor

    def __init__(self, network: nn.Module, input_shape: Sequence[int]) -> None:
        super().__init__()
        self.network = network
        self.register_buffer(CENTRE, torch.zeros(tuple(input_shape)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's outputs, given inputs of shape (n, *input_shape)."""
        outputs: Tensor = self.network(x - self.centre)
        return outputs
