"""What one client sends, gets and keeps, as formulas: the tables on the methods' pages.

`docs/tables.py` writes them into the pages. `tests/test_docs_costs.py` evaluates them and compares
with the arrays that travel in small federations. All are bytes of arrays; names, shapes and
Flower's framing come on top. Formulas are Python, and are printed as mathematics.
"""

NAMES = {
    "down": "down",
    "first": "down besides, until a reply of the client has been accepted",
    "up": "up",
    "evaluate": "down, to evaluate",
    "model": "up, its model, when a round evaluates",
    "kept": "on its disk, for each of the newest 20 rounds",
}
ONE_MODEL = {"down": "4 * P", "up": "4 * P", "evaluate": "4 * P"}
FLOAT_SUMS = "min(4 * p * (p + 1), 8 * n * p) + 8 * p * C + 8 * C"
WHOLE_SUMS = "min(2 * p * (p + 1), 8 * n * p) + 4 * p * C + 8 * C"
TWO_WHOLE_SUMS = (
    "min(2 * p * (p + 1), 8 * (n - h) * p) + min(2 * p * (p + 1), 8 * h * p) + 8 * p * C + 16 * C"
)
WITH_STEPS = "4 * P + 4 * p"
MASKED_DOWN = f"{WITH_STEPS} + 64 + 188 * K"
LAST_LAYER = ONE_MODEL | {"up": FLOAT_SUMS}
NEIGHBOURS = {"up": "4 * P + 8", "down": "d * (4 * P + 8)", "first": "4 * P", "model": "4 * P"}
PROTOTYPES = "4 * C * p + 8 * C"

