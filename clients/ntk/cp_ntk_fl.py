"""Client of CP-NTK-FL: NTK-FL's, with tools that save bytes and guard the examples.

Source: Yue et al., *Neural Tangent Kernel Empowered Federated Learning*, ICML 2022, section 4.2
and figure 2. Each tool is optional and goes with any other, in this order:

1. a sample of the examples, anew each round                 ``sampling_rate``
2. the random projection of the inputs, Z = X P              ``projection``
3. the Jacobian at Z, in factors or literally                ``structure``
4. clipped rows, Gaussian noise, noisy labels                ``clip``, ``noise_multiplier``, ...
5. top-k sparsification and quantisation                     ``sparsity``, ``bits``
6. sealing for the shuffling server                          ``shuffling_key``

docs/privacy.md says what each protects, and what it does not.
"""

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from fedntk.ntk import CompressedUpload, RowNoise, loss_value
from fedntk.ntk.options import argument, option
from fedntk.ntk.payloads.compression import CompressionOptions
from fedntk.trust import check_public_key, check_run, seal_upload

from ..core.named_arrays import NamedArrays
from ..core.randomness import round_seed
from ..core.weights import Config, Fit, Parameters, Scalar
from .ntk_fl import NTKFLClient


class CPNTKFLClient(CompressionOptions, NTKFLClient):
    """Computes J'_m, f(Z'_m) and Y'_m, and sends them compressed (section 4.2).

    With differential privacy the client tells nothing else about its training examples: no loss
    travels with an upload, it takes no part in the choice of t, and it evaluates on test examples
    only.
    """

    strategy = "CPNTKFL"
    replies = "compressed Jacobians"

    clip: float = option(
        "norm to which an example's row is clipped before noise is added; 0: no privacy",
        default=0.0,
        at_least=0,
    )
    noise_multiplier: float = option(
        "standard deviation of the noise over clip; 0: none", default=0.0, at_least=0
    )
    label_noise: float = option(
        "probability that a label is drawn anew; 0: none", default=0.0, at_least=0, at_most=1
    )
    noise_seed: tuple[int, ...] | None = argument(
        "makes the noise repeatable in a simulation", default=None
    )
    shuffling_key: bytes | None = argument(
        "the shuffling server's public key: the upload is sealed for it, each row compressed by "
        "itself, and no loss travels beside it, so that neither says whose row is whose",
        default=None,
    )
    private_key: X25519PrivateKey | None = argument(
        "shows that an upload is this client's, whose public key the shuffling server knows",
        default=None,
    )
    run: str = option(
        "name of the training run, to which the sealed upload is bound, as on the strategy",
        default="",
    )

    def check(self) -> None:
        """Refuse options that do not go together."""
        super().check()
        _ = self.noise
        if self.shuffling_key is not None:
            check_run(self.run)
            check_public_key(self.shuffling_key)
            if self.private_key is None:
                raise ValueError("private_key: expected the key that is enrolled there, got None")

    def fit(self, parameters: Parameters, config: Config) -> Fit:
        """Return a :class:`~fedntk.ntk.CompressedUpload` as arrays, or its bytes ``sealed``.

        Metrics are the noise under differential privacy; else, of an upload that is not sealed,
        ``train-loss`` at the received weights.
        """
        if self.noise is not None:
            self.require_covered(RowNoise)
        upload, key = self.upload(parameters, config), self.shuffling_key
        metrics: dict[str, Scalar] = {}
        if self.noise is not None:
            seed = [*round_seed(self.noise_seed or (), config), *b"noise"]
            seeded = self.noise_seed is not None
            upload = self.noise.add(upload, np.random.default_rng(seed) if seeded else None)
            metrics["noise-multiplier"] = self.noise_multiplier
            metrics["label-noise"] = self.label_noise
        elif key is None:
            metrics["train-loss"] = loss_value(upload.outputs, upload.targets, self.loss)
        arrays = CompressedUpload.compress(
            upload, sparsity=self.sparsity, bits=self.bits, by_row=key is not None
        ).to_arrays()
        if key is not None and self.private_key is not None:
            place = self.run, int(config.get("server-round", 0))
            arrays = {"sealed": seal_upload(arrays, key, self.private_key, *place)}
        return NamedArrays({"arrays": arrays}), len(upload.outputs), metrics

    @property
    def noise(self) -> RowNoise | None:
        """What adds noise to rows and labels, if they get any."""
        clip, sigma, labels = self.clip, self.noise_multiplier, self.label_noise
        if not (clip or sigma or labels):
            return None
        return RowNoise(clip=clip, noise_multiplier=sigma, label_noise=labels)

    @property
    def is_private(self) -> bool:
        """Whether its rows have noise."""
        return self.noise is not None or super().is_private

    def input_sums(self, config: Config) -> tuple[NDArray[np.float64], int]:
        """Refuse with a shuffling server: the sum helps to tell rows apart."""
        if self.shuffling_key is not None:
            raise ValueError(
                "a sum of the training examples was asked for, which helps to tell shuffled rows "
                "apart; have the strategy leave centre_inputs out"
            )
        return super().input_sums(config)
