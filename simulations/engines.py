"""Grids: an in-process one that needs no Ray, and one that counts bytes around any other."""

import copy
import traceback
from collections.abc import Iterable
from logging import WARNING, getLogger

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from ._flower import Run, become_server, stamp

__all__ = ["LocalGrid", "MeteredGrid", "message_bytes"]

logger = getLogger("flwr")
CLIENT_APP_RAISED_EXCEPTION = 2


class LocalGrid(Grid):
    """Virtual clients in this process, one after the other.

    Node ids are 1 ... num_clients, for the partitions 0 ... num_clients - 1. A client that raises
    becomes an error reply, as on any other grid. Torch's number of threads is restored after each
    client.

    Parameters
    ----------
    app : ClientApp
        Serves all nodes.
    num_clients : int
        Number of nodes.
    run_config : dict
        Flat run-config that each client's context holds.
    """

    def __init__(
        self, app: ClientApp, num_clients: int, run_config: dict[str, bool | float | int | str]
    ) -> None:
        become_server()
        self.app = app
        self._run = Run.create_empty(run_id=1)
        self.contexts = {
            partition + 1: Context(
                run_id=1,
                node_id=partition + 1,
                node_config={"partition-id": partition, "num-partitions": num_clients},
                state=RecordDict(),
                run_config=dict(run_config),
            )
            for partition in range(num_clients)
        }
        self._replies: dict[str, Message] = {}

    def set_run(self, run: Run) -> None:
        """Set the run that messages belong to."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run that messages belong to."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Make a message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return 1 ... num_clients."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Have each message answered at once; return the message ids."""
        ids = []
        for message in messages:
            stamp(message)
            self._replies[message.metadata.message_id] = self._answer(message)
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to these messages, each once."""
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return the replies, in the order of the messages."""
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message:
        context = self.contexts[message.metadata.dst_node_id]
        threads = torch.get_num_threads()
        try:
            return self.app(_own_copy(message), context)
        except (Exception, SystemExit) as error:  # a client must not end the run
            partition = context.node_config["partition-id"]
            logger.log(WARNING, "client %s: %s", partition, traceback.format_exc())
            reason = f"{type(error).__name__}: {error}"
            return Message(Error(CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
        finally:
            torch.set_num_threads(threads)


def _own_copy(message: Message) -> Message:
    """Copy a message's records, which a strategy may share among messages; arrays are immutable."""
    content = RecordDict()
    for name, record in message.content.items():
        content[name] = type(record)(dict(record))  # type: ignore[arg-type]
    copied = copy.copy(message)
    copied.__dict__.update(message.__dict__)
    copied.content = content
    return copied


class MeteredGrid(Grid):
    """Counts the bytes of every message through another grid.

    Parameters
    ----------
    grid : Grid
        The grid that sends and receives.

    Attributes
    ----------
    bytes_down, bytes_up : int
        Of the content of all messages sent to clients, and of all replies: what each client
        receives and sends, whether or not the transport stores a shared content once.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.bytes_down = 0
        self.bytes_up = 0

    def set_run(self, run: Run) -> None:
        """Set the inner grid's run."""
        self.grid.set_run(run)

    @property
    def run(self) -> Run:
        """The inner grid's run."""
        return self.grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Have the inner grid make a message."""
        return self.grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return the inner grid's nodes."""
        return self.grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Count and send."""
        return self.grid.push_messages(self._sent(messages))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Receive and count."""
        return self._received(self.grid.pull_messages(message_ids))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Count, send, receive and count."""
        replies = self.grid.send_and_receive(self._sent(messages), timeout=timeout)
        return self._received(replies)

    def _sent(self, messages: Iterable[Message]) -> list[Message]:
        messages = list(messages)
        self.bytes_down += sum(map(message_bytes, messages))
        return messages

    def _received(self, replies: Iterable[Message]) -> list[Message]:
        replies = list(replies)
        self.bytes_up += sum(map(message_bytes, replies))
        return replies


def message_bytes(message: Message) -> int:
    """Size of a message's content: its arrays' serialised data, and its other records as sent."""
    if message.has_error():
        return len(message.error.reason or "")
    content = message.content
    size = 0
    for arrays in content.array_records.values():
        size += sum(len(array.data) for array in arrays.values())
    for record in (*content.metric_records.values(), *content.config_records.values()):
        size += len(record.deflate())
    return size
