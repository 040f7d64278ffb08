"""A pre-trained network of torchvision's, as the page on AFL says, on a few generated images."""

import re
import sys

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision.models import resnet18

from fedntk.simulations import Config, run
from fedntk.simulations.report.results import load_model

from ..conftest import ROOT

CLASSES = 3


def images(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a pattern for each class, and noise a tenth as large: grey, 20 x 20."""
    patterns = np.random.default_rng(0).standard_normal((CLASSES, 1, 20, 20))
    noise = np.random.default_rng([1, seed]).standard_normal((count, 1, 20, 20))
    y = np.arange(count) % CLASSES
    return (patterns[y] + 0.1 * noise).astype(np.float32), y


def test_afl_is_least_squares_on_its_features_by_the_running_statistics(tmp_path, monkeypatch):
    """Against torchvision's own network in evaluation mode, on images that its factory would make.

    The page's function stands beside the file of weights in this very folder. 12 images have 512
    features: the solution of least norm, whose scores of these images are the labels. The last
    layer is float32; an output is a sum of 512 products of it, so 1e-4.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        body = resnet18()
        for module in body.modules():
            if isinstance(module, nn.BatchNorm2d):  # unlike the statistics of any batch
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.5, 2)
    page = (ROOT / "docs" / "methods" / "afl.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(import torch\n.*?)```", page, re.DOTALL)
    (tmp_path / "pretrained.py").write_text(code, encoding="utf-8")
    save_file(body.state_dict(), tmp_path / "resnet18.safetensors")
    (x, y), (x_test, y_test) = images(12, 0), images(CLASSES, 1)
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    config = Config(
        dataset="npz:own.npz", model="pretrained:network", partition="pathological",
        classes_per_client=1, class_assignment="first-deterministic", num_clients=3,
        clients_per_round=3, clients_per_evaluation=0, rounds=1, method="afl",
        out=str(tmp_path / "run"),
    )  # fmt: skip
    result = run(config, progress=False)
    sys.modules.pop("pretrained", None)
    assert result.summary["accuracy"] == 1.0
    learned = {name: torch.from_numpy(array) for name, array in load_model(result.folder).items()}
    for name, tensor in body.state_dict().items():
        if not name.startswith("fc."):
            assert torch.equal(learned[f"body.{name}"], tensor)
    body.fc = nn.Identity()
    scaled = torch.from_numpy((x - x.mean()) / x.std())
    larger = nn.functional.interpolate(scaled, size=(64, 64), mode="bilinear").expand(-1, 3, -1, -1)
    with torch.no_grad():
        z = body.eval()(larger).double()
        batch = body.train()(larger).double()
    linear = torch.linalg.pinv(z) @ torch.eye(CLASSES).double()[torch.from_numpy(y)]
    torch.testing.assert_close(
        z @ learned["body.fc.weight"].double().T, z @ linear, rtol=0, atol=1e-4
    )
    assert float((batch - z).norm() / z.norm()) > 0.1  # the running statistics matter
