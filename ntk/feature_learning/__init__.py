"""Feature learning theory of FedAvg: two-patch data, its network, coefficients and SNR."""

from .coefficients import Coefficients, coefficient_step, decompose, mixing_matrix, train
from .network import (
    Evaluation,
    effective_snr,
    evaluate,
    generalisation_exponent,
    initial_std,
    signal_similarity,
)
from .two_patch import TwoPatchDistribution, TwoPatchExamples

__all__ = [
    "Coefficients",
    "Evaluation",
    "TwoPatchDistribution",
    "TwoPatchExamples",
    "coefficient_step",
    "decompose",
    "effective_snr",
    "evaluate",
    "generalisation_exponent",
    "initial_std",
    "mixing_matrix",
    "signal_similarity",
    "train",
]
