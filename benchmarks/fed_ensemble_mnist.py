"""Fed-ensemble against FedAvg on MNIST or Fashion-MNIST, as in Shi et al. 2021, Tables 2 and 4.

100 clients with 10,000 training images in all, IID or of two classes each, 10 clients a round,
LeNet, two local epochs, 60 rounds; so every method has the same number of client updates. FedAvg
and all models of the ensembles begin with weights of one rule: He et al.'s, or with
``--init default`` the one that torch's layers have. The
learning rate of each method and split is chosen from a grid on 2,000 validation images, which no
client has, with one seed; what is reported are test accuracies after the last round over three
seeds. K = 3, 20 and 40 take the rate of K = 5. With more models than sampled clients there are as
many strata as sampled clients.

    python benchmarks/fed_ensemble_mnist.py --data-dir FOLDER [--dataset mnist] [--parallel 2]
        [--init he] [--without-other-k]

Runs go into runs/fed_ensemble, and are not repeated if they are there.
"""

from pathlib import Path
from typing import Any

from common import parse_options, write

from fedntk.simulations import Config, compare, tune

SEEDS = (0, 1, 2)
RATES = [0.01, 0.03, 0.1, 0.3]
SPLITS: dict[str, dict[str, Any]] = {
    "IID": {"partition": "iid"},
    "two classes a client": {"partition": "pathological", "classes_per_client": 2},
}


def ensemble(num_models: int, **options: Any) -> dict[str, Any]:
    own = {"num_models": num_models, "num_strata": min(num_models, 10), **options}
    return {"method": "fed-ensemble", "fed_ensemble": own}


TUNED = {
    "FedAvg": {"method": "fedavg"},
    "Fed-ensemble, K = 5": ensemble(5),
    "Fed-ensemble, K = 5, balanced": ensemble(5, schedule="balanced"),
}
OTHERS: dict[str, dict[str, Any]] = {f"Fed-ensemble, K = {k}": ensemble(k) for k in (3, 20, 40)}
KEPT = (
    "accuracy", "loss", "model-accuracy-max", "model-accuracy-mean", "model-accuracy-min",
    "model-entropy-mean", "mutual-information",
)  # fmt: skip


def main() -> None:
    options = parse_options(
        __doc__, data_dir=True, dataset=["mnist", "fashion-mnist"], rounds=60, parallel=1,
        init=["he", "default"], without_other_k=False,
    )  # fmt: skip
    common = Config(
        dataset=options.dataset, data_dir=options.data_dir, num_clients=100, clients_per_round=10,
        clients_per_evaluation=0, train_examples=10_000, validation_examples=2_000, model="lenet",
        init=options.init, fed_ensemble={"init": "he" if options.init == "he" else "network"},
        local_epochs=2, batch_size=32, rounds=options.rounds,
    )  # fmt: skip
    stem = options.dataset + ("_default" if options.init == "default" else "")
    folder = Path("runs/fed_ensemble") / stem
    rows = []
    for split, partition in SPLITS.items():
        place = folder / partition["partition"]
        rates: dict[str, float] = {}
        for i, (name, settings) in enumerate(TUNED.items()):
            found = tune(
                common.replace(**partition, **settings),
                grid={"learning-rate": RATES},
                parallel=options.parallel,
                out=place / f"tune-{i}",
            )
            rates[name] = found.best.learning_rate
            print(split, name, "rate", rates[name], flush=True)
        methods = TUNED if options.without_other_k else {**TUNED, **OTHERS}
        configs = {
            name: common.replace(
                **partition,
                **settings,
                learning_rate=rates.get(name, rates["Fed-ensemble, K = 5"]),
                evaluate_every=options.rounds,
            )
            for name, settings in methods.items()
        }
        table = compare(configs, seeds=SEEDS, out=place / "compare")
        last = table[table["round"] == options.rounds]
        for name, config in configs.items():
            row: dict[str, Any] = {"split": split, "method": name, "rate": config.learning_rate}
            for key in KEPT:
                values = last[(last.run == name) & (last.metric == key)].value
                if len(values):
                    row[key] = round(float(values.mean()), 4)
                    row[f"{key}-std"] = round(float(values.std()), 4)
            rows.append(row)
            print(row, flush=True)
    settings = {**vars(options), "rates": RATES}
    settings.pop("data_dir")
    write(f"fed_ensemble_{stem}", summary={"settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
