"""Tests of the environment variable that makes gloo listen on the network interface that leads to the other ranks.

Without the variable gloo takes the interface of the address to which the machine's name resolves.
"""

from rl_actors.processes import address


def test_the_interface_that_leads_to_a_loopback_address_is_lo():
    assert address.address_towards("127.0.0.1", 1) == "127.0.0.1"
    assert address.lead_gloo_to("127.0.0.1", 1, {}) == {"GLOO_SOCKET_IFNAME": "lo"}


def test_an_interface_that_the_user_has_chosen_is_kept():
    assert address.lead_gloo_to("127.0.0.1", 1, {"GLOO_SOCKET_IFNAME": "ib0"}) == {}


def test_the_name_of_the_interface_is_empty_if_no_interface_has_the_address():
    assert address.interface_of("192.0.2.1") == ""
