"""Tests that the rendezvous store, the TCPStore through which a trainer's ranks find each other, listens at only one address."""

import psutil
from torch.distributed import TCPStore

from rl_actors.processes.spawn import open_rendezvous


def test_the_rendezvous_store_listens_only_at_the_given_address():
    store = open_rendezvous("127.0.0.1")
    rank = TCPStore("127.0.0.1", store.port, is_master=False)
    rank.set("name", "value")
    assert store.get("name") == b"value"
    listening = [each for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert {each.laddr.ip for each in listening if each.laddr.port == store.port} == {"127.0.0.1"}
