"""The network and the data: scikit-learn's digits, split by Dirichlet(alpha)."""

from functools import cache

from datasets import Dataset
from flwr_datasets.partitioner import DirichletPartitioner
from sklearn.datasets import load_digits
from torch import nn


def make_network() -> nn.Module:
    """Make a network for images of 8 x 8 pixels."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))


@cache
def load_data() -> tuple[Dataset, Dataset]:
    """Load the training and the test images."""
    digits = load_digits()
    data = Dataset.from_dict({"image": digits.data / 8 - 1, "label": digits.target})
    halves = data.with_format("torch").train_test_split(0.2, seed=42)
    return halves["train"], halves["test"]


@cache
def split(num_clients: int, alpha: float) -> DirichletPartitioner:
    """Split the training images, once in each process."""
    partitioner = DirichletPartitioner(num_clients, "label", alpha, min_partition_size=2, seed=42)
    partitioner.dataset = load_data()[0]
    return partitioner
