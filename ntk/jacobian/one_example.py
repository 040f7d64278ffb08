"""Whether a network is a function of one example, which all Jacobians, features and sums assume."""

import copy
import random
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .structure import keep, structure_of

MOST = 16  # examples that are looked at
REPEATS = 50  # of a network that draws random numbers
NOISE, EXACT = 2e-6, 1e-9  # relative; a difference above NOISE is looked at again in float64
CLEAR = 1e-3  # the same of a network that float64 does not serve
MAX_CHECKED = 256
AGAIN, BESIDE, FEWER = "it runs again", "other examples are beside it", "fewer are beside it"
CURES = {
    AGAIN: "random numbers and counters must not act in evaluation mode (dropout: "
    "training=self.training)",
    BESIDE: "statistics must be of an example's own numbers (GroupNorm, LayerNorm) or kept ones "
    "(BatchNorm with track_running_stats)",
    FEWER: "the number of examples must not count",
}
_CHECKED: dict[Hashable, None] = {}


class _Difference(NamedTuple):
    """Two batches that share the examples in some rows, and differ in the outputs of these."""

    when: str
    first: Tensor
    first_rows: slice
    second: Tensor
    second_rows: slice
    size: float  # relative


@torch.no_grad()
def check_function_of_one_example(model: nn.Module, x: Tensor, form: Hashable = None) -> None:
    """Refuse a network if f(x) does not repeat, or depends on other examples or on how many.

    Up to 16 of the examples `x` (n, ...), on the model's device, go through the model in evaluation
    mode, once for each form of network and example. `form` is :func:`.structure_of` the model, if
    that is known. Parameters that are zero, which may hide something, get other values for it.
    """
    form = form or structure_of(model)
    key = form and (form, x.shape[1:], x.dtype, x.device)
    if key in _CHECKED:
        return
    chosen = x[torch.linspace(0, len(x) - 1, min(len(x), MOST)).long().to(x.device)]
    if key and not bool((chosen != chosen[:1]).any()):  # they show nothing of neighbours
        key = (key, "alike")
        if key in _CHECKED:
            return
    with evaluation_mode(model), _without_zeros(model):
        difference = _difference(model, chosen)
        if difference and _is_confirmed(model, chosen, difference):
            raise ValueError(
                "model: expected that the outputs of an example depend only on the example, "
                f"got others from {_source(model, difference)} when {difference.when}; "
                f"{CURES[difference.when]}"
            )
    keep(_CHECKED, key, None, MAX_CHECKED)


def check_once(model: nn.Module) -> Callable[[Tensor], None]:
    """Return :func:`check_function_of_one_example` of a model that does not change any more."""
    is_checked = False

    def check(x: Tensor) -> None:
        nonlocal is_checked
        if not is_checked:
            check_function_of_one_example(model, x)
            is_checked = len(x) > 1

    return check


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Run recurrent layers by torch's own code: cuDNN's backward pass wants training mode."""
    training = [module for module in model.modules() if module.training]
    cudnn = torch.backends.cudnn.enabled
    if training:
        model.eval()
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = cudnn
        for module in training:
            module.training = True


@contextmanager
def _without_zeros(model: nn.Module) -> Iterator[None]:
    zeros = [p for p in model.parameters() if p.is_floating_point() and not p.any()]
    before = [p.data for p in zeros]
    try:
        for p in zeros:
            values = 0.1 * torch.arange(1.0, p.numel() + 1, device=p.device).sin()
            p.data = values.view(p.shape).to(p)
        yield
    finally:
        for p, data in zip(zeros, before, strict=True):
            p.data = data


def _difference(model: nn.Module, chosen: Tensor, noise: float | None = None) -> _Difference | None:
    """Return the first two batches that show that the network is no function of one example."""
    before, n = _states(model), len(chosen)
    outputs, half = model(chosen.clone()), n // 2
    if not isinstance(outputs, Tensor):
        raise ValueError(
            f"model: expected one tensor of outputs (n, ...), got a {type(outputs).__name__}; wrap "
            "it in a network whose forward returns only the outputs"
        )
    if outputs.shape[:1] != (n,):
        one = model(chosen[:1].clone())
        shape, n = (one.shape, 1) if one.shape[:1] != (1,) else (outputs.shape, n)
        raise ValueError(
            f"model: expected outputs of shape (n, ...), got {tuple(shape)} for n = {n}"
        )
    repeats = 1 if _states(model) == before else REPEATS
    first, last = chosen[:1].expand_as(chosen[half:]), chosen[-1:].expand_as(chosen[:half])
    every, one = slice(None), slice(0, 1)
    pairs = [(AGAIN, every, chosen, every)] * repeats
    pairs += [
        (BESIDE, slice(0, half), torch.cat([chosen[:half], first]), slice(0, half)),
        (BESIDE, slice(half, n), torch.cat([last, chosen[half:]]), slice(half, n)),
        (FEWER, one, chosen[:2] if n > 2 else chosen.repeat_interleave(2, 0), one),
        *((FEWER, slice(i, i + 1), chosen[i : i + 1], one) for i in range(n)),
    ]
    for when, rows, batch, batch_rows in pairs:
        try:
            others = model(batch.clone())
        except (RuntimeError, ValueError, IndexError) as error:
            raise ValueError(
                f"model: expected that it takes any number of examples, as each is served by "
                f"itself; it takes {n} and fails for {len(batch)}: {error}"
            ) from error
        distance = _distance(outputs[rows], others[batch_rows])
        if distance > (noise or _rounding(outputs)):
            when = when if repeats == 1 else AGAIN
            return _Difference(when, chosen, rows, batch, batch_rows, distance)
    return None


def _is_confirmed(model: nn.Module, chosen: Tensor, difference: _Difference) -> bool:
    """Whether a difference is more than rounding, which is far smaller in float64."""
    if difference.size > 0.1:
        return True
    try:
        wide = copy.deepcopy(model).double()
        examples = chosen.double() if chosen.is_floating_point() else chosen
        return _difference(wide, examples, max(EXACT, difference.size / 10)) is not None
    except (RuntimeError, TypeError):
        return difference.size > CLEAR


def _distance(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the largest number; infinite if forms or NaN differ."""
    if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    if not a.numel():
        return 0.0
    a, b = (t.double().nan_to_num(0.0, 0.0, 0.0) for t in (a, b))
    return float((a - b).abs().max() / a.abs().max().clamp(min=torch.finfo(torch.double).tiny))


