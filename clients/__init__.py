"""The client half of each method: NumPyClients, and the adapter that puts them on messages."""

from .closed_form.closed_form import ClosedFormClient
from .closed_form.glm import GLMClient
from .closed_form.safle import SAFLeClient
from .core.adapter import client_app, received
from .core.base import ModelClient, sample_size
from .core.counted_rows import CountedRows
from .core.disk_store import DiskStore, cache_dir
from .core.local_sgd import LocalSGD
from .core.masked_weights import MaskedWeights
from .core.privacy_ledger import PrivacyLedger, PrivacyLimits
from .core.projection import SealedProjection, project
from .core.secure_sum import MaskedSums
from .core.weights import NamedArrays, get_weights, set_weights
from .ensembles.fed_ensemble import FedEnsembleClient
from .fed_dyn import FedDynClient
from .fed_nova import FedNovaClient
from .gossip.d_psgd import DPSGDClient
from .gossip.dfedavg import DFedAvgClient
from .gossip.dfedsam import DFedSAMClient
from .gossip.dispfl import DisPFLClient
from .gossip.gossip import GossipClient
from .gossip.ntk_dfl import NTKDFLClient
from .gossip.relay import RelayClient
from .ntk.cp_ntk_fl import CPNTKFLClient
from .ntk.ntk_fl import NTKFLClient
from .personal.ditto import DittoClient
from .personal.fed_babu import FedBABUClient
from .personal.fed_proto import FedProtoClient
from .personal.fed_rep import FedRepClient
from .personal.personal_client import PersonalClient, PersonalisedClient
from .personal.weighted_fedavg import WeightedFedAvgClient
from .scaffold import SCAFFOLDClient
from .sgd import SGDClient
from .tct.feature_store import FeatureStore, shrink
from .tct.tct import BootstrapSGD, TCTClient

__all__ = [
    "BootstrapSGD",
    "CPNTKFLClient",
    "ClosedFormClient",
    "CountedRows",
    "DFedAvgClient",
    "DFedSAMClient",
    "DPSGDClient",
    "DisPFLClient",
    "DiskStore",
    "DittoClient",
    "FeatureStore",
    "FedBABUClient",
    "FedDynClient",
    "FedEnsembleClient",
    "FedNovaClient",
    "FedProtoClient",
    "FedRepClient",
    "GLMClient",
    "GossipClient",
    "LocalSGD",
    "MaskedSums",
    "MaskedWeights",
    "ModelClient",
    "NTKDFLClient",
    "NTKFLClient",
    "NamedArrays",
    "PersonalClient",
    "PersonalisedClient",
    "PrivacyLedger",
    "PrivacyLimits",
    "RelayClient",
    "SAFLeClient",
    "SCAFFOLDClient",
    "SGDClient",
    "SealedProjection",
    "TCTClient",
    "WeightedFedAvgClient",
    "cache_dir",
    "client_app",
    "get_weights",
    "project",
    "received",
    "sample_size",
    "set_weights",
    "shrink",
]
