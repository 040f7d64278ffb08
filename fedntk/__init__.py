"""NTK-based federated learning for Flower; the rooms are ``fedntk.ntk``, ``.strategies`` and so on.

The package imports nothing by itself, so that ``fedntk.ntk`` needs torch and NumPy alone.
"""

import sys
from pathlib import Path

__all__ = ["__version__"]

# a checkout in the working directory comes first; its rooms are where the package is installed
_packages = (Path(folder, "fedntk") for folder in sys.path if folder)
__path__ += [str(own) for own in _packages if (own / "__init__.py").is_file()]

__version__ = "0.1.0"
