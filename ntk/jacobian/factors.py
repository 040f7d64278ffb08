"""Jacobians of layers in factors: what went into the layer, and the gradients that come back.

A layer that is linear in its weight, ``z_s = W a_s`` at each position s of an example, has

    d f_c / d W = sum over s of g_cs a_s^T,        d f_c / d b = sum over s of g_cs,

with inputs a (S, d_in) and gradients g (C, S, d_out) of the outputs f by z. Positions are those of
a sequence (one of a plain linear layer), or the places of a convolution's output, a_s being the
patch it reads; of a transposed convolution the places of its input, g_s being the patch it writes;
an embedding's a_s is a one-hot token.

The gram matrix contracts *features first*, where few positions are left to pair,

    <J_i, J_j> = sum over s, t of (a_is . a_jt + 1) sum over c of g_ics . g_jct

in S^2 (d_in + C d_out) operations a pair, or *positions first*, making parts of the weight's
gradient on the way, in C d_in d_out. Each block takes the cheaper (cf. Novak et al., *Fast
Finite Width Neural Tangent Kernel*, ICML 2022, sections 3.2 and 3.4).
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import grad

from .blocks import AT_WORK, LayerBlock, squared_row_norms, tile_size, tiles, total, workspace

AT_ONCE = 2**21  # numbers of patches that are worth cutting at a time on a CPU
ONE_THREAD = (
    2**15 - 1
)  # numbers that torch works on in one thread: it takes longer to share out few


@dataclass(frozen=True, eq=False)
class FactoredBlock(LayerBlock):
    """Jacobian of a layer's weight, and of its bias if it has one, in factors."""

    inputs: Tensor  # of the layer, n rows
    gradients: Tensor  # g of each output f_c with respect to the layer's outputs: (n, C, S, d_out)
    fields = ("inputs", "gradients")

    @property
    def path(self) -> str:  # noqa: D102
        first = "features" if self._features_first else "positions"
        return f"{self.kind}, {self.positions} position{'s'[: self.positions > 1]}, {first} first"

    @property
    def positions(self) -> int:
        """Number of positions S."""
        return int(self.gradients.shape[2])

    @property
    def groups(self) -> int:
        """Groups of channels that do not see each other; 1 except for convolutions."""
        return 1

    @property
    def width_in(self) -> int:
        """Numbers d_in that one output channel reads at a position."""
        return int(self.inputs.shape[-1])

    @property
    def dense_size(self) -> int:  # noqa: D102
        _, outputs, _, width = self.gradients.shape
        return int(outputs * width * (self.width_in + (self.bias is not None)))

    @property
    def _match_cost(self) -> int:
        return self.groups * self.width_in

    @property
    def _features_first(self) -> bool:
        _, outputs, positions, width = self.gradients.shape
        pairs = positions**2 * (self._match_cost + outputs * width)
        return bool(pairs <= outputs * width * self.width_in)

    def patches(self) -> Tensor:
        """Return the inputs a by group and position, shape (n, groups, S, d_in)."""
        return self.inputs.unsqueeze(1)

    def patches_by_number(self) -> Tensor:
        """Return the inputs a by group and number read, then by position: (n, groups * d_in, S)."""
        return self.patches().transpose(2, 3).flatten(1, 2)

    def shape_weights(self, weights: Tensor) -> Tensor:
        """View (..., d_out, d_in) as (..., *shape of the weight)."""
        return weights

    def flat(self, weight: Tensor) -> Tensor:
        """View a weight as (d_out, d_in): the inverse of :meth:`shape_weights`."""
        return weight

    def _by_group(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.patches().unbind(1), self.gradients.chunk(self.groups, 3), strict=True)

    def _chunks(self, numbers: int, room: int | None = None) -> Iterator[slice]:
        """Slices of rows for which `numbers` an example stay within `room`, or the workspace."""
        size = max(1, (room or self._room) // max(1, numbers))
        for start in range(0, len(self.gradients), size):
            yield slice(start, start + size)

    @property
    def _room(self) -> int:
        return workspace(self.gradients.device) // self.gradients.element_size()

    def _at_a_time(self, on_cpu: int) -> int:
        return on_cpu if self.gradients.device.type == "cpu" else self._room

    @property
    def _patch_size(self) -> int:
        """Numbers per example of patches and of the layer's outputs."""
        return int(self.positions * (self.groups * self.width_in + self.gradients.shape[3]))

    def add_gram(self, kernel: Tensor, other: Self) -> None:  # noqa: D102
        if self._features_first:
            self._add_gram_by_features(kernel, other)
            return
        same, n = other is self, max(kernel.shape)
        theirs = itertools.repeat(None) if same else other._dense_parts(n)
        for part, other_part in zip(self._dense_parts(n), theirs, strict=False):
            right = part if other_part is None else other_part
            for rows, cols in tiles(*kernel.shape, symmetric=same):
                kernel[rows, cols].addmm_(part[rows], right[cols].T)

    def _add_gram_by_features(self, kernel: Tensor, other: Self) -> None:
        size = max(1, math.isqrt(self._room // 4) // self.positions)
        size = min(size, tile_size(kernel.device))
        for rows, cols in tiles(*kernel.shape, symmetric=other is self, size=size):
            mine, others = self.rows(rows), other.rows(cols)
            for inner, signals in mine._pairs(others):
                if self.positions == 1:
                    kernel[rows, cols].addcmul_(inner, signals)
                else:
                    products = inner.mul_(signals)
                    shape = (len(mine.gradients), self.positions, -1, self.positions)
                    kernel[rows, cols].add_(products.view(shape).sum((1, 3)))

    def _pairs(self, other: Self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (a . a' + 1) and sum over c of (g . g'), both (n S, m S), of each group."""
        for (a, g), (a2, g2) in zip(self._by_group(), other._by_group(), strict=True):
            inner = a.flatten(0, 1) @ a2.flatten(0, 1).T
            if self.bias is not None:
                inner.add_(1.0)
            left, right = (h.transpose(1, 2).flatten(0, 1).flatten(1) for h in (g, g2))
            yield inner, left @ right.T

    def _dense_parts(self, n: int) -> Iterator[Tensor]:
        """Yield the dense Jacobian in parts of its columns, each (n, k), k such that `n` rows fit.

        All rows at a time: each part is made once, however large the kernel.
        """
        _, outputs, _, width = self.gradients.shape
        width //= self.groups
        room = max(1, self._room // (n * self.width_in))
        for group, output in itertools.product(range(self.groups), range(outputs)):
            for start in range(group * width, (group + 1) * width, room):
                channels = slice(start, min(start + room, (group + 1) * width))
                parts = [
                    torch.bmm(
                        self.gradients[rows, output, :, channels].transpose(1, 2),
                        self.rows(rows).patches()[:, group],
                    ).flatten(1)
                    for rows in self._chunks(self._patch_size)
                ]
                yield parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.bias is not None:
            yield self.gradients.sum(2).flatten(1)

    def vjp(self, residual: Tensor) -> dict[str, Tensor]:  # noqa: D102
        weights, biases = [], []
        for rows in self._chunks(self._patch_size):
            part = self.rows(rows)
            weighted = torch.bmm(residual[rows].unsqueeze(1), part.gradients.flatten(2))
            weighted = weighted.view(-1, *part.gradients.shape[2:])
            weights.append(part._pull_back(weighted))
            biases.append(weighted.sum((0, 1)))
        update = {self.weight: self.shape_weights(total(weights))}
        return update if self.bias is None else update | {self.bias: total(biases)}

    def _pull_back(self, weighted: Tensor) -> Tensor:
        """Sum over examples and positions of g a^T, for g of shape (n, S, d_out)."""
        groups = zip(self.patches().unbind(1), weighted.chunk(self.groups, 2), strict=True)
        return torch.cat([g.flatten(0, 1).T @ a.flatten(0, 1) for a, g in groups])

    def jvp(self, update: Mapping[str, Tensor]) -> Tensor:  # noqa: D102
        weight = update[self.weight]
        changes = []
        for rows in self._chunks(self._patch_size):
            part = self.rows(rows)
            moved = part._push_forward(weight)
            if self.bias is not None:
                moved = moved + update[self.bias]
            columns = part.gradients.flatten(2).transpose(1, 2)
            changes.append(torch.bmm(moved.flatten(1).unsqueeze(1), columns).squeeze(1))
        return torch.cat(changes)

    def _push_forward(self, weight: Tensor) -> Tensor:
        """Apply the layer with another weight and no bias: shape (n, S, d_out)."""
        groups = zip(self.patches().unbind(1), self.flat(weight).chunk(self.groups), strict=True)
        return torch.cat([a @ rows.T for a, rows in groups], dim=2)

    def squared_norms(self) -> Tensor:  # noqa: D102
        numbers = self._patch_size + (6 * self.positions**2 if self._features_first else 0)
        return torch.cat([self.rows(rows)._row_norms() for rows in self._chunks(numbers)])

    def _row_norms(self) -> Tensor:
        n = len(self.gradients)
        norms = torch.zeros(n, dtype=torch.float64, device=self.gradients.device)
        if not self._features_first:
            return sum((squared_row_norms(part) for part in self._dense_parts(2 * n)), norms)
        for a, g in self._by_group():
            rows = (a.double(), g.double().transpose(1, 2).flatten(2))
            inner, signals = (torch.bmm(row, row.transpose(1, 2)) for row in rows)
            norms += ((inner + (self.bias is not None)) * signals).sum((1, 2))
        return norms

    def dense(self) -> dict[str, Tensor]:  # noqa: D102
        tensors = {self.weight: self.shape_weights(self._dense_weights())}
        if self.bias is not None:
            tensors[self.bias] = self.gradients.sum(2)
        return tensors

    def _dense_weights(self) -> Tensor:
        n, outputs, _, width = self.gradients.shape
        weights = self.gradients.new_empty(n, outputs, width, self.width_in)
        for rows in self._chunks(self._patch_size, self._at_a_time(AT_ONCE)):
            groups = weights[rows].chunk(self.groups, dim=2)
            for of_group, (a, g) in zip(groups, self.rows(rows)._by_group(), strict=True):
                for output in range(outputs):
                    torch.bmm(g[:, output].transpose(1, 2), a, out=of_group[:, output])
        return weights

    def entries(self, indices: Tensor) -> tuple[Tensor, Tensor] | None:
        """Rows and columns, in (groups * d_out, d_in), of the weight's flattened coordinates.

        None if inputs are no numbers, or a coordinate is not of one input and one output.
        """
        return None

    def write_columns(self, name: str, indices: Tensor, out: Tensor) -> None:  # noqa: D102
        if name == self.bias:
            out.copy_(self.gradients.sum(2)[:, :, indices])
            return
        _, outputs, positions, _ = self.gradients.shape
        entries = self.entries(indices)
        # measured, in ns / 40: these entries, each by itself, and the whole weight's
        single = outputs * len(indices) * (320 + 22 * positions)
        whole = self.dense_size * (80 + positions)
        if entries and 0 < single <= whole and self.gradients.device.type == "cpu":
            for rows in self._chunks(self._patch_size, self._at_a_time(AT_ONCE)):
                self.rows(rows)._write_entries(*entries, out[rows])
            return
        for rows in self._chunks(self._patch_size + self.dense_size):
            part = self.rows(rows)
            if entries is None:
                out[rows] = part.dense()[name].flatten(2)[:, :, indices]
            else:
                places = self.width_in * entries[0] + entries[1]
                out[rows] = part._dense_weights().flatten(2).index_select(2, places)

    def _write_entries(self, row: Tensor, column: Tensor, out: Tensor) -> None:
        n, outputs, positions, width = self.gradients.shape
        column = column + self.width_in * (row // (width // self.groups))
        inputs = self.patches_by_number()
        gradients = self.gradients.transpose(2, 3).flatten(1, 2).contiguous()  # (n, C d_out, S)
        every = row + width * torch.arange(outputs, device=row.device)[:, None]  # (C, k)
        size = max(
            1, (AT_WORK if torch.get_num_threads() == 1 else ONE_THREAD) // (outputs * positions)
        )
        parts = [
            (slice(start, start + size), column[start : start + size], entries.flatten())
            for start, entries in zip(range(0, len(row), size), every.split(size, 1), strict=True)
        ]
        left = inputs.new_empty(size, positions)
        right = inputs.new_empty(size * outputs, positions)
        for i in range(n):  # to take whole rows of a matrix is by far the fastest
            for some, mine, theirs in parts:
                torch.index_select(inputs[i], 0, mine, out=left[: len(mine)])
                torch.index_select(gradients[i], 0, theirs, out=right[: len(theirs)])
                products = right[: len(theirs)].view(outputs, -1, positions)
                out[i, :, some] = products.mul_(left[: len(mine)]).sum(2)


@dataclass(frozen=True, eq=False)
class LinearBlock(FactoredBlock):
    """Jacobian of a linear layer; inputs (n, S, d_in) are at all positions of all its calls."""

    kind = "linear"

    def squares(self) -> dict[str, Tensor]:  # noqa: D102
        if self.positions > 1:
            return super().squares()
        gradients = self.gradients[:, :, 0].square().sum(1)
        totals = {self.weight: gradients.T @ self.inputs[:, 0].square()}
        if self.bias is not None:
            totals[self.bias] = gradients.sum(0)
        return totals

    def entries(self, indices: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        return indices // self.width_in, indices % self.width_in

    def write_columns(self, name: str, indices: Tensor, out: Tensor) -> None:  # noqa: D102
        if name == self.bias or self.positions > 1:
            super().write_columns(name, indices, out)
            return
        n, outputs, _, width = self.gradients.shape
        inputs, gradients = self.inputs.reshape(n, -1), self.gradients.reshape(n * outputs, width)
        size = max(1, self._at_a_time(AT_WORK) // (n * outputs))
        for chosen, part in zip(indices.split(size), out.split(size, 2), strict=True):
            row, column = self.entries(chosen)
            left = inputs.index_select(1, column).unsqueeze(1)
            right = gradients.index_select(1, row)
            torch.mul(left, right.view(n, outputs, -1), out=part)

    def expected_shapes(self, parameters: Mapping[str, Sequence[int]]) -> list[tuple[int, ...]]:  # noqa: D102
        width_out, width_in = parameters[self.weight]
        self.check_bias(width_out, parameters)
        positions = self.positions if self.gradients.ndim == 4 else 0
        return [(positions, width_in), (-1, positions, width_out)]


@dataclass(frozen=True, eq=False)
class ConvBlock(FactoredBlock):
    """Jacobian of a convolution in one, two or three dimensions.

    Inputs (n, *sizes, channels) are padded and have the channels last: a patch is made of whole
    runs of memory. Patches are cut when they are needed.
    """

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    channels_per_group: int
    kind, settings = "conv", ("weight", "bias", "stride", "dilation")

    @property
    def groups(self) -> int:  # noqa: D102
        return int(self.inputs.shape[-1]) // self.channels_per_group

    @property
    def width_in(self) -> int:  # noqa: D102
        return self.channels_per_group * math.prod(self.kernel_size)

    def _windows(self, inputs: Tensor) -> tuple[Tensor, range, range]:
        """View as (n, *places, groups, channels of a group, *kernel size); axes of the sizes."""
        windows, dims = inputs, len(self.kernel_size)
        for d, (size, stride, dilation) in enumerate(
            zip(self.kernel_size, self.stride, self.dilation, strict=True)
        ):
            windows = windows.unfold(1 + d, (size - 1) * dilation + 1, stride)[..., ::dilation]
        grouped = windows.unflatten(1 + dims, (self.groups, self.channels_per_group))
        return grouped, range(1, 1 + dims), range(3 + dims, 3 + 2 * dims)

    def patches(self) -> Tensor:  # noqa: D102
        windows, places, offsets = self._windows(self.inputs.contiguous())
        dims = len(places)
        moved: Tensor = windows.permute(0, 1 + dims, *places, *offsets, 2 + dims)
        return moved.flatten(2 + dims).flatten(2, 1 + dims)

    def patches_by_number(self) -> Tensor:  # noqa: D102
        images = self.inputs.movedim(-1, 1).contiguous()  # whose rows are copied as a whole
        windows, places, offsets = self._windows(images.movedim(1, -1))
        dims = len(places)
        moved: Tensor = windows.permute(0, 1 + dims, *offsets, 2 + dims, *places)
        return moved.reshape(len(images), self.groups * self.width_in, self.positions)

    def shape_weights(self, weights: Tensor) -> Tensor:  # noqa: D102
        apart: Tensor = weights.unflatten(-1, (*self.kernel_size, self.channels_per_group))
        return apart.movedim(-1, -1 - len(self.kernel_size))

    def flat(self, weight: Tensor) -> Tensor:  # noqa: D102
        return weight.movedim(1, -1).flatten(1)

    def _pull_back(self, weighted: Tensor) -> Tensor:
        dims, inputs = len(self.kernel_size), self.inputs.movedim(-1, 1)
        differentiate = getattr(grad, f"conv{dims}d_weight")
        shape = (weighted.shape[2], self.channels_per_group, *self.kernel_size)
        by_place = weighted.unflatten(1, self._places(self.inputs.shape[1:-1])).movedim(-1, 1)
        steps = {"stride": self.stride, "dilation": self.dilation, "groups": self.groups}
        return self.flat(differentiate(inputs, shape, by_place, **steps))

    def _push_forward(self, weight: Tensor) -> Tensor:
        dims, inputs = len(self.kernel_size), self.inputs.movedim(-1, 1)
        convolve = getattr(nn.functional, f"conv{dims}d")
        steps = {"stride": self.stride, "dilation": self.dilation, "groups": self.groups}
        moved: Tensor = convolve(inputs, weight, **steps)
        return moved.flatten(2).transpose(1, 2)

    def _places(self, sizes: Sequence[int]) -> list[int]:
        axes = zip(sizes, self.kernel_size, self.stride, self.dilation, strict=True)
        return [max(0, (size - (k - 1) * d - 1) // s + 1) for size, k, s, d in axes]

    def entries(self, indices: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        places = math.prod(self.kernel_size)  # channels are the last of d_in, here and not there
        row, rest = indices // self.width_in, indices % self.width_in
        return row, rest // places + self.channels_per_group * (rest % places)

    def expected_shapes(self, parameters: Mapping[str, Sequence[int]]) -> list[tuple[int, ...]]:  # noqa: D102
        width_out, per_group, *kernel_size = parameters[self.weight]
        self.check_bias(width_out, parameters)
        dims = len(kernel_size)
        if dims not in (1, 2, 3) or not dims == len(self.stride) == len(self.dilation):
            raise ValueError(f"expected a stride and a dilation for each of {dims} dimensions")
        if self.inputs.ndim != dims + 2:
            return [(0,) * (dims + 1), (-1, 0, width_out)]
        *sizes, channels = self.inputs.shape[1:]
        if channels % per_group or width_out % max(1, channels // per_group):
            raise ValueError(f"{channels} channels in groups of {per_group}, {width_out} outputs")
        return [(*sizes, channels), (-1, math.prod(self._places(sizes)), width_out)]


@dataclass(frozen=True, eq=False)
class TransposedConvBlock(FactoredBlock):
    """Jacobian of a transposed convolution's weight; inputs (n, S, channels) by input place.

    Gradients (n, C, S, groups * d) are patches: d = channels of a group * places of the kernel.
    """

    weight_shape: tuple[int, ...]  # (channels, channels of an output group, *kernel size)
    kind = "transposed-conv"

    @property
    def _patch(self) -> int:
        return math.prod(self.weight_shape[1:])

    @property
    def groups(self) -> int:  # noqa: D102
        return int(self.gradients.shape[3]) // self._patch

    @property
    def width_in(self) -> int:  # noqa: D102
        return self.weight_shape[0] // self.groups

    def patches(self) -> Tensor:  # noqa: D102
        apart: Tensor = self.inputs.unflatten(2, (self.groups, self.width_in))
        return apart.transpose(1, 2)

    def shape_weights(self, weights: Tensor) -> Tensor:  # noqa: D102
        apart: Tensor = weights.unflatten(-2, (self.groups, self._patch)).transpose(-1, -2)
        shaped: Tensor = apart.flatten(-3, -2).unflatten(-1, self.weight_shape[1:])
        return shaped

    def flat(self, weight: Tensor) -> Tensor:  # noqa: D102
        apart: Tensor = weight.flatten(1).unflatten(0, (self.groups, self.width_in))
        return apart.transpose(1, 2).flatten(0, 1)

    def expected_shapes(self, parameters: Mapping[str, Sequence[int]]) -> list[tuple[int, ...]]:  # noqa: D102
        channels = parameters[self.weight][0]
        if self.gradients.ndim != 4 or not (width := self.gradients.shape[3]):
            return [(0, channels), (-1, 0, self._patch)]
        if width % self._patch or channels % self.groups:
            raise ValueError(f"{channels} channels, and patches of {width} for {self._patch}")
        return [(self.positions, channels), (-1, self.positions, width)]


@dataclass(frozen=True, eq=False)
class EmbeddingBlock(FactoredBlock):
    """Jacobian of an embedding, of weight (tokens, d_out); inputs (n, S) are tokens in int64."""

    num_tokens: int
    kind = "embedding"
    integers = 1

    @property
    def width_in(self) -> int:  # noqa: D102
        return self.num_tokens

    @property
    def _match_cost(self) -> int:
        return 1

    def shape_weights(self, weights: Tensor) -> Tensor:  # noqa: D102
        return weights.transpose(-1, -2)

    @property
    def _patch_size(self) -> int:
        return 2 * int(self.positions * self.gradients.shape[3])

    def _tables(self, gradients: Tensor) -> Tensor:
        """Sum gradients (n, S, ...) by token, for each example: shape (n, tokens, ...)."""
        n = len(gradients)
        rows = self.inputs + self.num_tokens * torch.arange(n, device=gradients.device)[:, None]
        tables = gradients.new_zeros(n * self.num_tokens, *gradients.shape[2:])
        tables.index_add_(0, rows.flatten(), gradients.flatten(0, 1))
        apart: Tensor = tables.unflatten(0, (n, self.num_tokens))
        return apart

    def _dense_parts(self, n: int) -> Iterator[Tensor]:
        room = max(1, self._room // (n * self.num_tokens))
        for output in range(self.gradients.shape[1]):
            for channels in self.gradients[:, output].split(room, dim=2):
                yield self._tables(channels).flatten(1)

    def _row_norms(self) -> Tensor:
        if not self._features_first:
            return super()._row_norms()
        same = self.inputs[:, :, None] == self.inputs[:, None, :]
        gradients = self.gradients.double().transpose(1, 2).flatten(2)
        norms: Tensor = (same * torch.bmm(gradients, gradients.transpose(1, 2))).sum((1, 2))
        return norms

    def dense(self) -> dict[str, Tensor]:  # noqa: D102
        tables = self._tables(self.gradients.transpose(1, 2))  # (n, tokens, C, d_out)
        return {self.weight: tables.transpose(1, 2)}

    def _pairs(self, other: Self) -> Iterator[tuple[Tensor, Tensor]]:
        same = self.inputs.flatten()[:, None] == other.inputs.flatten()
        left, right = (b.gradients.transpose(1, 2).flatten(0, 1).flatten(1) for b in (self, other))
        yield same.to(left.dtype), left @ right.T

    def _pull_back(self, weighted: Tensor) -> Tensor:
        table = weighted.new_zeros(self.num_tokens, weighted.shape[2])
        return table.index_add_(0, self.inputs.flatten(), weighted.flatten(0, 1)).T

    def _push_forward(self, weight: Tensor) -> Tensor:
        return weight[self.inputs]

    def expected_shapes(self, parameters: Mapping[str, Sequence[int]]) -> list[tuple[int, ...]]:  # noqa: D102
        _, width_out = parameters[self.weight]
        positions = self.positions if self.gradients.ndim == 4 else 0
        if self.inputs.numel() and not (
            0 <= int(self.inputs.min()) <= int(self.inputs.max()) < self.num_tokens
        ):
            raise ValueError(f"expected tokens of 0 ... {self.num_tokens - 1}")
        return [(positions,), (-1, positions, width_out)]
