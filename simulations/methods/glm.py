"""Linear and logistic regression, with a table of coefficients in the columns' own units."""

from collections.abc import Sequence
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from scipy.stats import norm
from scipy.stats import t as student
from torch import nn

from fedntk.ntk.convex.glm import GLMFit
from fedntk.ntk.predictors.pooled_moments import with_moments
from fedntk.ntk.support.files import whole
from fedntk.strategies import GLM, Strategy

from ..config.config import BaseConfig
from ..config.settings import ConfigError
from .method import Setup
from .sums import SumsMethod

if TYPE_CHECKING:  # slow to import
    import pandas as pd

logger = getLogger("flwr")
FILE = "coefficients.csv"  # in a run's details
CONSTANT = "(constant)"


class _GLM(SumsMethod):
    name = "glm"
    strategy_class = GLM
    metrics = ("decrement", "clients-missing")
    baseline = True

    def validates(self, config: BaseConfig) -> str:
        return ""

    def check(self, config: BaseConfig, settings: Any) -> None:
        super().check(config, settings)
        if config.model == "mlp":
            raise ConfigError(
                "model = mlp: its random features have no meaning; set model = linear, or give a "
                "frozen network of yours"
            )

    def adapt(self, network: nn.Module, config: BaseConfig) -> nn.Module:
        return network.double()

    def after_run(self, setup: Setup, strategy: Strategy, folder: Path) -> None:
        """Write a table and moments, if the network is linear, so that columns are the data's."""
        fit, inputs = cast(GLM, strategy).fit, setup.data.inputs
        if setup.config.model != "linear" or setup.config.projection:
            return
        if inputs.columns and (moments := cast(GLM, strategy).moments):
            with_moments(inputs, *moments).save(folder)
        if fit is None or not cast(GLM, strategy).solved:
            cause = "there is no estimate" if fit is None else "more rounds are needed"
            logger.warning("no table of coefficients: %s", cause)
            return
        mean, std = (np.broadcast_to(a, inputs.shape).ravel() for a in (inputs.mean, inputs.std))
        targets = inputs.targets
        of_targets = () if targets is None else (targets.mean, targets.std)
        names = inputs.columns or [f"x{i}" for i in range(len(mean))]
        of = inputs.classes if targets is not None else inputs.classes[1:]
        table = coefficient_table(fit.in_units(mean, std, *of_targets), [*names, CONSTANT], of)
        with whole(folder / FILE) as file:
            file.write(table.to_csv(index=False).encode())


def coefficient_table(
    fit: GLMFit, names: Sequence[str], targets: Sequence[Any], confidence: float = 0.95
) -> "pd.DataFrame":
    """Return a row for each target and column of a fit.

    ``coefficient``, ``standard_error``, their ratio ``statistic``, the two-sided ``p`` of it, by
    Student's t for least squares and the normal distribution for classes, and the ends ``low`` and
    ``high`` of the interval with a confidence. Of classes, each is compared with the first.
    """
    import pandas as pd

    law = student(fit.df_resid) if fit.family == "gaussian" else norm
    estimate, error = fit.coefficients.T.ravel(), fit.standard_errors.T.ravel()
    half = law.ppf((1 + confidence) / 2) * error
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = estimate / error
    columns: dict[str, Any] = {
        "target": np.repeat(np.array([*map(str, targets)]), len(names)),
        "name": [*names] * len(targets),
        "coefficient": estimate,
        "standard_error": error,
        "statistic": ratio,
        "p": 2 * law.sf(np.abs(ratio)),
        "low": estimate - half,
        "high": estimate + half,
    }
    return pd.DataFrame(columns)


METHOD = _GLM()
