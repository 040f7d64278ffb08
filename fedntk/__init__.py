"""NTK-based federated learning for Flower; the rooms are ``fedntk.ntk``, ``.strategies`` and so on.

The package imports nothing by itself, so that ``fedntk.ntk`` needs torch and NumPy alone.
"""

from pathlib import Path

__all__ = ["__version__"]

__version__ = "0.1.0"

if Path(__file__).with_name("ntk").is_file():
    raise ImportError(
        "the rooms are symbolic links, which this clone lacks; clone again with "
        "git clone -c core.symlinks=true, on Windows in Developer Mode"
    )
