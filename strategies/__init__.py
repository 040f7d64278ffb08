"""The server half of each method: Flower strategies on the Message API."""

import fedntk.ntk  # noqa: F401 - before torch: how its threads wait

from .afl import AFL
from .base import BaseStrategy
from .closed_form import ClosedFormStrategy, GramStrategy
from .cp_ntk_fl import CPNTKFL
from .d_psgd import DPSGD
from .dfedavg import DFedAvg
from .dfedsam import DFedSAM
from .dispfl import DisPFL
from .ditto import Ditto
from .fed3r import Fed3R
from .fed_be import FedBE
from .fed_be_distillation import Distillation
from .fed_bn import FedBN
from .fed_ensemble import FedEnsemble
from .fed_ncm import FedNCM
from .fed_per import FedPer
from .fed_proto import FedProto
from .fedavg import SeededFedAvg
from .gossip import GossipStrategy
from .inner import CheckedStrategy
from .kept_rounds import KeepingStrategy
from .local_training import LocalTraining
from .lost_state import ResendingStrategy
from .ntk_dfl import NTKDFL
from .ntk_fl import DEFAULT_STEPS, NTKFL, Selection
from .personalised import PersonalisedStrategy
from .relay import RelayStrategy
from .replies import NoUsableReply
from .scaffold import SCAFFOLD
from .tct import TCT, ConvexOptimizer
from .topology import MixingMatrix, Topology, mixing_matrix, spectral_gap
from .weighted_fedavg import Mixing, WeightedFedAvg

__all__ = [
    "AFL",
    "CPNTKFL",
    "DEFAULT_STEPS",
    "DPSGD",
    "NTKDFL",
    "NTKFL",
    "SCAFFOLD",
    "TCT",
    "BaseStrategy",
    "CheckedStrategy",
    "ClosedFormStrategy",
    "ConvexOptimizer",
    "DFedAvg",
    "DFedSAM",
    "DisPFL",
    "Distillation",
    "Ditto",
    "Fed3R",
    "FedBE",
    "FedBN",
    "FedEnsemble",
    "FedNCM",
    "FedPer",
    "FedProto",
    "GossipStrategy",
    "GramStrategy",
    "KeepingStrategy",
    "LocalTraining",
    "Mixing",
    "MixingMatrix",
    "NoUsableReply",
    "PersonalisedStrategy",
    "RelayStrategy",
    "ResendingStrategy",
    "SeededFedAvg",
    "Selection",
    "Topology",
    "WeightedFedAvg",
    "mixing_matrix",
    "spectral_gap",
]
