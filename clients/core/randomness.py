"""Random numbers of one client, whatever other clients draw in the same process."""

import contextlib
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .model_probe import training_pass

# torch has one global state, from which dropout draws, and so have NumPy and Python, from which
# transforms draw; threads that draw take turns
GLOBAL_STATE = threading.RLock()


def round_seed(seed: Sequence[int], config: Mapping[str, Any]) -> list[int]:
    """Return what seeds a client's draws in a round: (run's seed, partition, round or 0)."""
    return [*seed, int(config.get("server-round", 0))]


def torch_seed(seed: Sequence[int], config: Mapping[str, Any]) -> int:
    """Return :func:`round_seed` as the one number that torch takes."""
    entropy = np.random.SeedSequence(round_seed(seed, config))
    return int(entropy.generate_state(1)[0])


@contextlib.contextmanager
def own_randomness(model: nn.Module, x: Tensor, seed: int) -> Iterator[torch.Generator]:
    """Yield a generator, and let what `model` draws while it trains depend only on `seed`.

    Torch's global state is the same afterwards. Clients in threads of one process train at the same
    time, unless their networks draw random numbers, as examples `x` (n, ...) show: then in turn.
    """
    generator = torch.Generator().manual_seed(seed)
    devices = [x.device] if x.device.type == "cuda" else []
    with contextlib.ExitStack() as stack:
        if _draws(model, x, devices):
            stack.enter_context(GLOBAL_STATE)
            stack.enter_context(torch.random.fork_rng(devices=devices))
            torch.manual_seed(seed)
        yield generator


@contextlib.contextmanager
def seeded_generators(seed: Sequence[int]) -> Iterator[None]:
    """Seed the global generators of torch, NumPy and Python, and restore them afterwards.

    Other clients of this process that are made, or read or train at random, wait meanwhile; nothing
    else may draw from these generators in another thread.
    """
    words = np.random.SeedSequence([int(number) for number in seed]).generate_state(3)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with GLOBAL_STATE, torch.random.fork_rng(devices=devices):
        states = random.getstate(), np.random.get_state()  # noqa: NPY002
        try:
            torch.manual_seed(int(words[0]))
            np.random.seed(int(words[1]))  # noqa: NPY002
            random.seed(int(words[2]))
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002


@torch.no_grad()
def _draws(model: nn.Module, x: Tensor, devices: list[torch.device]) -> bool:
    training = model.training
    with GLOBAL_STATE, torch.random.fork_rng(devices=devices):
        before = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
        try:
            training_pass(model.train(), x.clone())  # which it may write over
        finally:
            model.train(training)
        after = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
    return any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
