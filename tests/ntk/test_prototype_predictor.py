"""The nearest prototype: scores, what has none, files."""

import numpy as np
import pytest
import torch
from torch import nn

from fedntk.ntk import PrototypePredictor
from fedntk.ntk.payloads.prototypes import Prototypes

from ..strategies.federation import network


def test_a_class_without_a_prototype_is_never_predicted_and_its_loss_is_finite():
    means = np.array([[9.0, 9.0], [0.0, 0.0], [1.0, 1.0]], np.float32)
    predictor = PrototypePredictor(nn.Linear(2, 3), Prototypes(means, np.array([0, 3, 4])))
    x = torch.tensor([[9.0, 9.0], [0.0, 0.0]])
    scores = predictor.predict(x)
    assert scores.argmax(1).tolist() == [2, 1]
    assert scores[0].tolist() == pytest.approx([-163, -162, -128])
    assert np.isfinite(predictor.evaluate(x, torch.tensor([0, 0])).loss)
    assert predictor(x).tolist() == scores.tolist()
    with pytest.raises(ValueError, match="expected one of at least one class, got none"):
        PrototypePredictor(nn.Linear(2, 3), Prototypes.none(3, 2))
    with pytest.raises(ValueError, match="expected 3 classes and 2 features"):
        PrototypePredictor(nn.Linear(2, 3), Prototypes.none(3, 5))


def test_the_predictor_is_read_as_it_was_written(tmp_path):
    x = torch.randn(7, 4)
    prototypes = Prototypes(np.random.default_rng(0).random((3, 8), np.float32), np.ones(3, int))
    predictor = PrototypePredictor(network(3), prototypes, head="3")
    predictor.save(tmp_path)
    again = PrototypePredictor.load(tmp_path, network())
    assert again.predict(x).tolist() == predictor.predict(x).tolist()
    (tmp_path / "prototypes.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="holds no prototypes that can be read"):
        PrototypePredictor.load(tmp_path, network())


def test_more_examples_than_a_forward_pass_takes():
    """1,500 examples: the same scores as one by one, of sums of 8 squares in float32: 1e-5."""
    prototypes = Prototypes(np.random.default_rng(0).random((3, 8), np.float32), np.ones(3, int))
    predictor = PrototypePredictor(network(), prototypes)
    x = torch.randn(1500, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        z = network().eval()[:3](x).double()
    expected = -(z[:, None] - torch.from_numpy(prototypes.means)).square().sum(2)
    np.testing.assert_allclose(predictor.predict(x), expected, rtol=1e-5, atol=1e-5)


def test_pooled_prototypes_are_those_of_all_examples_together():
    """In float64 and rounded to float32: 1e-6. A class that nobody has stays without."""
    rng = np.random.default_rng(0)
    sets = [(rng.random((n, 5), np.float32), rng.integers(0, 3, n)) for n in (4, 9, 1)]

    def of(x: np.ndarray, y: np.ndarray) -> Prototypes:
        return Prototypes.of(lambda z: z, torch.from_numpy(x), torch.from_numpy(y), 4)

    pooled = Prototypes.pooled([of(x, y) for x, y in sets])
    together = of(*(np.concatenate(parts) for parts in zip(*sets, strict=True)))
    assert pooled.counts.tolist() == together.counts.tolist()
    np.testing.assert_allclose(pooled.means, together.means, rtol=1e-6)
    assert pooled.counts[3] == 0
    assert not pooled.means[3].any()
    before = Prototypes(np.full((4, 5), 7, np.float32), np.full(4, 2))
    after = before.update_from(pooled)
    assert after.counts.tolist() == [*pooled.counts[:3], 2]
    assert (after.means[3] == 7).all()
    assert after.means[:3].tobytes() == pooled.means[:3].tobytes()
