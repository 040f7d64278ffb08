"""Parcels open for their receivers, as what they were sent as, and for nobody else."""

import numpy as np
import pytest

from fedntk.trust import ParcelKeys, new_key, open_parcel, public_bytes, seal_parcel

from .uploads import refused

ARRAYS = {
    "weight": np.arange(12, dtype=np.float32).reshape(3, 4).T,
    "num-examples": np.array(7, np.int64),
    "none": np.zeros((0, 3), np.float16),
    "mask": np.array([True, False]),
}
INFO = b"run 1, round 2"
KEYS = [new_key() for _ in range(3)]


def test_every_receiver_opens_it_to_the_same_bits_for_80_bytes_each():
    """A sealed key of 32 bytes is 48 longer; the content is there once."""
    sealed = seal_parcel(ARRAYS, map(public_bytes, KEYS), INFO)
    for key in KEYS:
        opened = open_parcel(sealed, key, INFO)
        assert list(opened) == list(ARRAYS)
        for name, array in ARRAYS.items():
            assert (opened[name].dtype, opened[name].shape) == (array.dtype, array.shape)
            assert opened[name].tobytes() == array.tobytes()
            assert opened[name].flags.writeable
    assert [sealed[name].nbytes for name in sealed if name.startswith("key-")] == [80] * 3


def test_nobody_else_opens_it_and_no_bytes_of_it_are_in_clear():
    sealed, again = (seal_parcel(ARRAYS, [public_bytes(KEYS[0])], INFO) for _ in range(2))
    refused("expected a parcel sealed for this client", open_parcel, sealed, KEYS[1], INFO)
    mislabelled = {**sealed, "key-" + public_bytes(KEYS[1]).hex(): list(sealed.values())[1]}
    refused("do not open", open_parcel, mislabelled, KEYS[1], INFO)
    data = b"".join(array.tobytes() for array in sealed.values())
    assert ARRAYS["weight"].tobytes()[:16] not in data
    assert b"weight" not in data
    assert not [name for name in sealed if sealed[name].tobytes() == again[name].tobytes()]


@pytest.mark.parametrize("part", [0, 1])
def test_a_changed_bit_and_another_purpose_are_refused(part):
    sealed = seal_parcel(ARRAYS, [public_bytes(KEYS[0])], INFO)
    refused("open", open_parcel, sealed, KEYS[0], b"run 1, round 3")
    name = list(sealed)[part]
    sealed[name] = sealed[name].copy()
    sealed[name][-1] ^= 1
    refused("open", open_parcel, sealed, KEYS[0], INFO)


def test_what_is_sealed_but_holds_no_arrays_is_refused(monkeypatch):
    """Anybody may seal anything for a client."""
    monkeypatch.setattr("fedntk.trust.wire.to_npy", lambda _: b"no array")
    sealed = seal_parcel(ARRAYS, [public_bytes(KEYS[0])], INFO)
    refused("damaged, or no arrays", open_parcel, sealed, KEYS[0], INFO)


def test_without_a_verify_key_any_key_is_taken():
    ParcelKeys(KEYS[0]).require_vouched(public_bytes(KEYS[1]), b"")
    strict = ParcelKeys(KEYS[0], run="a", verify_key=bytes(32))
    refused("does not vouch", strict.require_vouched, public_bytes(KEYS[1]), b"")
