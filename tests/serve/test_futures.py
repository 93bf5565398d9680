"""Tests of the Tinker server's promises: answers, errors, repeated requests, and dropped answers.

The server accepts a request at once and returns a promise. The client fetches the answer later.
"""

import asyncio

import pytest

from controllers.tinker_server.futures import DROPPED, Answer, Futures, UserError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(coroutine):
    return asyncio.run(coroutine)


async def answers(number: int) -> Answer:
    return Answer(json={"number": number})


def test_a_request_with_a_repeated_key_gets_the_first_promise_and_the_work_is_done_once():
    async def main():
        futures, done = Futures(), []

        async def work() -> Answer:
            done.append(1)
            return await answers(1)

        first = futures.submit(("run", "m", 1), "call", work)
        again = futures.submit(("run", "m", 1), "call", work)
        other = futures.submit(("run", "m", 2), "call", work)
        await futures.wait(other.request_id, 1)
        assert again is first and other is not first and len(done) == 2

    run(main())


def test_a_request_for_an_answer_waits_until_the_answer_is_there():
    async def main():
        futures, gate = Futures(), asyncio.Event()

        async def work() -> Answer:
            await gate.wait()
            return await answers(7)

        promise = futures.submit(None, "call", work)
        assert (await futures.wait(promise.request_id, 0.01)).answer is None
        waiting = asyncio.create_task(futures.wait(promise.request_id, 60))
        await asyncio.sleep(0.01)
        gate.set()
        assert (await waiting).answer == Answer(json={"number": 7})

    run(main())


@pytest.mark.parametrize(
    ("error", "category"),
    [(UserError("wrong"), "user"), (ValueError("wrong"), "user"), (RuntimeError("wrong"), "server")],
)
def test_an_error_is_an_answer_with_a_category(error, category):
    async def main():
        async def work() -> Answer:
            raise error

        futures = Futures()
        promise = await futures.wait(futures.submit(None, "call", work).request_id, 1)
        assert promise.answer.category == category and "wrong" in promise.answer.error

    run(main())


def test_a_fetched_answer_is_dropped_after_a_while_and_its_key_is_forgotten_later():
    async def main():
        clock = Clock()
        futures = Futures(keep_fetched=10, keep_keys=100, now=clock)

        async def work() -> Answer:
            return await answers(1)

        promise = futures.submit("key", "call", work)
        (await futures.wait(promise.request_id, 1)).fetched = futures.now()
        clock.now = 50.0
        assert futures.submit("key", "call", work) is promise  # the key is still known
        assert promise.answer is DROPPED
        clock.now = 200.0
        assert futures.submit("key", "call", work) is not promise
        with pytest.raises(KeyError):
            await futures.wait(promise.request_id, 1)

    run(main())


def test_an_unfetched_answer_is_kept_for_keep_unfetched_seconds_even_if_keep_keys_is_shorter():
    async def main():
        clock = Clock()
        futures = Futures(keep_unfetched=100, keep_keys=10, now=clock)
        promise = futures.submit("key", "call", lambda: answers(1))
        await promise.is_done.wait()
        clock.now = 90.0
        futures.submit("other", "call", lambda: answers(2))
        assert (await futures.wait(promise.request_id, 1)).answer == await answers(1)
        clock.now = 110.0
        futures.submit("third", "call", lambda: answers(3))
        with pytest.raises(KeyError):
            await futures.wait(promise.request_id, 1)

    run(main())


def test_the_number_of_kept_promises_exceeds_the_limit_by_at_most_one():
    async def main():
        futures = Futures(max_answers=10)
        for number in range(50):
            promise = futures.submit(number, "call", lambda number=number: answers(number))
            await futures.wait(promise.request_id, 1)
        assert len(futures.promises) <= 11 and len(futures.keys) == len(futures.promises)

    run(main())


def test_above_the_limit_answered_promises_are_forgotten_and_an_older_unanswered_one_is_kept():
    async def main():
        futures = Futures(max_answers=10)
        gate = asyncio.Event()

        async def waits():
            await gate.wait()
            return await answers(0)

        oldest = futures.submit("oldest", "call", waits)
        for number in range(50):
            promise = futures.submit(number, "call", lambda number=number: answers(number))
            await futures.wait(promise.request_id, 1)
        answered = [promise for promise in futures.promises.values() if promise.answer is not None]
        assert len(answered) <= 11 and oldest.request_id in futures.promises
        gate.set()
        await futures.wait(oldest.request_id, 1)

    run(main())


