"""Data and networks that are passed to a run as objects, as settings."""

from typing import Any

from ..config.config import Config
from ..data.own import OwnData
from ..models import name_model


def with_objects(config: Config, *, data: Any = None, model: Any = None) -> Config:
    """Return the configuration with a user's own data and network.

    Data are written into the cache, so that any process reads them, under a name that their content
    gives; a split that comes with them decides `partition` and `num_clients`.
    """
    if data is not None:
        examples = OwnData.of(data, config).read()
        config = config.replace(dataset=f"npz:{examples.write()}", **examples.settings())
    if model is not None:
        config = config.replace(model=name_model(model))
    return config
