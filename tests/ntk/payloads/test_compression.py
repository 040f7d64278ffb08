"""Compression against its definition, and payloads that are not what they say."""

import contextlib
import math
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedntk.ntk import BadReply, compress
from fedntk.ntk.payloads.compression import Encoded, _pack, _unpack, num_kept, top_k

from ...conftest import refused

SHAPES = [(), (1,), (7,), (3, 5), (4, 3, 33), (0, 3), (64,)]
HEAD = "<BBBBQQ"


def tensor(shape, dtype=np.float32, seed=0):
    values = np.random.default_rng(seed).standard_normal(shape)
    return np.asarray(values, dtype=dtype)


def largest(values, sparsity):
    return top_k(values.reshape(1, -1), sparsity).reshape(values.shape)


def sent(values, **options):
    return Encoded.parse(compress(values, **options)).decode()


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_largest_stay_and_of_equal_ones_the_first(shape, sparsity):
    values = tensor(shape)
    for numbers in (values, values.round()):
        order = np.argsort(-np.abs(numbers), axis=None, kind="stable")
        expected = np.zeros(numbers.size, bool)
        expected[order[: num_kept(numbers.size, sparsity)]] = True
        assert np.array_equal(largest(numbers, sparsity).ravel(), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("sparsity", [0.0, 0.4, 0.97])
@pytest.mark.parametrize("shape", SHAPES)
def test_unquantised_numbers_come_back_bit_by_bit(shape, sparsity, dtype):
    values = tensor(shape, dtype)
    decoded = sent(values, sparsity=sparsity)
    expected = np.where(largest(values, sparsity), values, 0).astype(dtype)
    assert (decoded.dtype, decoded.shape) == (dtype, shape)
    assert decoded.tobytes() == expected.tobytes()


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8, 11, 16])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.95])
def test_error_of_a_quantised_number_is_at_most_half_a_space(bits, sparsity):
    """2^(b-1) magnitudes over the range that stayed; 1e-6 of the largest for float32."""
    values = tensor((40, 50))
    mask, decoded = largest(values, sparsity), sent(values, sparsity=sparsity, bits=bits)
    magnitudes = np.abs(values[mask])
    space = (magnitudes.max() - magnitudes.min()) / (2 ** (bits - 1) - 1)
    assert np.abs(decoded - values)[mask].max() <= space / 2 + 1e-6 * magnitudes.max()
    assert (decoded[~mask] == 0).all()
    assert (np.sign(decoded[mask]) == np.sign(values[mask])).all()
    assert len(np.unique(np.abs(decoded[mask]))) <= 2 ** (bits - 1)


def test_one_bit_is_the_sign_with_the_mean_magnitude_and_equal_ones_are_exact():
    """The mean of 100 float32, whatever adds them up, is right to 100 roundings of 6e-8."""
    equal = np.array([3, -3, 3, 0, 0, 0], np.float32)
    for bits in (1, 2, 9):
        assert sent(equal, sparsity=0.5, bits=bits).tolist() == equal.tolist()
    values = tensor((100,))
    expected = np.sign(values) * np.abs(values).mean(dtype=np.float64)
    np.testing.assert_allclose(sent(values, bits=1), expected, rtol=100 * 2**-24)


@pytest.mark.parametrize("bits", [1, 4, 32])
@pytest.mark.parametrize("sparsity", [0.0, 0.4, 0.9])
def test_by_row_each_row_is_compressed_as_if_it_were_alone(sparsity, bits):
    values = tensor((7, 3, 11)) * np.arange(1, 8, dtype=np.float32)[:, None, None]
    code = compress(values, sparsity=sparsity, bits=bits, by_row=True)
    for row, alone in zip(Encoded.parse(code).decode(), values, strict=True):
        assert row.tobytes() == sent(alone, sparsity=sparsity, bits=bits).tobytes()
    extra = 6 * 8 if bits < 32 else 0
    whole = compress(values, sparsity=sparsity, bits=bits).size
    assert abs(code.size - whole - extra) <= 7 * math.ceil(bits / 8) * 2