def test_a_busy_owner_evicts_no_promise_of_another_owner():
    async def main():
        futures = Futures(max_answers=3)
        quiet = futures.submit(("run", "m", 1), "call", lambda: answers(0), owner="quiet")
        await futures.wait(quiet.request_id, 1, owner="quiet")
        for number in range(20):
            promise = futures.submit(("run", "n", number), "call", lambda: answers(1), owner="busy")
            await futures.wait(promise.request_id, 1, owner="busy")
        assert futures.submit(("run", "m", 1), "call", lambda: answers(2), owner="quiet") is quiet
        assert [each.owner for each in futures.promises.values()].count("busy") <= 4

    run(main())


def test_work_that_keeps_its_key_is_never_done_twice():
    async def main():
        clock = Clock()
        futures, done = Futures(max_answers=2, now=clock), []

        async def work() -> Answer:
            done.append(1)
            return await answers(1)

        first = futures.submit(("run", "m", 1), "optim_step", work, keeps_key=True)
        await futures.wait(first.request_id, 1)
        for number in range(5):
            other = futures.submit(("run", "m", 10 + number), "call", lambda: answers(1))
            await futures.wait(other.request_id, 1)
        assert first.request_id not in futures.promises
        clock.now = 1e6
        again = futures.submit(("run", "m", 1), "optim_step", work, keeps_key=True)
        assert (await futures.wait(again.request_id, 1)).answer.error.startswith("this request was executed before")
        assert done == [1]

    run(main())


def test_the_same_key_of_another_call_is_another_request():
    async def main():
        futures = Futures()
        one = futures.submit(("run", "m", 1), "forward_backward", lambda: answers(1))
        other = futures.submit(("run", "m", 1), "optim_step", lambda: answers(2))
        assert (await futures.wait(other.request_id, 1)).answer.json == {"number": 2} and one is not other

    run(main())


def test_a_submit_does_not_look_at_the_other_promises():
    async def main():
        futures = Futures(max_answers=10, now=Clock())
        for number in range(200):
            futures.submit(("run", "m", number), "call", asyncio.Event().wait)  # no answer comes
        looked = []
        promises = futures.promises

        class Watched(type(promises)):
            def values(self):
                looked.append(1)
                return super().values()

        futures.promises = Watched(promises)
        futures.submit(("run", "m", 1000), "call", lambda: answers(1))
        await futures.close()
        assert looked == []

    run(main())


def test_an_error_that_repeats_a_long_request_is_cut():
    async def main():
        async def fail() -> Answer:
            raise UserError("x" * 1_000_000)

        futures = Futures()
        promise = futures.submit(None, "call", fail)
        assert len((await futures.wait(promise.request_id, 1)).answer.error) < 5000

    run(main())


def test_answers_are_bounded_by_their_bytes_for_each_owner_and_no_request_runs_twice():
    async def main():
        futures, done = Futures(max_bytes=1000), []

        async def work() -> Answer:
            done.append(1)
            return Answer(proto=bytes(400))

        promises = [futures.submit(index, "call", work, owner="a") for index in range(4)]
        other = futures.submit(0, "call", work, owner="b")
        for promise in [*promises, other]:
            await futures.wait(promise.request_id, 60, owner=promise.owner)
        assert [promise.answer is DROPPED for promise in promises] == [True, True, False, False]
        assert other.answer.num_bytes == 400 and futures.kept_bytes == {"a": 800, "b": 400}
        assert futures.submit(0, "call", work, owner="a") is promises[0] and len(done) == 5
        large = futures.submit(9, "call", lambda: large_answer(), owner="a")
        await futures.wait(large.request_id, 60, owner="a")
        assert large.answer.num_bytes == 5000  # the newest answer is kept whatever its size
        assert futures.kept_bytes["a"] == 5000

    async def large_answer() -> Answer:
        return Answer(proto=bytes(5000))

    run(main())


def test_a_fetched_answer_that_was_dropped_no_longer_counts():
    async def main():
        clock = Clock()
        futures = Futures(now=clock, keep_fetched=60.0)

        async def work() -> Answer:
            return Answer(proto=bytes(400))

        promise = futures.submit(1, "call", work)
        await futures.wait(promise.request_id, 60)
        promise.fetched = futures.now()
        clock.now = 100.0
        futures.submit(2, "call", work)
        assert promise.answer is DROPPED and futures.kept_bytes[""] == 0

    run(main())
