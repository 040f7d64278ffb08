"""Client of NTK-FL: sends the Jacobian of its examples instead of weights.

Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, section 4.1.

What a client gives away: the Jacobian of a first linear layer holds the inputs exactly (divide a
weight's row by its bias), in the factored and in the dense form alike, and the labels travel with
it. NTK-FL hands the examples to the server; it is no privacy mechanism by itself.
"""

from typing import ClassVar, Literal

import torch

from fedntk.ntk import JacobianUpload, jacobian, loss_value
from fedntk.ntk.evolution.candidates import unstack_candidates
from fedntk.ntk.losses import offset_of
from fedntk.ntk.options import argument, option
from fedntk.ntk.payloads import wire

from ..core.base import ModelClient, candidate_losses
from ..core.weights import Config, Fit, NamedArrays, Parameters, set_weights


class NTKFLClient(ModelClient):
    """Computes J_m, f(X_m) and Y_m at the received weights (section 4.1, step 2)."""

    strategy = "NTKFL"
    replies = "Jacobians"
    takes_real_targets = True
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.float64)

    structure: Literal["factored", "dense"] = option(
        "form of Jacobians: layers in factors if these are smaller, or the paper's n C d numbers",
        default="factored",
    )
    chunk_size: int | None = argument(
        "examples differentiated at a time; chosen by default", default=None
    )

    def step_train(self, parameters: Parameters, config: Config) -> Fit:
        """Return a :class:`~fedntk.ntk.JacobianUpload` and ``train-loss``, of received weights."""
        upload = self.upload(parameters, config)
        train_loss = loss_value(upload.outputs, upload.targets, self.loss)
        arrays = NamedArrays({"arrays": upload.to_arrays()})
        return arrays, len(upload.outputs), {wire.TRAIN_LOSS: train_loss}

    def upload(self, parameters: Parameters, config: Config) -> JacobianUpload:
        """Return Jacobian, outputs and targets of the round's examples at the given weights."""
        set_weights(self.model, parameters)
        x, targets = self.training_examples(config)
        rows = jacobian(self.model, x.to(self.device), chunk_size=self.chunk_size)
        if self.structure == "dense":
            rows = rows.to_dense()
        outputs = self.outputs(x)
        return JacobianUpload(rows, outputs, targets.to(outputs.dtype))

    def query(self, parameters: Parameters, config: Config) -> dict[str, list[float] | int]:
        """Return ``{"losses": [...], "num-examples": n}`` of stacked candidates (eq. 11a).

        The round's sample is that of :meth:`step_train`; ``"output-offset"``, C numbers, is added
        to the outputs before their loss is taken.
        """
        self.require_permitted("query")
        x, targets = self.training_examples(config)
        offset = offset_of(config, targets.shape[1])
        losses = candidate_losses(self, unstack_candidates(parameters), x, targets, offset)
        return {wire.LOSSES: losses, "num-examples": len(x)}
