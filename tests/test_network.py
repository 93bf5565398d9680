"""gloo listens on the network interface that leads to the other ranks.

By default gloo would take the interface of the address to which the machine's name resolves.
"""

from rl_actors.processes import network


def test_loopback_leads_to_loopback():
    assert network.address_towards("127.0.0.1", 1) == "127.0.0.1"
    assert network.lead_gloo_to("127.0.0.1", 1, {}) == {"GLOO_SOCKET_IFNAME": "lo"}


def test_a_choice_of_the_user_is_kept():
    assert network.lead_gloo_to("127.0.0.1", 1, {"GLOO_SOCKET_IFNAME": "ib0"}) == {}


def test_no_name_is_found_for_an_address_that_no_interface_has():
    assert network.interface_of("192.0.2.1") == ""
