"""`Call` without actors: a future of concurrent.futures takes the place of the running call."""

import asyncio
import gc
import threading
import warnings
from concurrent.futures import CancelledError, Future

import pytest

import rl_actors
from rl_actors.clients.call import Call, in_background


@pytest.mark.parametrize("name", [name for name in rl_actors.__all__ if name.endswith("Client")])
def test_a_client_has_one_line_of_base_classes(name):
    classes = getattr(rl_actors, name).__mro__
    assert [len(each.__bases__) for each in classes] == [1] * (len(classes) - 1) + [0]


async def wait_for_answer(call: Call[int]) -> int:
    return await call


@pytest.mark.parametrize("wait", [wait_for_answer, Call.unasked_failure])
def test_asyncio_logs_no_error_of_a_call_whose_waiter_was_cancelled(wait):
    logged: list[str] = []

    async def cancel_a_waiter_of_a_call_that_fails_later() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: logged.append(context["message"]))
        running: Future[int] = Future()
        call = Call(running, "work")
        waiter = asyncio.ensure_future(wait(call))
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.wait([waiter])
        running.set_exception(ValueError("it failed later"))
        for _ in range(3):  # passes of the event loop, in which the error reaches asyncio's future
            await asyncio.sleep(0)
        with pytest.raises(ValueError, match="it failed later"):
            call.result()

    asyncio.run(cancel_a_waiter_of_a_call_that_fails_later())
    gc.collect()  # asyncio logs an error when it collects a future whose error was never retrieved
    assert logged == []


class EndsJustAfterTheWait(Future):
    """A future that gets its answer after the timeout of `result` has passed, just before `result` raises TimeoutError."""

    def result(self, timeout=None):
        if timeout is None:
            return super().result()
        self.set_result(7)
        raise TimeoutError


def test_an_answer_that_comes_just_after_the_timeout_is_returned():
    assert Call(EndsJustAfterTheWait(), "work").result(1.0) == 7


def test_a_call_that_fails_with_its_own_timeout_error_raises_this_error():
    ended: Future[int] = Future()
    ended.set_exception(TimeoutError("rank 1 did not answer"))
    with pytest.raises(TimeoutError, match="rank 1 did not answer"):
        Call(ended, "work").result(1.0)


class Interrupted(Future):
    def result(self, timeout=None):
        raise KeyboardInterrupt


@pytest.mark.parametrize("can_cancel", [True, False])
def test_ctrl_c_cancels_a_call_that_can_be_cancelled_and_no_other(can_cancel):
    running = Interrupted()
    call = Call(running, "work", can_cancel=can_cancel)
    with pytest.raises(KeyboardInterrupt):
        call.result()
    assert running.cancelled() == can_cancel
    assert repr(call) == f"<Call work: {'cancelled' if can_cancel else 'running'}>"


def test_cancel_ends_the_work_in_the_background_and_answers_whether_it_did():
    began, ended = threading.Event(), threading.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    call = in_background(work(), "work", can_cancel=True)
    assert began.wait(10) and call.cancel() and ended.wait(10)
    with pytest.raises(CancelledError):
        call.result()
    assert call.failed() and not call.may_fail_unasked()
    done: Future[int] = Future()
    done.set_result(3)
    assert not Call(done, "work", can_cancel=True).cancel()


def test_an_unread_call_is_silent_at_the_end_of_the_program():
    failed: Future[int] = Future()
    failed.set_exception(ValueError("late"))
    call = Call(failed, "work")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call.__del__(is_finalizing=lambda: True)
    with pytest.warns(RuntimeWarning, match="work failed and nobody asked"):
        call.__del__(is_finalizing=lambda: False)
    with pytest.raises(ValueError, match="late"):
        call.result()  # asked for, so that its collection shows no second warning
