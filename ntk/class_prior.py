"""Class shares as an offset of the outputs, so that rare classes are learned as common ones are."""

import torch
from torch import Tensor

__all__ = ["log_class_prior"]


def log_class_prior(targets: Tensor) -> Tensor:
    """Offset log(C pi_c) that is added to the outputs where a cross-entropy loss is reduced.

    Source: Menon et al., *Long-Tail Learning via Logit Adjustment*, ICLR 2021, eq. (10), with
    tau = 1 and the uniform prior as what is predicted for. A network that fits the shares pi by way
    of the offset predicts, without it, as if all classes were equally common.

    Parameters
    ----------
    targets : Tensor, shape (n, C)
        One-hot labels of the examples that are learned from together; n at least 1.

    Returns
    -------
    Tensor, shape (C,)
        In the targets' dtype and on their device. Shares are smoothed by one example that is
        spread over the classes, pi_c = (n_c + 1/C) / (n + 1): that of a class without examples is
        not 0. Equal shares give zeros.

    Examples
    --------
    >>> log_class_prior(torch.eye(3))
    tensor([0., 0., 0.])
    """
    num_examples, num_classes = targets.shape
    counts = targets.sum(0, dtype=torch.float64)
    shares = (counts + 1 / num_classes) / (num_examples + 1)
    return (num_classes * shares).log().to(targets.dtype)
