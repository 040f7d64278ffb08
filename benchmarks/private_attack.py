"""Who was in a released model? A membership attack with and without noise in the sums.

Each model is solved from the sums of about 2,000 images of Fashion-MNIST, a random half of 4,000,
with p = 1,000 features: so few that it can remember them. A trusted server adds the noise. The
attack is that of Carlini et al., *Membership Inference Attacks From First Principles* (LiRA), S&P
2022. For each image a normal law is fitted to its margin, the score of its class minus the largest
other one, over models with it, and another over models without it; the likelihood ratio judges the
image in one more model. The weaker attack has one threshold for the margins of all images.

    python benchmarks/private_attack.py --data-dir FOLDER --keep FOLDER
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from common import RESULTS, parse_options, write
from private_sums import CLASSES, DELTA, RADIUS, all_rows
from sklearn.metrics import roc_auc_score, roc_curve

from fedntk.ntk.convex.private_sums import SumNoise, solve_noisy

POOL, WIDTH, MODELS, JUDGED = 4000, 1000, 48, 8
EPSILONS = (0.0, 100.0, 8.0, 3.0, 1.0)


def margins(z: torch.Tensor, y: torch.Tensor, linear: torch.Tensor) -> np.ndarray:
    """Return each image's score of its class minus the largest other one (n,)."""
    scores = z @ linear
    own = scores.gather(1, y[:, None]).squeeze(1)
    scores.scatter_(1, y[:, None], -torch.inf)
    return (own - scores.amax(1)).numpy()


def main() -> None:
    options = parse_options(__doc__, data_dir=True, keep="runs/private-sums")
    (z, y), test = all_rows("fashion-mnist", options.data_dir, "frequencies", WIDTH, options.keep)
    z, y, z_test = z[:POOL].double(), y[:POOL], test[0].double()
    targets = torch.nn.functional.one_hot(y, CLASSES).double()
    members = np.random.default_rng(0).random((MODELS, POOL)) < 0.5
    found, figure = [], plt.figure(figsize=(5, 4.2), layout="constrained")
    for epsilon in EPSILONS:
        noise = SumNoise(radius=RADIUS, width=WIDTH, num_classes=CLASSES)
        noise = noise.calibrated(epsilon, DELTA) if epsilon else noise
        v, s = noise.variances()
        seen, accuracies = np.empty((MODELS, POOL)), []
        for k, chosen in enumerate(members):
            generator = torch.Generator().manual_seed(k)
            own, gram = z[chosen], z[chosen].T @ z[chosen]
            cross = own.T @ targets[chosen]
            if epsilon:
                drawn = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
                upper = drawn.triu(1) / 2**0.5
                gram += v**0.5 * (upper + upper.T + drawn.diag().diag())
                drawn = torch.randn(WIDTH, CLASSES, generator=generator, dtype=torch.float64)
                linear = solve_noisy(gram, cross + s**0.5 * drawn, v)
            else:
                ridge = 1e-4 * gram.trace() / WIDTH
                linear = torch.linalg.solve(gram + ridge * torch.eye(WIDTH).double(), cross)
            seen[k] = margins(z, y, linear)
            accuracies.append(float(((z_test @ linear).argmax(1) == test[1]).double().mean()))
        judged, ratios = slice(JUDGED), np.empty((JUDGED, POOL))
        for k in range(JUDGED):
            others = np.arange(MODELS) != k
            laws = []
            for inside in (True, False):
                among = np.where((members == inside) & others[:, None], seen, np.nan)
                mean, std = np.nanmean(among, 0), np.nanstd(among, 0) + 1e-12
                laws.append(-0.5 * ((seen[k] - mean) / std) ** 2 - np.log(std))
            ratios[k] = laws[0] - laws[1]
        row = {"epsilon": epsilon, "accuracy": float(np.mean(accuracies))}
        for name, scores in (("lira", ratios), ("threshold", seen[judged])):
            false, true, _ = roc_curve(members[judged].ravel(), scores.ravel())
            row |= {
                f"{name}-auc": float(roc_auc_score(members[judged].ravel(), scores.ravel())),
                f"{name}-tpr-at-1-percent": float(np.interp(0.01, false, true)),
            }
            if name == "lira":
                label = f"epsilon {epsilon:g}" if epsilon else "no noise"
                plt.loglog(false, true, label=f"{label} ({100 * row['accuracy']:.0f} % right)")
        print(row, flush=True)
        found.append(row)
    plt.loglog([1e-3, 1], [1e-3, 1], "k:", label="guessing")
    plt.xlim(1e-3, 1)
    plt.ylim(1e-3, 1.1)
    plt.xlabel("share of others taken for members")
    plt.ylabel("share of members found")
    plt.title("Membership attack on released models")
    plt.legend(loc="lower right", frameon=False)
    figure.savefig(RESULTS / "private_attack.png", dpi=120)
    known = {"models": MODELS, "judged": JUDGED, "pool": POOL, "p": WIDTH, "delta": DELTA}
    write("private_attack", summary={**known, "rows": found})


if __name__ == "__main__":
    main()
