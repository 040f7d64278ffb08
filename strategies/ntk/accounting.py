"""Epsilon of clients that send rows with Gaussian noise, round after round.

Source: Mironov, *Renyi Differential Privacy*, CSF 2017, for the Gaussian mechanism and its
composition, with the conversion of Balle et al., *Hypothesis Testing Interpretations and Renyi
Differential Privacy*, AISTATS 2020, both as Opacus has them; and Bun and Steinke, *Concentrated
Differential Privacy*, TCC 2016, proposition 3.3, for noisy labels: what is epsilon-private has a
Renyi divergence of order a of at most min(epsilon, a epsilon^2 / 2).
"""

import math
import warnings

import numpy as np

from fedntk.ntk.payloads.privacy import label_epsilon

ORDERS = [1 + x / 10 for x in range(1, 100)] + [*range(11, 64), 128, 256, 512, 1024]


def epsilon_after(
    uploads: int, *, noise_multiplier: float, label_noise: float, num_outputs: int, delta: float
) -> float:
    """Epsilon at `delta` of an example whose client has sent so many uploads.

    Two data sets are neighbours if one example's values, and its label, are replaced. No credit is
    given for what is sampled or shuffled, so it holds whatever the server knows of both. The noise
    is that of :func:`fedntk.ntk.privatise`; replacing an example moves a row by up to twice the
    norm that sigma is measured by. Without `label_noise` labels are public, and epsilon is only of
    the rows. C is `num_outputs`. This takes Opacus: ``pip install 'fedntk[privacy]'``.
    """
    if uploads == 0:
        return 0.0
    try:
        from opacus.accountants.analysis import rdp  # imports much
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "epsilon needs opacus, which is not installed: pip install 'fedntk[privacy]'",
            name=error.name,
        ) from error

    renyi = rdp.compute_rdp(
        q=1.0, noise_multiplier=noise_multiplier / 2, steps=uploads, orders=ORDERS
    )
    if label_noise > 0:
        pure = label_epsilon(label_noise, num_outputs)
        orders = np.array(ORDERS)
        renyi = renyi + uploads * np.minimum(pure, orders * pure**2 / 2)
    with warnings.catch_warnings():  # that an order at the end of the list is the best
        warnings.simplefilter("ignore")
        epsilon, _ = rdp.get_privacy_spent(orders=ORDERS, rdp=renyi, delta=delta)
    return float(epsilon) if math.isfinite(epsilon) else math.inf
