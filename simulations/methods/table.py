"""The methods that are a row: their classes and metrics say all that the simulations ask."""

from typing import Any

from fedntk.strategies import (
    AFL,
    DPSGD,
    NTKDFL,
    SCAFFOLD,
    DFedAvg,
    DFedSAM,
    DisPFL,
    Ditto,
    Fed3R,
    FedBN,
    FedCOF,
    FedNCM,
    FedPer,
    FedProto,
    LocalTraining,
    SeededFedAvg,
)

from .decentralised import DecentralisedMethod
from .method import Method

# of methods whose models are the clients' own: they are judged by the clients' evaluations
PERSONAL: dict[str, Any] = {"baseline": True, "headline": "client-accuracy-mean"}
METHODS: tuple[Method, ...] = (
    Method("afl", AFL, baseline=True),
    Method("fed-cof", FedCOF, baseline=True),
    Method("fed-ncm", FedNCM, baseline=True),
    Method("fed3r", Fed3R, baseline=True),
    Method("fedavg", SeededFedAvg, baseline=True, apart=("proximal_mu",)),
    Method("scaffold", SCAFFOLD, baseline=True),
    Method("ditto", Ditto, metrics=("personal-loss", "restarted"), **PERSONAL),
    Method("fed-bn", FedBN, batch_norm=True, **PERSONAL),
    Method("fed-per", FedPer, **PERSONAL),
    Method("fed-proto", FedProto, learns_on_server=False, **PERSONAL),
    Method("local-training", LocalTraining, learns_on_server=False, **PERSONAL),
    DecentralisedMethod("d-psgd", DPSGD, baseline=True),
    DecentralisedMethod("dfedavg", DFedAvg, baseline=True),
    DecentralisedMethod("dfedsam", DFedSAM, baseline=True),
    DecentralisedMethod(
        "dispfl",
        DisPFL,
        metrics=(*DecentralisedMethod.metrics, "mask-density", "mask-changed"),
        **PERSONAL,
    ),
    DecentralisedMethod(
        "ntk-dfl", NTKDFL, apart=("class_prior",), metrics=(*DecentralisedMethod.metrics, "t")
    ),
)