@given(st.integers(1, 56), st.data())
@settings(max_examples=60, deadline=None)
def test_packing_is_the_concatenation_of_the_bits(width, data):
    numbers = data.draw(st.lists(st.integers(0, 2**width - 1), max_size=40))
    array = np.array(numbers, np.uint64)
    packed = _pack(array, width)
    whole = sum(number << (width * i) for i, number in enumerate(numbers))
    assert packed == whole.to_bytes(math.ceil(len(numbers) * width / 8), "little")
    unpacked = _unpack(np.frombuffer(packed, np.uint8), len(numbers), width)
    assert unpacked.tolist() == numbers


ONE = np.ones(4, np.float32)
CODE = compress(tensor((10, 10)), sparsity=0.5, bits=6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 1.0}, "sparsity: expected 0 <= sparsity < 1, got 1.0"),
        ({"sparsity": -0.1}, "sparsity: expected"),
        ({"bits": 0}, r"bits: expected 1 ... 16, or 32 .*, got 0"),
        ({"bits": 17}, "bits: expected"),
        ({"values": ONE * math.nan, "sparsity": 0.5}, "expected finite numbers"),
    ],
)
def test_what_cannot_be_compressed_is_refused_not_dropped(options, message):
    refused(message, compress, **{"values": ONE} | options)


def head(code=CODE, **changes):
    """Return the code with fields of its head changed."""
    names = ("form", "bits", "double", "axes", "groups", "count")
    fields = dict(zip(names, struct.unpack_from(HEAD, code.tobytes()), strict=True))
    changed = struct.pack(HEAD, *(fields | changes).values())
    return np.frombuffer(changed + code.tobytes()[len(changed) :], np.uint8)


def scales(low, high):
    """Return CODE with another range of magnitudes."""
    changed = bytearray(CODE)
    struct.pack_into("<ff", changed, struct.calcsize(HEAD) + 16, low, high)
    return np.frombuffer(changed, np.uint8)


def zeros(form, shape, count, *positions):
    """Write a code by hand: so many zeros at these positions of a tensor of a shape."""
    start = struct.pack(HEAD, form, 32, 0, len(shape), 1, count)
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return np.frombuffer(start + sizes + bytes(positions) + bytes(4 * count), np.uint8)


HEADS = [
    {"form": 3}, {"form": 0}, {"bits": 7}, {"bits": 0}, {"double": 2}, {"axes": 255},
    {"count": 51}, {"count": 2**63}, {"groups": 2}, {"groups": 2**63},
]  # fmt: skip
RANGES = [(-1.0, 1.0), (math.nan, 1.0), (0.0, math.inf), (2.0, 1.0)]


@pytest.mark.parametrize(
    "code",
    [CODE[:-1], np.append(CODE, CODE[:1]), CODE[:5], CODE.astype(np.int16), CODE[None]]
    + [head(**change) for change in HEADS]
    + [scales(*ends) for ends in RANGES]
    + [head(compress(tensor((0, 3))), groups=0), zeros(2, (2**63, 0), 0)],
)
def test_a_head_that_does_not_fit_its_bytes_is_refused(code):
    refused(r"^compression: ", Encoded.parse, code, error=BadReply)


def test_a_small_payload_that_declares_much_allocates_nothing():
    """A tensor of 2^47 numbers, none of which stayed: 36 bytes are read, no more is made."""
    tracemalloc.start()
    encoded = Encoded.parse(zeros(2, (2**20, 2**27), 0))
    meta = encoded.meta_tensor()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tuple(meta.shape) == encoded.shape == (2**20, 2**27)
    assert peak < 100_000


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (zeros(1, (10,), 1, 0b11000000, 0), "2 positions for 1"),
        (zeros(1, (10,), 1, 0, 0b00000001), "1 positions for 1"),  # beyond the 10th
        (zeros(2, (10,), 2, 0x55), "rising indices"),
        (zeros(2, (10,), 2, 0xF1), "rising indices"),
    ],
)
def test_positions_that_do_not_fit_are_refused(code, message):
    refused(message, Encoded.parse(code).decode, error=BadReply)


@given(st.binary(max_size=80))
@settings(max_examples=200, deadline=None)
def test_no_bytes_raise_anything_else(data):
    with contextlib.suppress(BadReply):
        encoded = Encoded.parse(np.frombuffer(data, np.uint8))
        if encoded.size < 10_000:
            assert encoded.decode().shape == encoded.shape
