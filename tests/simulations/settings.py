"""Settings under which tests over all methods run each of them: with all its tools."""

TOOLS = {
    "sampling_rate": 0.5, "projection": 20, "sparsity": 0.5, "bits": 6, "shuffle": True,
}  # fmt: skip
SETTINGS = {
    "ntk-fl": {},
    "cp-ntk-fl": TOOLS,
    "tct": {
        "bootstrap_rounds": 1, "num_features": 300, "convex_steps": 20,
        "convex_learning_rate": 1e-3, "sampling_rate": 0.5, "projection": 20,
    },
    "fedavg": {"local_epochs": 3, "sampling_rate": 0.5, "projection": 20},
    "scaffold": {
        "local_epochs": 3, "sampling_rate": 0.5, "projection": 20, "server_learning_rate": 1.5,
    },
}  # fmt: skip
