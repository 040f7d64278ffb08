"""Arrays of a network's normalisation and of its head."""

from torch import nn

from .features.feature_map import FeatureMap
from .support.shared_arrays import require_whole


def batch_norm_arrays(network: nn.Module) -> tuple[str, ...]:
    """Return the names of all parameters and statistics of a network's BatchNorm layers.

    Source: Li et al., *FedBN: Federated Learning on Non-IID Features via Local Batch
    Normalization*, ICLR 2021, section 3. They are in the order of ``network.state_dict()``.
    """
    layers = tuple(
        f"{name}." if name else ""
        for name, module in network.named_modules(remove_duplicate=False)
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    )
    arrays = tuple(name for name in network.state_dict() if name.startswith(layers))
    require_whole(network, arrays, "belong to BatchNorm")
    return arrays


def head_arrays(network: nn.Module, head: str = "") -> tuple[str, ...]:
    """Return the names of the arrays of `head`, by default a network's last ``nn.Linear``."""
    _, layer = FeatureMap("last-layer", head=head).last_layer(network)
    modules = network.named_modules(remove_duplicate=False)
    prefixes = tuple(f"{name}." if name else "" for name, module in modules if module is layer)
    arrays = tuple(array for array in network.state_dict() if array.startswith(prefixes))
    require_whole(network, arrays, "belong to the last layer")
    return arrays


def trained_arrays(network: nn.Module) -> frozenset[str]:
    """Return the names of the arrays that are trained; both names of a tied one."""
    named = network.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in named if parameter.requires_grad)
