"""Pictures for the small forms of declarations, from the digits that scikit-learn brings."""

import numpy as np
from sklearn.datasets import load_digits

from fedntk.simulations import OwnData
from fedntk.simulations.data.data import Part


def pictures() -> OwnData:
    """Return 100 training and 50 test pictures (3, 8, 8) of ten digits, of five owners."""
    digits = load_digits()
    x = np.repeat(digits.images[:150, None].astype(np.uint8) * 15, 3, axis=1)
    whole = Part(x, digits.target[:150], np.arange(150) % 5)
    return OwnData({"train": whole.select(slice(100)), "test": whole.select(slice(100, 150))})
