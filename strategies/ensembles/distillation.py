"""Distilling an ensemble into one network on unlabelled examples, with averaged weights.

Sources: Chen and Chao, *FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning*,
ICLR 2021 (sharpened labels; the student's weights are averaged); Izmailov et al., *Averaging
Weights Leads to Wider Optima and Better Generalization*, UAI 2018, section 3.1 (the cyclical rate,
and the mean of the weights at the ends of the cycles).
"""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

from fedntk.ntk.options import Declared, argument, option


class Distillation(Declared):
    """How the server of :class:`~fedntk.strategies.FedBE` makes one network of an ensemble.

    The loss of SGD is the mean over the examples of -sum_c q_c log p_c. A program that also takes
    the mean over the C classes has C times this rate. A last batch of one example joins the batch
    before it.
    """

    network: nn.Module = argument(
        "the clients' architecture, with C >= 2 outputs; its weights do not matter", kw_only=False
    )
    examples: Tensor = argument(
        "the server's unlabelled examples, at least two, as the network takes them", kw_only=False
    )
    temperature: float = option("T that sharpens the labels", default=0.5, above=0)
    epochs: int = option("passes over the examples", default=20, at_least=1)
    batch_size: int = option("examples of a step", default=128, at_least=2)
    learning_rate: float = option(
        "rate of SGD at the beginning of each cycle", default=1e-3, above=0
    )
    final_learning_rate: float = option("rate at the end of each cycle", default=4e-4, above=0)
    cycle: int = option("steps in which the rate falls linearly", default=25, at_least=1)
    momentum: float = option("momentum of SGD", default=0.9, at_least=0, below=1)
    weight_decay: float = option("weight decay of SGD", default=1e-5, at_least=0)
    swa: bool = option(
        "take the mean of the weights at the ends of cycles and after the last step", default=True
    )
    swa_start: float = option(
        "share of the steps before that mean begins", default=0.3, at_least=0, below=1
    )
    device: str = argument("where the networks run", default="cpu")

    def __post_init__(self) -> None:
        super().__post_init__()
        x = self.examples
        if not isinstance(x, Tensor) or len(x) < 2:
            got = len(x) if isinstance(x, Tensor) else type(x)
            raise ValueError(f"examples: expected a Tensor of at least 2 examples, got {got}")
        if x.is_floating_point() and not bool(x.isfinite().all()):
            raise ValueError("examples: expected finite numbers, got NaN or infinity")
        self.network = copy.deepcopy(self.network).to(self.device)
        dtypes = [p.dtype for p in self.network.parameters() if p.is_floating_point()]
        self.examples = (x.to(dtypes[0]) if dtypes and x.is_floating_point() else x).detach()
        try:
            with _own_state(self.device), torch.no_grad():
                two = self.examples[:2].to(self.device, copy=True)  # it may write into them
                outputs = copy.deepcopy(self.network).train()(two)
        except Exception as error:
            raise ValueError(
                f"examples: the network does not take two of them, of shape {tuple(x.shape[1:])}: "
                f"{str(error).splitlines()[0]}"
            ) from error
        if not isinstance(outputs, Tensor):
            raise ValueError(
                "network: expected one tensor of scores in training mode, got a "
                f"{type(outputs).__name__}; wrap it in one whose forward returns only the scores"
            )
        if outputs.ndim != 2 or outputs.shape[1] < 2:
            shape = tuple(outputs.shape)
            raise ValueError(f"network: expected outputs (n, C) with C >= 2, got {shape}")

    def check(self) -> None:
        """Refuse a rate that rises in a cycle."""
        if self.final_learning_rate > self.learning_rate:
            raise ValueError(
                f"final_learning_rate: expected at most learning_rate = {self.learning_rate:g}, "
                f"got {self.final_learning_rate:g}"
            )

    def settings(self) -> dict[str, Any]:
        """Return the numbers, and how many examples there are."""
        return {**self.compared_options(), "examples": len(self.examples)}

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, 1 for the first (Izmailov et al. 2018, 3.1)."""
        done = ((step - 1) % self.cycle + 1) / self.cycle
        return (1 - done) * self.learning_rate + done * self.final_learning_rate

    def is_averaged(self, step: int, num_steps: int) -> bool:
        """Whether the weights after a step count in their mean."""
        ends = step % self.cycle == 0 and step > self.swa_start * num_steps
        return ends or step == num_steps


def _own_state(device: str) -> AbstractContextManager[None]:
    """Restore torch's global state afterwards."""
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    return torch.random.fork_rng(devices=devices)


def sharpen(probabilities: Tensor, temperature: float) -> Tensor:
    """Return p^(1/T) / sum p^(1/T) for rows p of sum 1; for T -> 0 the most likely class has 1."""
    return (probabilities.log() / temperature).softmax(-1)


def descend(
    student: nn.Module, labels: Tensor, options: Distillation, generator: torch.Generator
) -> Iterator[tuple[int, int]]:
    """Train a network towards labels (n, C) by SGD; after each step, yield (step, steps in all).

    The network is on the options' device. The generator shuffles the options' examples.
    """
    x, device = options.examples, options.device
    optimizer = torch.optim.SGD(
        [p for p in student.parameters() if p.requires_grad],
        lr=options.learning_rate,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
    )
    orders = (torch.randperm(len(x), generator=generator) for _ in range(options.epochs))
    batches = [batch for order in orders for batch in _batches(order, options.batch_size)]
    labels = labels.to(x.dtype if x.is_floating_point() else torch.float32)
    student.train()
    for step, batch in enumerate(batches, 1):
        for group in optimizer.param_groups:
            group["lr"] = options.rate(step)
        optimizer.zero_grad()
        outputs = student(x[batch].to(device))
        nn.functional.cross_entropy(outputs, labels[batch].to(device)).backward()
        optimizer.step()
        yield step, len(batches)


def _batches(order: Tensor, batch_size: int) -> list[Tensor]:
    """Split an order into batches of at least two."""
    batches = list(order.split(batch_size))
    if len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches


def distil(student: nn.Module, labels: Tensor, options: Distillation, seed: int) -> nn.Module:
    """Train a network by :func:`descend`; with `swa`, return the mean of its weights on the way.

    BatchNorm's statistics are then those of the server's examples under the mean weights. The seed
    is for the shuffling and the network's draws; torch's global state is restored.
    """
    x, device = options.examples, options.device
    with _own_state(device):
        torch.manual_seed(seed)
        average = AveragedModel(student)
        generator = torch.Generator().manual_seed(seed)
        for step, num_steps in descend(student, labels, options, generator):
            if options.swa and options.is_averaged(step, num_steps):
                average.update_parameters(student)
        if not options.swa:
            return student
        batches = _batches(torch.randperm(len(x), generator=generator), options.batch_size)
        with torch.no_grad():
            update_bn((x[batch].to(device) for batch in batches), average)
    module: nn.Module = average.module
    return module
