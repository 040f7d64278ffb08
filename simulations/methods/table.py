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
from .personal import PersonalMethod

METHODS: tuple[Method[Any], ...] = (
    Method("afl", AFL, ClosedFormClient, baseline=True),
    Method("fed-ncm", FedNCM, ClosedFormClient, baseline=True),
    Method("fed3r", Fed3R, ClosedFormClient, baseline=True),
    Method("fedavg", SeededFedAvg, SGDClient, baseline=True, apart=("proximal_mu",)),
    Method("scaffold", SCAFFOLD, SCAFFOLDClient, baseline=True),
    PersonalMethod(
        "ditto", Ditto, DittoClient, baseline=True, metrics=("personal-loss", "restarted")
    ),
    PersonalMethod("fed-bn", FedBN, PersonalisedClient, baseline=True),
    PersonalMethod("fed-per", FedPer, PersonalisedClient, baseline=True),
    PersonalMethod("fed-proto", FedProto, FedProtoClient, baseline=True, learns_on_server=False),
    PersonalMethod(
        "local-training", LocalTraining, PersonalisedClient, baseline=True, learns_on_server=False
    ),
    DecentralisedMethod("d-psgd", DPSGD, DPSGDClient, baseline=True),
    DecentralisedMethod("dfedavg", DFedAvg, DFedAvgClient, baseline=True),
    DecentralisedMethod("dfedsam", DFedSAM, DFedSAMClient, baseline=True),
    DecentralisedMethod(
        "dispfl",
        DisPFL,
        DisPFLClient,
        baseline=True,
        headline="client-accuracy-mean",
        metrics=(*DecentralisedMethod.metrics, "mask-density", "mask-changed"),
    ),
    DecentralisedMethod(
        "ntk-dfl",
        NTKDFL,
        NTKDFLClient,
        apart=("class_prior",),
        metrics=(*DecentralisedMethod.metrics, "t"),
    ),
)
