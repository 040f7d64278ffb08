"""Client of DFedSAM: DFedAvg with steps along the gradient at the sharpest point nearby.

Sources: Shi et al., *Improving the Model Consistency of Decentralized Federated Learning*, ICML
2023, algorithm 1; Foret et al., *Sharpness-Aware Minimization for Efficiently Improving
Generalization*, ICLR 2021, eq. (2) and (3).
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fedntk.ntk.options import option
from fedntk.ntk.payloads.gossip_options import DFedAvgOptions

from ..core.local_sgd import Gradients, plain_gradients
from .dfedavg import average, train_and_send
from .gossip import GossipClient


class DFedSAMClient(GossipClient):
    """Steps along the gradient at w + rho g / ||g||, where g is the batch's gradient at w.

    Its round is that of :class:`DFedAvgClient`. Both gradients are of the same batch. ||g|| is over
    all parameters that are trained. Buffers, such as BatchNorm's statistics, are those of the first
    pass. Each step takes two passes.
    """

    strategy = "DFedSAM"
    options_kind = DFedAvgOptions
    step_train = train_and_send
    step_average = average

    rho: float = option(
        "radius of the sharpest point; 0: DFedAvg, bit for bit", default=0.01, at_least=0
    )

    def gradients(
        self, batch_loss: Callable[[], Tensor], parameters: Mapping[str, nn.Parameter]
    ) -> tuple[Tensor, Gradients]:
        """Return a batch's loss at w, and its gradients at the point nearby."""
        loss, gradients = plain_gradients(batch_loss, parameters)
        if not self.rho or not gradients:
            return loss, gradients
        ascent = list(gradients.values())
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(ascent)))
        weights = [parameters[name].detach() for name in gradients]
        before = [weight.clone() for weight in weights]
        statistics = [buffer.clone() for buffer in self.model.buffers()]
        scale = torch.where(norm > 0, self.rho / norm, torch.zeros_like(norm))
        torch._foreach_add_(weights, torch._foreach_mul(ascent, scale))
        _, nearby = plain_gradients(batch_loss, parameters)
        torch._foreach_copy_(weights, before)
        for buffer, value in zip(self.model.buffers(), statistics, strict=True):
            buffer.copy_(value)
        return loss, nearby
