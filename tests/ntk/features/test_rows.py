"""Products of features that are read some rows at a time, against torch on the whole matrix."""

import numpy as np
import pytest
import torch

from fedntk.ntk import NotEnoughMemory
from fedntk.ntk.features import rows as module
from fedntk.ntk.features.rows import FeatureRows
from fedntk.ntk.support import memory as ntk_memory

from ...conftest import refused
from ..arithmetic import normal

N, P = 23, 7
DTYPES = [np.float16, np.float32, np.float64]
# bytes of a chunk: all rows, three rows (of 7 or 8 numbers), one, and less than one
SIZES = [2**20, 3 * 4 * 8, 4 * 8, 1]


def array(dtype=np.float32):
    return normal(N, P, seed=0).numpy().astype(dtype)


class File(np.ndarray):
    """An array that records which rows are read."""

    def __getitem__(self, rows):
        self.asked.append((rows.start, rows.stop))
        return np.asarray(self)[rows]


def recorded(z, bias=False):
    file = z.view(File)
    file.asked = []
    return FeatureRows(file, bias=bias), file.asked


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_the_whole_matrix(dtype, bias, monkeypatch):
    """Whatever the chunks. Z as stored is exact; float32 sums of 23 products: 1e-5."""
    z = array(dtype)
    dense = torch.from_numpy(np.pad(z, ((0, 0), (0, int(bias))), constant_values=1)).double()
    rows = FeatureRows(z, bias=bias)
    assert rows.shape == tuple(dense.shape)
    w, a = normal(dense.shape[1], 3, seed=1).float(), normal(N, 4, seed=2).float()
    for size in SIZES:
        for chunk in ("CHUNK_BYTES", "CACHED_BYTES"):
            monkeypatch.setattr(module, chunk, size)
        monkeypatch.setattr(module, "BLOCK_BYTES", 2 * size)
        results = [rows @ w, rows.transposed_matmul(a), rows.gram()]
        expected = [dense @ w.double(), dense.T @ a.double(), dense @ dense.T]
        for product, exact in zip(results, expected, strict=True):
            torch.testing.assert_close(product, exact.float(), rtol=1e-5, atol=1e-5)
        assert torch.equal(results[2].tril(-1), results[2].triu(1).T)
        # float64 coefficients: 1e-13 from float64, although rows are chunks of float16
        w64, a64 = w.double(), a.double()
        torch.testing.assert_close(rows @ w64, dense @ w64, rtol=0, atol=1e-13)
        torch.testing.assert_close(rows.transposed_matmul(a64), dense.T @ a64, rtol=0, atol=1e-13)
    assert z.tobytes() == array(dtype).tobytes()  # what is stored stays


@pytest.mark.parametrize("size", [1, 2, 5, 23, 1000])
def test_rows_are_read_in_order_each_once_and_no_more_at_a_time_than_allowed(size, monkeypatch):
    """With the bias a row has 8 numbers, 32 bytes. Products need no copy with the bias."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 32 * size + 31)
    for use in (
        lambda r: r @ torch.zeros(8, 2),
        lambda r: r.transposed_matmul(torch.zeros(N, 2)),
        lambda r: list(r.chunks()),
    ):
        rows, asked = recorded(array(), bias=True)
        use(rows)
        assert max(stop - start for start, stop in asked) == min(size, N)
        assert [i for start, stop in asked for i in range(start, stop)] == list(range(N))
    chunks = [(place, part.clone()) for place, part in rows.chunks()]
    assert [(r.start, r.stop) for r, _ in chunks] == asked[-len(chunks) :]
    assert torch.equal(torch.cat([chunk for _, chunk in chunks]), torch.from_numpy(array()))


@pytest.mark.parametrize(
    ("width", "block_bytes", "size"),
    [(50, 2 * 4 * 50, 1), (50, 2 * 4 * 50 * 5, 5), (50, 2**30, 23), (1, 256, 8)],
)
def test_gram_reads_each_pair_of_blocks_once(width, block_bytes, size, monkeypatch):
    """b blocks take b (b + 1) / 2 reads. With p = 1, 256 bytes hold products of only 8 rows."""
    monkeypatch.setattr(module, "BLOCK_BYTES", block_bytes)
    rows, asked = recorded(normal(N, width, seed=0).float().numpy())
    rows.gram()
    blocks = -(-N // size)
    assert len(asked) == blocks * (blocks + 1) // 2
    assert max(stop - start for start, stop in asked) == size


def test_a_kernel_that_does_not_fit_is_refused_before_anything_is_read(monkeypatch):
    """The kernel of 23 examples, a block's products and two blocks of rows, no more."""
    needed = 4 * (23**2 + 23 * 37)
    monkeypatch.setattr(ntk_memory, "available_memory", lambda device: needed - 1)
    rows, asked = recorded(array())
    refused(r"the kernel of 23 examples needs .*fewer examples", rows.gram, error=NotEnoughMemory)
    assert not asked
    monkeypatch.setattr(ntk_memory, "available_memory", lambda device: needed)
    assert rows.gram().shape == (23, 23)


def test_no_examples_are_no_rows():
    rows = FeatureRows(np.zeros((0, P), np.float32))
    assert (rows @ torch.ones(P, 3)).shape == (0, 3)
    assert torch.equal(rows.transposed_matmul(torch.ones(0, 3)), torch.zeros(P, 3))
    assert rows.gram().shape == (0, 0)
