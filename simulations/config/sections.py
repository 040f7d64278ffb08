"""Common settings that stand in tables of their own: the parts of any method's strategy."""

from fedntk.ntk.robust_averages import Defence
from fedntk.strategies import Asynchrony, Sampling, Screening, SecureAggregation, WeightAverage

from .settings import Settings


class ScreeningSettings(Settings, frozen=True, eq=True):
    """Settings of :class:`~fedntk.strategies.Screening`."""

    table = "screening"

    rule: Defence = Screening.options()["rule"].field()
    malicious: int = Screening.options()["malicious"].field()
    outlier_factor: float = Screening.options()["outlier_factor"].field()


class SecureSettings(Settings, frozen=True, eq=True):
    """Settings of :class:`~fedntk.strategies.SecureAggregation`."""

    table = "secure"

    threshold: float = SecureAggregation.options()["threshold"].field()


class SamplingSettings(Settings, frozen=True, eq=True):
    """Settings of :class:`~fedntk.strategies.Sampling`; the seed is the run's."""

    table = "sampling"

    over_selection: float = Sampling.options()["over_selection"].field()


class AverageSettings(Settings, frozen=True, eq=True):
    """Settings of :class:`~fedntk.strategies.WeightAverage`."""

    table = "average"

    decay: float = WeightAverage.options()["decay"].field()


class CentreSettings(Settings, frozen=True, eq=True):
    """Settings of :class:`~fedntk.strategies.CentreInputs`, which has none."""

    table = "centre"


class AsynchronySettings(Settings, frozen=True, eq=True):
    """Settings of :class:`~fedntk.strategies.Asynchrony`."""

    table = "asynchrony"

    stop_at_clients: int = Asynchrony.options()["stop_at_clients"].field()
