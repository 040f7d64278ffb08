"""The methods that are a row: their classes and metrics say all that the simulations ask."""

from typing import Any

from fedntk.clients import (
    ClosedFormClient,
    DFedAvgClient,
    DFedSAMClient,
    DisPFLClient,
    DittoClient,
    DPSGDClient,
    FedProtoClient,
    NTKDFLClient,
    PersonalisedClient,
    SCAFFOLDClient,
    SGDClient,
)
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
METHODS: tuple[Method[Any], ...] = (
    Method("afl", AFL, ClosedFormClient, baseline=True),
    Method("fed-ncm", FedNCM, ClosedFormClient, baseline=True),
    Method("fed3r", Fed3R, ClosedFormClient, baseline=True),
    Method("fedavg", SeededFedAvg, SGDClient, baseline=True, apart=("proximal_mu",)),
    Method("scaffold", SCAFFOLD, SCAFFOLDClient, baseline=True),
    Method("ditto", Ditto, DittoClient, metrics=("personal-loss", "restarted"), **PERSONAL),
    Method("fed-bn", FedBN, PersonalisedClient, **PERSONAL),
    Method("fed-per", FedPer, PersonalisedClient, **PERSONAL),
    Method("fed-proto", FedProto, FedProtoClient, learns_on_server=False, **PERSONAL),
    Method("local-training", LocalTraining, PersonalisedClient, learns_on_server=False, **PERSONAL),
    DecentralisedMethod("d-psgd", DPSGD, DPSGDClient, baseline=True),
    DecentralisedMethod("dfedavg", DFedAvg, DFedAvgClient, baseline=True),
    DecentralisedMethod("dfedsam", DFedSAM, DFedSAMClient, baseline=True),
    DecentralisedMethod(
        "dispfl",
        DisPFL,
        DisPFLClient,
        metrics=(*DecentralisedMethod.metrics, "mask-density", "mask-changed"),
        **PERSONAL,
    ),
    DecentralisedMethod(
        "ntk-dfl",
        NTKDFL,
        NTKDFLClient,
        apart=("class_prior",),
        metrics=(*DecentralisedMethod.metrics, "t"),
    ),
)