# page -> name of a quantity -> formula
COSTS: dict[str, dict[str, str]] = {
    "ntk_fl": {
        "down": "4 * P",
        "up, outputs and targets": "8 * n * C",
        "up, a layer in factors": "4 * n * (A + C * S * d_out)",
        "up, the last linear layer, or one before it and an activation": "4 * n * (A + d_out)",
        "up, a dense parameter": "4 * n * C * d",
        'down, candidates, with `selection = "clients"` or held-out clients': "4 * T * P",
        "evaluate": "4 * P",
    },
    "cp_ntk_fl": {
        "outputs": "4 * n * C",
        "labels, up to 256 classes": "n",
        "each tensor": "20 + 8 * a + R + Q + V",
        "R, ranges of the magnitudes; 0 with `bits = 32`": "8 * g",
        "Q, positions; 0 if all stay": "min(ceil(m / 8), ceil(k * ceil(log2(m)) / 8))",
        "V, values; b = 32 with `bits = 32`": "ceil(k * b / 8)",
    },
    "ntk_dfl": {
        "down": "2 * d * (4 * P + 8) + d * U",
        "first": "4 * P",
        "up": "2 * (4 * P + 8) + d * U",
        "model": "4 * P",
        "up besides, with `collect_both`": "4 * P",
        "`evolve-once`: down, a hub": "d * (4 * P + 8) + d * U",
        "`evolve-once`: down, another": "2 * (4 * P + 8) + 16",
        "`evolve-once`: up, a hub": "3 * (4 * P + 8) + 16",
        "`evolve-once`: up, another": "(4 * P + 8) + U",
    },
    "fed_ensemble": ONE_MODEL | {"evaluate": "4 * P * K"},
    "weighted_fedavg": {
        "down": "4 * (P - P_b)",
        "first": "4 * P_b",
        "up": "4 * (P - P_b) + 4 * C_k * p + 8 * C",
        "evaluate": "4 * (P - P_b)",
        "kept": "4 * P_b",
    },
    "fedavg": ONE_MODEL,
    "scaffold": {"down": "4 * P + 4 * P_f", "up": "4 * P + 4 * P_f", "evaluate": "4 * P"},
    "fed_be": ONE_MODEL,
    "afl": LAST_LAYER,
    "fed3r": LAST_LAYER,
    "fed_cof": ONE_MODEL | {"up": "4 * C_k * p + 8 * C"},
    "deep_afl": ONE_MODEL
    | {"up": "min(4 * (p + m) * (p + m + 1), 8 * n * (p + m)) + 8 * (p + m) * C + 8 * C"},
    "one_exchange": {
        "down": WITH_STEPS,
        "up": TWO_WHOLE_SUMS,
        "up, with `validation-share = 0`": WHOLE_SUMS,
        "up, with `epsilon`, for any n": "2 * p * (p + 1) + 4 * p * C + 8 * C",
        "down, with `secure-aggregation` of K clients": MASKED_DOWN,
        "up, with `secure-aggregation` of K clients": (
            "4 * p * (p + 1) + 8 * p * C + 8 * C + 112 + 132 * K"
        ),
        "evaluate": "4 * P",
        "down, to evaluate, with `personal`, at most": (
            f"{WITH_STEPS} + 4 * p * (p + 1) + 8 * p * C + 16 * C"
        ),
    },
    "fed_ncm": ONE_MODEL | {"up": "4 * C_k * p + 8 * C"},
    "fed_bn": {
        "down": "4 * (P - P_b)",
        "first": "4 * P_b",
        "up": "4 * (P - P_b)",
        "evaluate": "4 * (P - P_b)",
        "kept": "4 * P_b",
    },
    "fed_per": {
        "down": "4 * (P - P_h)",
        "first": "4 * P_h",
        "up": "4 * (P - P_h)",
        "evaluate": "4 * (P - P_h)",
        "kept": "4 * P_h",
    },
    "ditto": ONE_MODEL | {"kept": "4 * P"},
    "fed_proto": {
        "down": PROTOTYPES,
        "first": "4 * P",
        "up": "4 * C_k * p + 8 * C",
        "evaluate": PROTOTYPES,
        "kept": "4 * P",
    },
    "local_training": {"down": "0", "first": "4 * P", "up": "0", "evaluate": "0", "kept": "4 * P"},
    "dfedavg": NEIGHBOURS | {"kept": "4 * P", "what it trained, for each of these": "4 * P"},
    "dfedsam": NEIGHBOURS | {"kept": "4 * P", "what it trained, for each of these": "4 * P"},
    "d_psgd": NEIGHBOURS
    | {"up besides, when neighbours' weights are not there yet": "4 * P + 8", "kept": "4 * P"},
    "dispfl": {
        "up": "4 * (K + P - P_m) + P_m / 8 + 8",
        "down": "d * (4 * (K + P - P_m) + P_m / 8 + 8)",
        "first": "4 * P",
        "model": "4 * P",
        "kept": "4 * P + 2 * P_m",
    },
}
# TCT's rows have a formula for each way
STAGE_1, MOMENTS, STAGE_2 = "a round of stage 1, by FedAvg", "the moments", "a round of stage 2"
SUMS = 'sums, `solve = "statistics"`'
TCT: dict[str, tuple[str, str]] = {
    STAGE_1: ("4 * P", "4 * P"),
    MOMENTS: ("4 * P", "16 * p + 8 * C"),
    STAGE_2: ("4 * (p + 1) * C", "4 * (p + 1) * C"),
    "its first round of stage 2, besides": ("8 * p", "0"),
    "a round after one that not all took part in, besides": ("4 * (p + 1) * C", "0"),
    'features, `solve = "server"`': ("4 * P", "2 * n * p + 4 * p + n"),
    SUMS: ("4 * P", FLOAT_SUMS),
    "sums, `bits` = 2 to 8": (WITH_STEPS, WHOLE_SUMS),
    "sums, `balanced`": ("4 * P + 8 * C", FLOAT_SUMS),
    "the counts before, `balanced`": ("0", "8 * C"),
    "sums, `validation-share`, h examples held out": (
        "4 * P",
        "min(4 * p * (p + 1), 8 * (n - h) * p) + min(4 * p * (p + 1), 8 * h * p) "
        "+ 16 * p * C + 16 * C",
    ),
    "sums, `validation-share` and `bits` = 2 to 8, h examples held out": (
        WITH_STEPS,
        TWO_WHOLE_SUMS,
    ),
    "sums, `bits` = 2 to 8, `secure-aggregation` of K clients": (
        MASKED_DOWN,
        "2 * p * (p + 1) + 4 * p * C + 4 * C + 112 + 132 * K",
    ),
    "an evaluation before stage 2": ("4 * P", "0"),
    "an evaluation in stage 2": ("4 * (p + 1) * C", "0"),
}


def printed(formula: str) -> str:
    """Return a formula as mathematics: a space for a product, ² for a square."""
    return formula.replace("**2", "²").replace(" * ", " ").replace("log2", "log₂")


def table(page: str) -> str:
    """Return the table of a method's page."""
    if page == "tct":
        lines = ["| bytes of one client | down | up |", "|---|---|---|"]
        for row, ways in TCT.items():
            cells = [printed(formula) if formula != "0" else "-" for formula in ways]
            lines.append(f"| {row} | {' | '.join(cells)} |")
        return "\n".join(lines)
    lines = ["| bytes of one client in a round | formula |", "|---|---|"]
    for row, formula in COSTS[page].items():
        lines.append(f"| {NAMES.get(row, row)} | {printed(formula)} |")
    return "\n".join(lines)
