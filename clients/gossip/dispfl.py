"""Client of DisPFL: trains the weights of a mask of its own, and sends only these.

Source: Dai et al., *DisPFL: Towards Communication-Efficient Personalized Federated Learning via
Decentralized Sparse Training*, ICML 2022, and its authors' program; the strategy tells what is
theirs from this package's reading. Densities of layers, and regrowth by gradients: Evci et al.,
*Rigging the Lottery: Making All Tickets Winners*, ICML 2020, section 3.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedntk.ntk.averages import masked_mean
from fedntk.ntk.payloads.gossip_options import ALL, DisPFLOptions
from fedntk.ntk.support.arrays import ArrayDict, require_array, take_arrays
from fedntk.ntk.support.shared_arrays import unify

from ..core.local_sgd import Gradients, plain_gradients, trained_parameters
from ..core.randomness import round_seed
from .gossip import GossipClient
from .relay import COUNT, HEARD, RESTARTED, Answer, Message, WeightsParcel

MASKS = "sparse-masks"  # name of an array beside the weights
Masks = dict[str, NDArray[np.bool_]]
SENT, NEXT = "sent ", "next "  # before names beside kept weights: of their mask, and the next one


class SparseWeights(NamedTuple):
    """Weights that are zero outside of masks, and how many examples their client has."""

    weights: ArrayDict
    masks: Masks
    num_examples: int

    def to_arrays(self) -> ArrayDict:
        """Wire format: the numbers in the masks, whole arrays without one, masks of a bit each."""
        sent = {name: self.weights[name][mask] for name, mask in self.masks.items()}
        sent[MASKS] = np.packbits(_join(self.masks))
        return WeightsParcel(self.weights, self.num_examples).to_arrays() | sent

    @classmethod
    def from_arrays(
        cls,
        arrays: Mapping[str, NDArray[Any]],
        expected: ArrayDict,
        max_examples: int,
        masked: Sequence[str],
    ) -> "SparseWeights":
        """Check what :meth:`to_arrays` made, with masks of arrays `masked`; raise BadReply."""
        take_arrays(arrays, *expected, COUNT, MASKS)
        sizes = [expected[name].size for name in masked]
        length = -(-sum(sizes) // 8)
        require_array(MASKS, arrays[MASKS], shape=(length,), dtype=np.uint8)
        bits = np.unpackbits(arrays[MASKS], count=sum(sizes)).astype(bool)
        parts = np.split(bits, np.cumsum(sizes)[:-1]) if sizes else []
        masks = {n: p.reshape(expected[n].shape) for n, p in zip(masked, parts, strict=True)}
        whole = {name: arrays[name] for name in arrays.keys() - {MASKS}}
        for name, mask in masks.items():
            require_array(name, arrays[name], shape=(int(mask.sum()),), dtype=expected[name].dtype)
            whole[name] = np.zeros_like(expected[name])
            whole[name][mask] = arrays[name]
        parcel = WeightsParcel.from_arrays(whole, expected, max_examples)
        return cls(parcel.weights, masks, parcel.num_examples)


class DisPFLClient(GossipClient):
    """Answers the steps of DisPFL: ``weights`` and ``step``.

    Arrays of two axes or more that are trained have masks; biases, norms and buffers are whole. A
    client that lost its weights begins with the first ones again: it sends nothing until it has
    averaged. The batch size of `sgd` is also that of the gradient by which masks regrow.
    """

    strategy = "DisPFL"
    options_kind = DisPFLOptions

    def step_weights(self, message: Message) -> Answer:
        """Send the weights and the mask that they have."""
        sparse, _, lost = self._state(message)
        sent = {} if lost and message.neighbours else {ALL: sparse.to_arrays()}
        return sent, {RESTARTED: int(lost)}

    def step_step(self, message: Message) -> Answer:
        """Average over those that have a coordinate, train in the mask, and search for the next."""
        sparse, mask, lost = self._state(message)
        parse = partial(SparseWeights.from_arrays, masked=list(mask))
        others: list[tuple[int, SparseWeights]] = self.read_weights(message, sparse.weights, parse)
        shares = self.shares([(j, parcel.num_examples) for j, parcel in others], message)
        first = int(lost and bool(others))  # without oneself
        parcels, shares = [sparse, *(parcel for _, parcel in others)][first:], shares[first:]
        begun = _apply_masks(
            masked_mean([p.weights for p in parcels], [p.masks for p in parcels], shares), mask
        )
        begun = unify(self.model, begun)
        message.memory.keep_before(begun)
        tensors = {name: torch.from_numpy(bits).to(self.device) for name, bits in mask.items()}

        def in_mask(gradients: Gradients) -> Gradients:
            return {n: g * tensors[n] if n in tensors else g for n, g in gradients.items()}

        trained, metrics = self.train_from(begun, message, in_mask)
        following = self._search(trained, mask, message)
        masks = {SENT + name: array for name, array in mask.items()}
        masks |= {NEXT + name: array for name, array in following.items()}
        message.memory.keep({**trained, **masks})
        sent = SparseWeights(trained, mask, self.num_examples)
        metrics |= {
            RESTARTED: int(lost),
            HEARD: len(others),
            "mask-density": float(_join(mask).mean()),
            "mask-changed": float((_join(mask) != _join(following)).mean()),
        }
        return {ALL: sent.to_arrays()}, metrics

    def _state(self, message: Message) -> tuple[SparseWeights, Masks, bool]:
        weights, lost = message.memory.current()
        counted, options = message.memory.counted, message.options
        if counted and not lost:
            saved = message.memory.store().load(counted) or {}
            names = [name for name, p in trained_parameters(self.model).items() if p.ndim > 1]
            masks = {name: saved[SENT + name] for name in names}
            following = {name: saved[NEXT + name] for name in names}
            return SparseWeights(weights, masks, self.num_examples), following, False
        seed = [options.seed] if options.same_masks else self.seed
        generator = np.random.default_rng([*seed, *b"first-masks"])
        shapes = {name: tuple(p.shape) for name, p in trained_parameters(self.model).items()}
        masks = first_masks(shapes, 1 - options.sparsity, generator)
        sparse = SparseWeights(_apply_masks(weights, masks), masks, self.num_examples)
        return sparse, masks, lost

    def _search(self, trained: ArrayDict, masks: Masks, message: Message) -> Masks:
        config, share = message.config, message.options.pruned_share(message.memory.round)
        if not share:
            return masks
        self.load_weights(trained)
        self.model.eval()
        x, targets = self.training_examples(dict(config))
        generator = np.random.default_rng([*round_seed(self.seed, config), *b"mask-search"])
        batch = torch.from_numpy(np.sort(generator.permutation(len(x))[: self.sgd.batch_size]))
        batch_loss = partial(self.sgd.batch_loss(self, x, targets), batch)
        _, gradients = plain_gradients(batch_loss, trained_parameters(self.model))
        slopes = {name: slope.cpu().numpy() for name, slope in gradients.items()}
        self.model.zero_grad()
        return {
            name: search(mask, trained[name], slopes.get(name, np.zeros(mask.shape)), share)
            for name, mask in masks.items()
        }


def _join(masks: Masks) -> NDArray[np.bool_]:
    return np.concatenate([np.zeros(0, bool), *(mask.ravel() for mask in masks.values())])


def _apply_masks(weights: ArrayDict, masks: Masks) -> ArrayDict:
    return {n: np.where(masks[n], w, w.dtype.type(0)) if n in masks else w
            for n, w in weights.items()}  # fmt: skip


def layer_densities(shapes: Mapping[str, tuple[int, ...]], density: float) -> dict[str, float]:
    """Return the density of each array by the rule of Erdos-Renyi kernels (Evci et al. 2020).

    Arrays of fewer than two axes, such as biases, are whole, and count. Any other array, of shape
    (a, b, ...), has a density in proportion to (a + b + ...) / (a b ...), at most 1, such that all
    together have the wanted `density`.
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    ratios = {name: sum(shape) / sizes[name] for name, shape in shapes.items() if len(shape) > 1}
    whole = shapes.keys() - ratios.keys()
    left = density * sum(sizes.values()) - sum(sizes[name] for name in whole)
    if ratios and left <= 0:
        raise ValueError(
            f"sparsity: the network's vectors, which stay whole, have more than {density:.3g} of "
            "its numbers; choose a lower one"
        )
    scale = 0.0
    while ratios:
        scale = left / sum(ratios[name] * sizes[name] for name in ratios)
        largest = max(ratios.values())
        if largest * scale <= 1:
            break
        for name in [name for name, ratio in ratios.items() if ratio == largest]:
            left -= sizes[name]
            del ratios[name]
    return {name: ratios[name] * scale if name in ratios else 1.0 for name in shapes}


