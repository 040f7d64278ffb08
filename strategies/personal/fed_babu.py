"""FedBABU: FedAvg of the body only, before a head that is never trained; clients fine-tune theirs.

Source: Oh, Kim and Yun, *FedBABU: Toward Enhanced Representation for Federated Image
Classification*, ICLR 2022, section 4 and algorithm 1.
"""

from ..fedavg import SeededFedAvg


class FedBABU(SeededFedAvg):
    """FedBABU (Oh et al. 2022). Clients are :class:`~fedntk.clients.FedBABUClient`.

    The Result holds the trained body and the first head. Clients evaluate, and predict, with the
    head fine-tuned to their training examples.
    """

    client = "FedBABUClient"
