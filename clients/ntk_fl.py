"""Client of NTK-FL: sends the Jacobian of its examples instead of weights.

Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, section 4.1.

What a client gives away: the Jacobian of a first linear layer holds the inputs exactly (divide a
weight's row by its bias), in the factored and in the dense form alike, and the labels travel with
it. NTK-FL hands the examples to the server; it is no privacy mechanism by itself.
"""

from typing import Any, Literal

from numpy.typing import NDArray

from fedntk.ntk import JacobianUpload, jacobian, loss_value, unstack_candidates

from .base import ModelClient, Scalar
from .weights import set_weights

__all__ = ["NTKFLClient"]


class NTKFLClient(ModelClient):
    """Computes J_m, f(X_m) and Y_m at the received weights (section 4.1, step 2).

    Parameters
    ----------
    wire : {"factored", "dense"}
        What is sent: layers in factors where that is smaller, or the paper's literal tensor of
        n C d numbers. Both give the same weights.
    chunk_size : int, optional
        Examples differentiated at a time; :func:`~fedntk.ntk.jacobian` chooses by default.
    **model_options
        Of :class:`ModelClient`: model, x, y, x_test, y_test, loss, device, batch_size_eval.
    """

    def __init__(
        self,
        *args: Any,
        wire: Literal["factored", "dense"] = "factored",
        chunk_size: int | None = None,
        **model_options: Any,
    ) -> None:
        super().__init__(*args, **model_options)
        if wire not in ("factored", "dense"):
            raise ValueError(f"wire: expected 'factored' or 'dense', got {wire!r}")
        self.wire = wire
        self.chunk_size = chunk_size

    def fit(
        self, parameters: list[NDArray[Any]], config: dict[str, Scalar]
    ) -> tuple[list[NDArray[Any]], int, dict[str, Scalar]]:
        """Return the arrays of a :class:`~fedntk.ntk.JacobianUpload`; the weights stay.

        Returns
        -------
        tuple of list of ndarray, int, dict
            The upload, the number of examples, ``{"train-loss": ...}`` at the received weights.
        """
        set_weights(self.model, parameters)
        rows = jacobian(self.model, self.x.to(self.device), chunk_size=self.chunk_size)
        if self.wire == "dense":
            rows = rows.to_dense()
        outputs = self.outputs(self.x)
        upload = JacobianUpload(rows, outputs, self.targets.to(outputs.dtype))
        train_loss = loss_value(upload.outputs, upload.targets, self.loss)
        return upload.to_arrays(), len(self.x), {"train-loss": train_loss}

    def query(
        self, parameters: list[NDArray[Any]], config: dict[str, Scalar]
    ) -> dict[str, list[float] | int]:
        """Loss of the true network at each candidate: eq. (11a), this client's share.

        Parameters
        ----------
        parameters : list of ndarray
            Weights stacked over candidates: shape (number of candidates, *weight shape).
        config : dict
            Not used.

        Returns
        -------
        dict
            ``{"losses": [...], "num-examples": n}``, the losses averaged over the local examples.
        """
        losses = self.candidate_losses(unstack_candidates(parameters))
        return {"losses": losses, "num-examples": len(self.x)}