def _rounding(outputs: Tensor) -> float:
    return EXACT if outputs.dtype == torch.float64 else NOISE


def _states(model: nn.Module) -> tuple[Any, ...]:
    """Return what a forward pass changes if it draws random numbers or counts calls."""
    of_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    drawn = [state.numpy().tobytes() for state in (torch.get_rng_state(), *of_gpus)]
    legacy = np.random.get_state()  # noqa: NPY002
    values = [value for module in model.modules() for value in vars(module).values()]
    counts = [value for value in values if isinstance(value, (int, float))]
    buffers = [buffer._version for buffer in model.buffers()]
    return (random.getstate(), str(legacy), *drawn, *counts, *buffers)


def _source(model: nn.Module, difference: _Difference) -> str:
    """Name the first module that makes different outputs of the same inputs."""
    when, first, first_rows, second, second_rows, _ = difference

    def differ(a: Tensor, b: Tensor) -> bool:
        a = _rows_of(a, len(first), first_rows, when)
        return _distance(a, _rows_of(b, len(second), second_rows, when)) > _rounding(a)

    for _ in range(REPEATS if when == AGAIN else 1):
        for (name, *tensors), (_, *others) in zip(
            _calls(model, first), _calls(model, second), strict=False
        ):
            inputs, outputs = (any(map(differ, a, b)) for a, b in zip(tensors, others, strict=True))
            if outputs and not inputs and name:
                return f"{name!r} ({type(model.get_submodule(name)).__name__})"
    return f"the network's forward ({type(model).__name__})"


def _rows_of(tensor: Tensor, n: int, rows: slice, when: str) -> Tensor:
    """Return the rows of some of n examples; nothing of what has no rows of examples."""
    for axis in range(min(2, tensor.ndim)):
        if tensor.shape[axis] == n:
            return tensor.movedim(axis, 0)[rows]
    return tensor if when == AGAIN else tensor.new_empty(0)


def _calls(model: nn.Module, batch: Tensor) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    """Return name, inputs and outputs of all calls of modules, in the order in which they end."""
    calls, open_calls = [], []

    def tensors(values: Any) -> list[Tensor]:
        return [leaf.clone() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]

    def enter(_: nn.Module, args: Any, named: Any) -> None:
        open_calls.append(tensors((args, named)))

    with ExitStack() as stack:
        for name, module in model.named_modules():

            def leave(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
                calls.append((name, open_calls.pop(), tensors(output)))

            stack.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
            stack.enter_context(module.register_forward_hook(leave))
        model(batch.clone())
    return calls
