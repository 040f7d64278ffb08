"""The part of a network that no method trains, and its outputs: features computed once."""

import copy
import hashlib
import inspect
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from itertools import chain
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, fx, nn
from torch.nn.functional import interpolate, normalize

BATCH = 32  # examples of each call; the last ones are padded


class UnitLength(nn.Module):
    """h (n, d) -> h / ||h||, float32, or float64 of float64."""

    bound = 1.0  # largest magnitude of a feature

    def forward(self, inputs: Tensor) -> Tensor:
        """Return rows of length 1, or 0."""
        return normalize(inputs if inputs.dtype == torch.float64 else inputs.float())


class SquareImages(nn.Module):
    """Pictures (n, c, h, w) -> (n, c, size, size): the shorter side resized, the middle cut out."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """Return square pictures."""
        height, width = x.shape[-2:]
        if (height, width) == (self.size, self.size):
            return x
        scale = self.size / min(height, width)
        sides = [max(self.size, round(side * scale)) for side in (height, width)]
        resized = interpolate(x, sides, mode="bicubic", antialias=True)
        top, left = ((side - self.size) // 2 for side in sides)
        return resized[..., top : top + self.size, left : left + self.size]

    def extra_repr(self) -> str:
        """Return the size, which outputs depend on."""
        return f"size={self.size}"


class EvaluationMode(nn.Module):
    """A network that stays in evaluation mode in training as well.

    BatchNorm uses its running statistics, and layers that drop at random drop nothing.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Keep evaluation mode."""
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's outputs."""
        outputs: Tensor = self.network(x)
        return outputs


class LastInputs(nn.Module):
    """A copy of a network up to a layer: its outputs are that layer's inputs."""

    def __init__(self, network: nn.Module, layer: str) -> None:
        super().__init__()
        self.network = copy.deepcopy(network)
        if not layer:
            self.network = _Reached()
            return
        parent, _, last = layer.rpartition(".")
        setattr(self.network.get_submodule(parent), last, _Reached())

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's inputs; ValueError if the network does not call it."""
        try:
            self.network(x)
        except _InputsError as reached:
            inputs: Tensor = reached.args[0]
            return inputs
        raise ValueError("expected a network that calls its last layer")


class _InputsError(Exception):
    """Ends a forward pass at a layer, whose inputs it holds."""


class _Reached(nn.Module):
    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        raise _InputsError(*inputs, *named.values())


