"""Data and networks that are passed to a run as objects, as settings."""

from typing import Any

from ..config.config import Config
from ..config.settings import ConfigError
from ..data.own import OwnData
from ..models import GIVEN, name_model


def with_objects(config: Config, engine: str, *, data: Any = None, model: Any = None) -> Config:
    """Return the configuration with a user's own data and network.

    Data are written into the cache, so that any process reads them, under a name that their content
    gives; a split that comes with them decides `partition` and `num_clients`.
    """
    if data is not None:
        examples = OwnData.of(data, config).read()
        config = config.replace(dataset=f"npz:{examples.write()}", **examples.settings())
    if model is not None:
        config = config.replace(model=name_model(model))
    if engine == "ray" and config.model.startswith(GIVEN):
        raise ConfigError(
            f"model = {config.model}: Ray's workers cannot import it; put a function of "
            "(input_shape, num_classes) into a file and pass model='mynet.py:build', or use the "
            "local engine"
        )
    return config
