"""The server half of each method: Flower strategies on the Message API."""

from .closed_form.afl import AFL
from .closed_form.closed_form import ClosedFormStrategy
from .closed_form.deep_afl import DeepAFL
from .closed_form.fed3r import Fed3R
from .closed_form.fed_cof import FedCOF
from .closed_form.fed_ncm import FedNCM
from .closed_form.glm import GLM
from .closed_form.noisy_sums import NoisySums
from .closed_form.one_exchange import OneExchange
from .closed_form.row_changes import RowChanges
from .closed_form.safle import SAFLe
from .core.asynchrony import Asynchrony
from .core.centre import CentreInputs
from .core.channel import Rounds, together
from .core.from_flower import FromFlower
from .core.kept_sums import KeptSums
from .core.ledger import Ledger
from .core.replies import NoUsableReply, Reply
from .core.round import Round
from .core.sampling import Sampling
from .core.screening import Screening
from .core.secure import SecureAggregation
from .core.strategy import Strategy
from .core.sums import FeatureSums
from .core.uploads import Update, Upload, Uploads
from .core.weight_average import WeightAverage
from .ensembles.distillation import Distillation
from .ensembles.fed_be import FedBE
from .ensembles.fed_ensemble import FedEnsemble
from .fed_dyn import FedDyn
from .fed_nova import FedNova
from .fedavg import SeededFedAvg
from .gossip.d_psgd import DPSGD
from .gossip.dfedavg import DFedAvg
from .gossip.dfedsam import DFedSAM
from .gossip.dispfl import DisPFL
from .gossip.ntk_dfl import NTKDFL
from .gossip.relay import RelayStrategy
from .gossip.topology import Topology, mixing_matrix, spectral_gap
from .ntk.cp_ntk_fl import CPNTKFL
from .ntk.ntk_fl import NTKFL
from .personal.ditto import Ditto
from .personal.fed_babu import FedBABU
from .personal.fed_bn import FedBN
from .personal.fed_per import FedPer
from .personal.fed_proto import FedProto
from .personal.fed_rep import FedRep
from .personal.local_training import LocalTraining
from .personal.personalised import PersonalisedStrategy, PersonalStrategy
from .personal.weighted_fedavg import Mixing, WeightedFedAvg
from .scaffold import SCAFFOLD
from .server_optimizers.fed_adam import FedAdam
from .server_optimizers.fed_avgm import FedAvgM
from .server_optimizers.fed_yogi import FedYogi
from .server_optimizers.server_optimizer import ServerOptimizer
from .tct.tct import TCT

__all__ = [
    "AFL",
    "CPNTKFL",
    "DPSGD",
    "GLM",
    "NTKDFL",
    "NTKFL",
    "SCAFFOLD",
    "TCT",
    "Asynchrony",
    "CentreInputs",
    "ClosedFormStrategy",
    "DFedAvg",
    "DFedSAM",
    "DeepAFL",
    "DisPFL",
    "Distillation",
    "Ditto",
    "FeatureSums",
    "Fed3R",
    "FedAdam",
    "FedAvgM",
    "FedBABU",
    "FedBE",
    "FedBN",
    "FedCOF",
    "FedDyn",
    "FedEnsemble",
    "FedNCM",
    "FedNova",
    "FedPer",
    "FedProto",
    "FedRep",
    "FedYogi",
    "FromFlower",
    "KeptSums",
    "Ledger",
    "LocalTraining",
    "Mixing",
    "NoUsableReply",
    "NoisySums",
    "OneExchange",
    "PersonalStrategy",
    "PersonalisedStrategy",
    "RelayStrategy",
    "Reply",
    "Round",
    "Rounds",
    "RowChanges",
    "SAFLe",
    "Sampling",
    "Screening",
    "SecureAggregation",
    "SeededFedAvg",
    "ServerOptimizer",
    "Strategy",
    "Topology",
    "Update",
    "Upload",
    "Uploads",
    "WeightAverage",
    "WeightedFedAvg",
    "mixing_matrix",
    "spectral_gap",
    "together",
]