class FrozenPart:
    """The first part of a network, in evaluation mode: examples in, features out.

    An example's features have the same bits whatever is beside it and however many threads there
    are, on one make of processor.

    Parameters
    ----------
    network : nn.Module, optional
        It is moved to `device`. None: all of the network is trained, and only the moments are
        fixed.
    example : Tensor
        Inputs (1, ...) that the network takes, in its dtype.
    moments : pair of tuples, optional
        Mean and standard deviation of the three channels of pictures, with values 0 ... 1, that the
        network was trained with. None: the examples' own.
    device : str
        Where features are computed.
    frozen_arrays : mapping of str to Tensor
        Frozen arrays in the trained part, which count in the digest.

    Attributes
    ----------
    shape : tuple of int
        Shape of the features of one example, which is what the trained part takes.
    """

    def __init__(
        self,
        network: nn.Module | None,
        example: Tensor,
        *,
        moments: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
        device: str = "cpu",
        frozen_arrays: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self.network, self.moments, self.device = network, moments, device
        self.dtype = example.dtype
        self._arrays = digest_of(frozen_arrays.items()) if frozen_arrays else ""
        outputs = example
        if network is not None:
            network.requires_grad_(False).eval()
            with torch.no_grad():
                outputs = probe_outputs(network, 1, example)[1]
            if not isinstance(outputs, Tensor) or len(outputs) != 1:
                what = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs)
                raise ValueError(f"expected features (1, ...) of one example, got {what}")
            network.to(device)
        self.shape = tuple(outputs.shape[1:])
        self._sample = [f"{value:.2e}" for value in outputs.flatten().tolist()]

    @cached_property
    def digest(self) -> str:
        """What two machines must agree on: layers, weights and buffers, and the moments."""
        if not self._arrays:
            return self._own_digest
        return hashlib.sha256((self._own_digest + self._arrays).encode()).hexdigest()

    @property
    def key(self) -> str:
        """A name of the function on this machine: also of what a network does not show."""
        return hashlib.sha256(repr((self._own_digest, self._sample)).encode()).hexdigest()

    @cached_property
    def _own_digest(self) -> str:
        modules = [] if self.network is None else [*self.network.modules()]
        arrays = [(*m.named_parameters(), *m.named_buffers()) for m in modules[:1]]
        classes = [type(module).__name__ for module in modules]
        return digest_of(chain(*arrays), repr((self.moments, classes)))

    def __call__(self, x: Tensor) -> Tensor:
        """Return the features of examples (n, ...), float32 on the CPU."""
        if self.network is None:
            return x
        if not len(x):
            return torch.zeros(0, *self.shape)
        threads = torch.get_num_threads()
        is_shared = torch.device(self.device).type == "cpu"
        # a network and a thread for each batch: how many threads share one changes its last bits
        networks, parts = SimpleQueue[nn.Module](), x.split(BATCH)
        for i in range(min(threads, len(parts)) if is_shared else 1):
            networks.put(copy.deepcopy(self.network) if i else self.network)

        def features(part: Tensor) -> Tensor:
            padded = torch.cat([part, part[:1].expand(BATCH - len(part), *part.shape[1:])])
            network = networks.get()
            try:
                with torch.no_grad():
                    outputs: Tensor = network(padded.to(self.device, self.dtype, copy=True))
            finally:
                networks.put(network)
            if len(outputs) != BATCH:
                raise ValueError(
                    f"expected features of each of {BATCH} examples, got {len(outputs)} rows: the "
                    "first axis is not that of the examples"
                )
            return outputs[: len(part)].to("cpu", torch.float32)

        start = partial(torch.set_num_threads, 1) if is_shared else None
        try:
            with ThreadPoolExecutor(networks.qsize(), initializer=start) as pool:
                return torch.cat(list(pool.map(features, parts)))
        finally:
            torch.set_num_threads(threads)


def digest_of(arrays: Iterable[tuple[str, Tensor]], begin: str = "") -> str:
    """Return a digest of arrays with their names, dtypes and shapes, and of a text."""
    digest = hashlib.sha256(begin.encode())
    for name, tensor in arrays:
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        numbers = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(numbers.numpy().tobytes())
    return digest.hexdigest()


def probe_outputs(network: nn.Module, num: int, example: Tensor) -> tuple[Tensor, Any]:
    """Return inputs (num, ...), and outputs; of zeros for a network that takes whole numbers.

    Inputs that are bytes, as of texts, are the example itself.
    """
    if example.dtype == torch.uint8:
        inputs = example.expand(num, *example.shape[1:])
        return inputs, network(inputs)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num, *example.shape[1:], generator=generator).to(example.dtype)
    try:
        return inputs, network(inputs)
    except (RuntimeError, IndexError):
        inputs = torch.zeros_like(inputs)
        return inputs, network(inputs)


def last_block(network: nn.Module) -> str:
    """Return the name of the last repeated block; ValueError if no class of blocks repeats.

    A block is a module of a class of its own with two layers of weights or more, such as a residual
    block or an encoder layer, that stands in no other one.
    """
    blocks = {
        name: module
        for name, module in network.named_modules()
        if not type(module).__module__.startswith("torch.nn.modules.container")
        and sum(p.ndim > 1 for p in module.parameters()) > 1
    }
    classes = [type(module) for module in blocks.values()]
    repeated = [name for name, module in blocks.items() if classes.count(type(module)) > 1]
    outermost = [n for n in repeated if not any(n.startswith(f"{other}.") for other in repeated)]
    if not outermost:
        raise ValueError(
            "expected a network of blocks, such as residual blocks, got none that repeats; name "
            f"the first layer to train, one of {', '.join(dict(network.named_children()))}"
        )
    last: str = outermost[-1]
    return last


