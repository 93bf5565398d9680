"""The Router, which chooses a replica of the generator for each prompt."""

from rl_actors.clients.fleet import FULL, MAX_KNOWN, SLACK, Router

BOTH = [0, 1]


def test_prompts_go_to_the_least_loaded_replica():
    router = Router(3)
    assert [router.assign([index], 4, [0, 1, 2]) for index in range(6)] == [0, 1, 2, 0, 1, 2]
    router.finish(1, 8)
    assert [router.assign([10 + index], 4, [0, 1, 2]) for index in range(2)] == [1, 1]
    assert router.loads == [8, 8, 8]


def test_a_prompt_goes_to_the_replica_that_got_the_same_prompt_or_an_earlier_turn():
    router = Router(2)
    router.assign([1, 2], 1, BOTH)
    assert router.assign([1, 2, 3, 4], 1, BOTH) == 0  # the next turn of an episode
    assert router.assign([1, 2], 1, BOTH) == 0
    assert router.assign([1, 3], 1, BOTH) == 1  # no earlier prompt is a prefix of this one
    assert router.assign([1, 2, 3, 4, 5], 1, BOTH) == 0
    router.forget()  # from now on only the loads decide
    assert router.assign([1, 2, 3, 4, 5], 1, BOTH) == 1


def test_a_known_prompt_goes_to_another_replica_if_its_own_replica_has_much_more_work():
    router = Router(2)
    replicas = [router.assign([7], 2, BOTH) for _ in range(SLACK + 3)]
    assert replicas == [0] * (SLACK + 1) + [1] * 2
    assert router.loads == [2 * (SLACK + 1), 4]


def test_only_replicas_that_take_requests_get_prompts_and_a_single_replica_gets_all_prompts():
    router = Router(3)
    router.assign([7], 1, [0, 1, 2])
    assert [router.assign([7], 1, [1, 2]) for _ in range(4)] == [1, 1, 1, 1]
    assert [router.assign([index], 1, [2]) for index in range(3)] == [2, 2, 2]
    single = Router(1)
    assert [single.assign([index], 2, [0]) for index in range(3)] == [0, 0, 0] and single.loads == [6]


def test_the_router_remembers_a_limited_number_of_prompts():
    router = Router(2)
    for index in range(MAX_KNOWN + 10):
        router.finish(router.assign([index], 1, BOTH), 1)
    assert len(router._known) == MAX_KNOWN


def test_the_next_engine_of_a_gpu_gets_prompts_when_the_one_before_is_full():
    router = Router(4, engines_per_gpu=2)
    everywhere = [0, 1, 2, 3]
    first = [router.assign([index], 16, everywhere) for index in range(8)]
    assert first == [0, 2] * 4 and router.loads == [FULL, 0, FULL, 0]
    assert [router.assign([100 + index], 16, everywhere) for index in range(8)] == [1, 3] * 4
    assert [router.assign([200 + index], 16, everywhere) for index in range(4)] == [0, 2, 1, 3]
    assert router.assign([300], 16, [1, 2, 3]) == 1  # the first engine has died
