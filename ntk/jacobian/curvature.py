"""Gauss-Newton matrix of a loss, as a Jacobian G for which it is G^T G.

The matrix is ``sum_i J_i^T H_i J_i``, with H_i = L_i L_i^T the Hessian of the loss by the outputs,
so G_i = L_i^T J_i has the form and the size of J. For both losses it is also the Fisher information
(Martens, *New Insights and Perspectives on the Natural Gradient Method*, JMLR 2020, section 9.2).
"""

from torch import Tensor

from ..losses import Loss, hessian_root, output_scale
from .operator import Jacobian


def gauss_newton(jacobian: Jacobian, outputs: Tensor, loss: Loss) -> Jacobian:
    """Return G: its ``normal_product``, ``normal_diagonal`` and ``normal_matrix`` are the matrix's.

    The matrix belongs to the loss averaged over examples, as in :mod:`fedntk.ntk.losses`. `outputs`
    (n, C) are those of the Jacobian's examples.

    Examples
    --------
    >>> import torch
    >>> from fedntk.ntk import gauss_newton, jacobian
    >>> model, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
    >>> ggn = gauss_newton(jacobian(model, x), model(x).detach(), "cross-entropy")
    >>> ggn.normal_diagonal()["weight"].shape, ggn.normal_matrix(["weight", "bias"]).shape
    (torch.Size([2, 3]), torch.Size([8, 8]))
    """
    scale = output_scale(len(outputs), outputs.shape[1], loss)
    return jacobian.combine(scale**0.5 * hessian_root(outputs, loss))