def first_masks(
    shapes: Mapping[str, tuple[int, ...]], density: float, generator: np.random.Generator
) -> Masks:
    """Draw masks of the densities of :func:`layer_densities`, for arrays of two axes or more."""
    masks: Masks = {}
    for name, share in layer_densities(shapes, density).items():
        if len(shapes[name]) > 1:
            mask = np.zeros(math.prod(shapes[name]), bool)
            mask[generator.permutation(len(mask))[: max(1, round(share * len(mask)))]] = True
            masks[name] = mask.reshape(shapes[name])
    return masks


def search(
    mask: NDArray[np.bool_],
    weights: NDArray[np.floating],
    gradient: NDArray[np.floating],
    share: float,
) -> NDArray[np.bool_]:
    """Prune the smallest weights of a mask, and regrow as many by the largest gradients.

    ceil(share k) of the k weights in the mask go; those just pruned may come back.
    """
    count = math.ceil(share * int(mask.sum()))
    new = mask.ravel().copy()
    sizes = np.where(new, np.abs(weights).ravel(), np.inf)
    new[np.argsort(sizes, kind="stable")[:count]] = False
    slopes = np.where(new, -np.inf, np.abs(gradient).ravel())
    new[np.argsort(-slopes, kind="stable")[:count]] = True
    return new.reshape(mask.shape)
