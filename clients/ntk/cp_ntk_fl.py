"""Client of CP-NTK-FL: NTK-FL's, with tools that save bytes and guard the examples.

Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, section 4.2
and figure 2. Each tool is optional and goes with any other, in this order:

1. a sample of the examples, anew each round                 ``sampling_rate``
2. the random projection of the inputs, Z = X P              ``projection``
3. the Jacobian at Z, in factors or literally                ``structure``
4. top-k sparsification and quantisation                     ``sparsity``, ``bits``
5. sealing for the shuffling server                          ``shuffling_key``

docs/privacy.md says what each protects. None bounds what is learnt of an example: noise is
offered in sums only.
"""

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from fedntk.ntk import CompressedUpload, loss_value
from fedntk.ntk.options import argument, option
from fedntk.ntk.payloads import wire
from fedntk.ntk.payloads.compression import CompressionOptions, check_compression
from fedntk.trust import check_public_key, check_run, seal_upload

from ..core.base import sum_inputs
from ..core.weights import Config, Fit, NamedArrays, Parameters, Scalar
from .ntk_fl import NTKFLClient


class CPNTKFLClient(NTKFLClient):
    """Computes J'_m, f(Z'_m) and Y'_m, and sends them compressed (section 4.2)."""

    strategy = "CPNTKFL"
    takes_real_targets = False  # labels travel
    replies = "compressed Jacobians"

    sparsity: float = CompressionOptions.options()["sparsity"].field()
    bits: int = CompressionOptions.options()["bits"].field()
    shuffling_key: bytes | None = argument(
        "the shuffling server's public key: the upload is sealed for it, each row compressed by "
        "itself, and no loss travels beside it, so that neither says whose row is whose",
        default=None,
    )
    private_key: X25519PrivateKey | None = argument(
        "shows who sent an upload: its public half is enrolled there", default=None
    )
    run: str = option(
        "name of the run, to which a sealed upload is bound, as on the strategy", default=""
    )

    def check(self) -> None:
        """Refuse options that do not go together."""
        check_compression(self.sparsity, self.bits)
        if self.shuffling_key is not None:
            check_run(self.run)
            check_public_key(self.shuffling_key)
            if self.private_key is None:
                raise ValueError("private_key: expected the key that is enrolled there, got None")

    def step_train(self, parameters: Parameters, config: Config) -> Fit:
        """Return a :class:`~fedntk.ntk.CompressedUpload` with ``train-loss``, or it ``sealed``."""
        upload, key = self.upload(parameters, config), self.shuffling_key
        metrics: dict[str, Scalar] = {}
        if key is None:
            metrics[wire.TRAIN_LOSS] = loss_value(upload.outputs, upload.targets, self.loss)
        arrays = CompressedUpload.compress(
            upload, sparsity=self.sparsity, bits=self.bits, by_row=key is not None
        ).to_arrays()
        if key is not None and self.private_key is not None:
            place = self.run, int(config.get("server-round", 0))
            arrays = {wire.SEALED: seal_upload(arrays, key, self.private_key, *place)}
        return NamedArrays({"arrays": arrays}), len(upload.outputs), metrics

    def input_sums(self, config: Config) -> tuple[NDArray[np.float64], int]:
        """Refuse with a shuffling server: the sum helps to tell rows apart."""
        if self.shuffling_key is not None:
            raise ValueError(
                "a sum of the training examples was asked for, which helps to tell shuffled rows "
                "apart; have the strategy leave centre out"
            )
        return sum_inputs(self, config)