def _trace(network: nn.Module) -> fx.Graph:
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(network.forward).parameters.items()
        if parameter.default is not parameter.empty
    }
    try:
        return _Tracer().trace(network, defaults)
    except Exception as error:  # whatever a network's forward does with a stand-in for numbers
        raise ValueError(f"the network cannot be divided there ({error}); train its head") from None


class _Tracer(fx.Tracer):
    """Keeps layers with weights as they are, those of libraries as well."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        kinds = (nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, SquareImages, UnitLength)
        return isinstance(m, kinds) or super().is_leaf_module(m, module_qualified_name)


def split_network(network: nn.Module, first: str) -> tuple[nn.Module, nn.Module]:
    """Return what a network does before a module is called, and what it does from there on.

    They share its layers, under their names. ValueError if more than one tensor goes from one part
    to the other, if the network cannot be traced, or if what comes after is written otherwise for
    training. The network is left in evaluation mode.
    """
    in_training = _parts_of(network.train(), first)[1]
    before, after = _parts_of(network.eval(), first)
    if in_training.code != after.code:
        raise ValueError(
            f"what follows {first} does something else in training; use layers such as nn.Dropout, "
            "or train its head"
        )
    return before, after.eval()


def _parts_of(network: nn.Module, first: str) -> tuple[fx.GraphModule, fx.GraphModule]:
    names = dict(network.named_modules())
    if first not in names or not first:
        inner = ", ".join(name for name in names if name and "." not in name)
        raise ValueError(f"expected a module of the network, such as {inner}, got {first!r}")
    graph = _trace(network)
    nodes = list(graph.nodes)

    def is_inside(node: fx.Node) -> bool:
        places = [str(key) for key in node.meta.get("nn_module_stack", ())]
        places += [str(node.target)] if node.op == "call_module" else []
        return any(f"{place}.".startswith(f"{first}.") for place in places)

    inside = [i for i, node in enumerate(nodes) if is_inside(node)]
    if not inside:
        raise ValueError(f"expected a module that the network calls, got {first!r}")
    start = inside[0]
    earlier = set(nodes[:start])
    crossing = {
        source: None
        for node in nodes[start:]
        for source in node.all_input_nodes
        if source in earlier and source.op != "get_attr"
    }
    cuts = [node for node in crossing if not _is_batch_size(node)]
    if len(cuts) != 1:
        raise ValueError(f"expected one tensor to enter {first}, got {len(cuts)}; train its head")
    before, after = fx.Graph(), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes[:start]:
        copies[node] = before.node_copy(node, copies.__getitem__)
    before.output(copies[cuts[0]])
    entering = after.placeholder("x")
    copies = {cuts[0]: entering}
    for node in crossing.keys() - {cuts[0]}:
        copies[node] = after.call_method("size", (entering, 0))
    for node in nodes:
        if node not in earlier or (node.op == "get_attr" and not earlier >= node.users.keys()):
            copies[node] = after.node_copy(node, copies.__getitem__)
    return _module_of(network, before), _module_of(network, after)


def _module_of(network: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Return what a graph computes, with the layers that it needs."""
    module = fx.GraphModule(network, graph)
    module.graph.eliminate_dead_code()
    module.delete_all_unused_submodules()
    module.recompile()
    return module


def _is_batch_size(node: fx.Node) -> bool:
    """Whether a node is x.size(0) or x.shape[0]."""
    if node.op == "call_method" and node.target == "size":
        return node.args[1:] == (0,)
    of_shape = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    is_item = getattr(node.target, "__name__", "") == "getitem" and node.args[1:] == (0,)
    return is_item and of_shape is not None and of_shape.args[1:] == ("shape",)
