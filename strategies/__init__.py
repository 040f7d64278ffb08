"""The server half of each method: Flower strategies on the Message API."""

import fedntk.ntk  # noqa: F401 - before torch: how its threads wait

from .closed_form.afl import AFL
from .closed_form.closed_form import ClosedFormStrategy, GramStrategy
from .closed_form.deep_afl import DeepAFL
from .closed_form.fed3r import Fed3R
from .closed_form.fed_cof import FedCOF
from .closed_form.fed_ncm import FedNCM
from .closed_form.one_exchange import OneExchange
from .core.base import BaseStrategy
from .core.features import FeatureStrategy
from .core.inner import CheckedStrategy
from .core.kept_rounds import KeepingStrategy
from .core.lost_state import ResendingStrategy
from .core.replies import NoUsableReply
from .core.secure_average import AveragingStrategy
from .ensembles.distillation import Distillation
from .ensembles.fed_be import FedBE
from .ensembles.fed_ensemble import FedEnsemble
from .fedavg import SeededFedAvg
from .gossip.d_psgd import DPSGD
from .gossip.dfedavg import DFedAvg
from .gossip.dfedsam import DFedSAM
from .gossip.dispfl import DisPFL
from .gossip.gossip import GossipStrategy
from .gossip.ntk_dfl import NTKDFL
from .gossip.relay import RelayStrategy
from .gossip.topology import Topology, mixing_matrix, spectral_gap
from .ntk.cp_ntk_fl import CPNTKFL
from .ntk.ntk_fl import NTKFL
from .personal.ditto import Ditto
from .personal.fed_bn import FedBN
from .personal.fed_per import FedPer
from .personal.fed_proto import FedProto
from .personal.local_training import LocalTraining
from .personal.personalised import PersonalisedStrategy, PersonalStrategy
from .personal.weighted_fedavg import Mixing, WeightedFedAvg
from .scaffold import SCAFFOLD
from .tct.tct import TCT

__all__ = [
    "AFL",
    "CPNTKFL",
    "DPSGD",
    "NTKDFL",
    "NTKFL",
    "SCAFFOLD",
    "TCT",
    "AveragingStrategy",
    "BaseStrategy",
    "CheckedStrategy",
    "ClosedFormStrategy",
    "DFedAvg",
    "DFedSAM",
    "DeepAFL",
    "DisPFL",
    "Distillation",
    "Ditto",
    "FeatureStrategy",
    "Fed3R",
    "FedBE",
    "FedBN",
    "FedCOF",
    "FedEnsemble",
    "FedNCM",
    "FedPer",
    "FedProto",
    "GossipStrategy",
    "GramStrategy",
    "KeepingStrategy",
    "LocalTraining",
    "Mixing",
    "NoUsableReply",
    "OneExchange",
    "PersonalStrategy",
    "PersonalisedStrategy",
    "RelayStrategy",
    "ResendingStrategy",
    "SeededFedAvg",
    "Topology",
    "WeightedFedAvg",
    "mixing_matrix",
    "spectral_gap",
]
