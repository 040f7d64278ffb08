"""The two-patch data set of Huang et al. (ICLR 2024), drawn anew wherever it is loaded."""

from typing import Any, Self

import numpy as np
import torch

from fedntk.ntk.feature_learning import TwoPatchDistribution, TwoPatchExamples

from ..config.settings import ConfigError, Settings, nearest, setting
from ..errors import naming
from .data import Part


class TwoPatchOptions(Settings, frozen=True, eq=True):
    """Options of ``dataset = "two-patch:<options>"``; the defaults are those of section 6.1.

    Examples
    --------
    >>> options = TwoPatchOptions.read("groups=1-3-6-10,signal=1.5")
    >>> options.distribution.num_clients, options.signal, options.dimension
    (20, 1.5, 1000)
    """

    table = "two-patch"

    groups: str = setting("20", "clients that share each signal: 20 is IID, 1-3-6-10 four groups")
    dimension: int = setting(1000, "d of one patch", at_least=2)
    examples: int = setting(100, "training examples of each client", at_least=1)
    test: int = setting(2000, "test examples of each client", at_least=1)
    signal: float = setting(2.0, "||mu||_2", above=0)
    noise: float = setting(1.0, "sigma_p", above=0)
    seed: int = setting(0, "of the data; the run's own seed has no part in it", at_least=0)

    @classmethod
    def read(cls, text: str) -> Self:
        """Read options with commas between them; the others are defaults."""
        options: dict[str, Any] = {}
        for pair in text.split(",") if text else []:
            name, _, value = pair.partition("=")
            if name not in cls.options():
                names = ", ".join(f"{name}=..." for name in cls.options())
                meant = nearest(name, cls.options())
                raise ConfigError(f"two-patch: expected options {names}, got {pair!r}{meant}")
            options[name] = cls.checked(name, value, from_text=True)
        return cls(**options)

    def check(self) -> None:
        """Refuse groups that are not sizes, or are more than the signals leave room for."""
        with naming(f"two-patch.groups = {self.groups}, sizes such as 1-3-6-10", ValueError):
            _ = self.distribution

    @property
    def distribution(self) -> TwoPatchDistribution:
        """Where the examples are drawn from."""
        return TwoPatchDistribution(
            group_sizes=tuple(int(size) for size in self.groups.split("-")),
            dimension=self.dimension,
            signal_norm=self.signal,
            noise_std=self.noise,
            seed=self.seed,
        )


def draw_two_patch(options: TwoPatchOptions) -> tuple[Part, Part]:
    """Draw both sets, x float32 (K n, 2, d), y = 1 for +1: the first example of each client, ..."""
    draw, dtype = options.distribution.draw, torch.float32
    train = draw(options.examples, part="train", dtype=dtype)
    return _in_turn(train), _in_turn(draw(options.test, part="test", dtype=dtype))


def _in_turn(examples: TwoPatchExamples) -> Part:
    x, y = examples.patches().transpose(0, 1), examples.classes().T
    rows, labels = (part.flatten(0, 1).contiguous().numpy() for part in (x, y))
    return Part(rows, labels, np.tile(np.arange(y.shape[1]), len(y)))
