"""Prototypes and the weights of clients by them: definitions, limits and hostile arrays."""

import numpy as np
import pytest
import torch

from fedntk.ntk import BadReply
from fedntk.ntk.payloads.prototypes import Prototypes
from fedntk.ntk.similarity import cosine_similarities, similarity_weights

from ..conftest import refused

C, P = 4, 5


def client(seed: int, classes: tuple[int, ...]) -> Prototypes:
    rng = np.random.default_rng(seed)
    means, counts = np.zeros((C, P), np.float32), np.zeros(C, np.int64)
    means[list(classes)] = rng.normal(size=(len(classes), P))
    counts[list(classes)] = rng.integers(1, 9, len(classes))
    return Prototypes(means, counts)


CLIENTS = [client(0, (0, 1)), client(1, (1, 2)), client(2, (3,)), client(3, (0, 1, 2, 3))]


def test_means_are_of_each_class_whatever_the_chunks():
    """Over one chunk of examples, in float64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, P, generator=generator)
    y = torch.randint(0, 3, (600,), generator=generator)
    actual = Prototypes.of(lambda z: 2 * z, x, y, C)
    for label in range(3):
        expected = 2 * x[y == label].double().mean(0)
        np.testing.assert_allclose(actual.means[label], expected, rtol=1e-6, atol=1e-7)
    assert actual.counts.tolist() == [*np.bincount(y, minlength=3), 0]
    assert not actual.means[3].any()


@pytest.mark.parametrize("absent", ["zero", "common"])
def test_similarities_are_cosines_of_the_concatenations(absent):
    """Against loops: with "common" over the classes that both clients have."""
    actual = cosine_similarities(CLIENTS, absent=absent)
    for k, prototypes in enumerate(CLIENTS):
        for other, their in enumerate(CLIENTS):
            both = prototypes.present & their.present if absent == "common" else np.ones(C, bool)
            a, b = (p.means[both].astype(float).ravel() for p in (prototypes, their))
            norms = np.linalg.norm(a) * np.linalg.norm(b)
            expected = a @ b / norms if norms else 0  # without a class in common
            assert actual[k, other] == pytest.approx(expected, abs=1e-12)
    assert (np.diag(actual) == 1).all()
    parts = cosine_similarities(CLIENTS[:2], CLIENTS[2:], absent=absent)
    assert parts == pytest.approx(actual[:2, 2:], abs=1e-12)


def test_a_network_whose_features_are_all_zero_is_like_itself_alone():
    dead = Prototypes(np.zeros((C, P), np.float32), np.array([3, 0, 0, 0]))
    np.testing.assert_array_equal(
        cosine_similarities([dead, CLIENTS[0], dead]), [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    )


def test_equal_prototypes_have_equal_weights_to_the_bit():
    """Sums over 10 x 84 numbers differ in their last bits by their order, which plays no part."""
    rng = np.random.default_rng(0)
    prototypes = Prototypes(rng.normal(size=(10, 84)).astype(np.float32), np.arange(1, 11))
    similarities = cosine_similarities([prototypes] * 7)
    np.testing.assert_array_equal(similarities, np.ones((7, 7)))
    assert len(np.unique(similarity_weights(similarities))) == 1


def test_weights_are_a_softmax_with_its_limits():
    similarities = cosine_similarities(CLIENTS)
    actual = similarity_weights(similarities, temperature=0.3)
    expected = torch.softmax(torch.from_numpy(similarities) / 0.3, 1).numpy()
    np.testing.assert_allclose(actual, expected, rtol=1e-14)
    equal = similarity_weights(similarities, temperature=np.inf)
    np.testing.assert_array_equal(equal, np.full((4, 4), 0.25))
    np.testing.assert_array_equal(similarity_weights(similarities, temperature=1e-320), np.eye(4))
    weighted = similarity_weights(similarities, temperature=np.inf, examples=[1, 2, 3, 4])
    np.testing.assert_allclose(weighted, [[0.1, 0.2, 0.3, 0.4]] * 4, rtol=1e-15)
    refused("temperature: expected more than 0", similarity_weights, similarities, temperature=0)
    refused("absent: expected 'zero' or 'common'", cosine_similarities, CLIENTS, absent="none")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"means": None}, "arrays"),
        ({"more": np.zeros(3, np.float32)}, "arrays"),
        ({"counts": np.array([1, 1, 1, 0], np.int64)}, "shape"),  # three classes, two means
        ({"counts": np.array([-1, 1, 1, 0], np.int64)}, "range"),
        ({"counts": np.array([99, 1, 0, 0], np.int64)}, "range"),
        ({"counts": np.zeros(4, np.int64)}, "range"),
        ({"counts": np.ones(4)}, "dtype"),
        ({"means": np.full((2, P), np.nan, np.float32)}, "non-finite"),
        ({"means": np.full((2, P), 1e20, np.float32)}, "scale"),
        ({"means": np.zeros((2, P + 1), np.float32)}, "shape"),
    ],
)
def test_prototypes_come_back_as_they_were_sent_and_hostile_ones_are_refused(change, reason):
    sent, options = CLIENTS[1].to_arrays(), {"num_classes": C, "width": P, "max_examples": 10}
    assert sent["means"].shape == (2, P)  # only of the classes that are there
    actual = Prototypes.from_arrays(sent, **options)
    np.testing.assert_array_equal(actual.means, CLIENTS[1].means)
    np.testing.assert_array_equal(actual.counts, CLIENTS[1].counts)
    arrays = {name: array for name, array in {**sent, **change}.items() if array is not None}
    refused(f"^{reason}: ", Prototypes.from_arrays, arrays, **options, error=BadReply)
