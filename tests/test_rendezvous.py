"""The rendezvous store of a trainer's ranks listens only at the address that `open_rendezvous` gets."""

import psutil
from torch.distributed import TCPStore

from rl_actors.processes.spawn import open_rendezvous


def test_the_rendezvous_is_reached_at_its_address_and_at_no_other():
    store = open_rendezvous("127.0.0.1")
    rank = TCPStore("127.0.0.1", store.port, is_master=False)
    rank.set("name", "value")
    assert store.get("name") == b"value"
    listening = [each for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert {each.laddr.ip for each in listening if each.laddr.port == store.port} == {"127.0.0.1"}
