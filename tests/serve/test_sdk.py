"""The official, unmodified Tinker SDK works with the server of controllers/serve. The server's actors are fakes.

The SDK uses its own event loop, retries and queues, and sends its requests to a real port.
"""

import asyncio
import os
import threading
from functools import partial

import numpy as np
import pytest
import uvicorn
from serving import Api

tinker = pytest.importorskip("tinker")
os.environ.setdefault("TINKER_TELEMETRY", "0")


class Background:
    """A server with fake actors, running in a thread. The SDK reaches the server at `url`."""

    def __init__(self, folder, **fields: object) -> None:
        self.ready = threading.Event()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=partial(asyncio.run, self._serve(folder, fields)))
        self.thread.start()
        assert self.ready.wait(60)

    async def _serve(self, folder, fields) -> None:
        async with Api(folder, hold_seconds=20.0, **fields) as self.api:
            self.faults: list[int] = []  # statuses that replace the answers of the next training requests
            config = uvicorn.Config(self._with_faults, port=0, log_level="error", lifespan="off", interface="asgi3")
            self.http = uvicorn.Server(config)
            self.http.capture_signals = _nothing
            serving = asyncio.create_task(self.http.serve())
            while not self.http.started:
                await asyncio.sleep(0.01)
            port = self.http.servers[0].sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{port}"
            self.ready.set()
            await asyncio.to_thread(self.stop.wait)
            self.http.should_exit = self.http.force_exit = True
            await serving

    async def _with_faults(self, scope, receive, send) -> None:
        """Serve the request. While `faults` has statuses, the next of them replaces the answer to a training request.

        The server still executes the training request.
        """
        is_training = scope["path"].endswith(("/forward_backward", "/optim_step"))
        if not (is_training and self.faults):
            await self.api.app(scope, receive, send)
            return
        status = self.faults.pop(0)

        async def swallow(message) -> None: ...

        await self.api.app(scope, receive, swallow)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def close(self) -> None:
        self.stop.set()
        self.thread.join(60)


class _nothing:  # noqa: N801  (replaces uvicorn's method capture_signals, which returns a context manager)
    def __enter__(self): ...

    def __exit__(self, *_): ...


@pytest.fixture
def background(tmp_path):
    made = Background(tmp_path)
    yield made
    made.close()


@pytest.fixture
def service(background):
    client = tinker.ServiceClient(base_url=background.url, api_key="tml-test")
    yield client
    client.close("success")


def datum(tokens=(1, 2, 3), targets=(2, 3, 4), **inputs):
    named = {"target_tokens": list(targets)} | {name: list(values) for name, values in inputs.items()}
    return tinker.types.Datum(model_input=tinker.types.ModelInput.from_ints(list(tokens)), loss_fn_inputs=named)


ADAM = tinker.types.AdamParams(learning_rate=0.1)


def test_forty_pairs_of_calls_sent_without_waiting_run_in_order(service, background):
    client = service.create_lora_training_client("letters", rank=0).result()
    futures = []
    for _ in range(40):
        futures += [client.forward_backward([datum()], "cross_entropy"), client.optim_step(ADAM)]
    answers = [future.result() for future in futures]
    losses = [answer.metrics["loss:sum"] for answer in answers[::2]]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    assert background.api.trainers[0].calls == 40 * ["forward_backward", "optim_step"]


def test_a_call_of_2500_datums_is_sent_in_chunks_whose_gradients_add_up(service, background):
    client = service.create_lora_training_client("letters", rank=0).result()
    output = client.forward_backward([datum()] * 2500, "cross_entropy").result()
    assert len(output.loss_fn_outputs) == 2500
    assert output.metrics["loss:sum"] == pytest.approx(2500 * 3 * np.log(16), rel=1e-5)
    trainer = background.api.trainers[0]
    assert trainer.calls == 3 * ["forward_backward"]
    gradient = trainer.numbers.grad.clone()
    other = service.create_lora_training_client("letters", rank=0).result()
    other.forward_backward([datum()] * 1000, "cross_entropy").result()
    assert gradient == pytest.approx(2.5 * background.api.trainers[1].numbers.grad.numpy(), rel=1e-4)


def test_a_request_that_is_repeated_after_a_lost_answer_is_executed_only_once(service, background):
    client = service.create_lora_training_client("letters", rank=0).result()
    background.faults += [503, 500, 503]
    first = client.forward_backward([datum()], "cross_entropy")
    second = client.optim_step(ADAM)
    first.result(), second.result()
    assert background.faults == []
    assert background.api.trainers[0].calls == ["forward_backward", "optim_step"]


def test_an_unknown_loss_fails_only_its_own_call(service):
    client = service.create_lora_training_client("letters", rank=0).result()
    with pytest.raises(tinker.RequestFailedError, match="unknown loss 'entropy'"):
        client.forward_backward([datum()], "entropy").result()
    client.forward_backward([datum()], "cross_entropy").result()
    client.optim_step(ADAM).result()


def test_a_custom_cross_entropy_has_the_loss_and_gradient_of_the_built_in_one(service, background):
    clients = [service.create_lora_training_client("letters", rank=0).result() for _ in range(2)]
    data = [datum(weights=[0.0, 1.0, 0.5]), datum(targets=(5, 6, 7), weights=[1.0, 1.0, 1.0])]

    def cross_entropy(data, logprobs):
        rows = zip(data, logprobs, strict=True)
        return -sum((row * each.loss_fn_inputs["weights"].to_torch()).sum() for each, row in rows), {"mine": 1.0}

    ours = clients[0].forward_backward_custom(data, cross_entropy).result()
    theirs = clients[1].forward_backward(data, "cross_entropy").result()
    assert ours.metrics["loss:sum"] == pytest.approx(theirs.metrics["loss:sum"]) and ours.metrics["mine"] == 1.0
    one, other = (trainer.numbers.grad for trainer in background.api.trainers)
    assert one == pytest.approx(other.numpy(), abs=1e-6)


def test_saved_states_and_sampler_weights_are_found_by_their_paths(service, background):
    client = service.create_lora_training_client("letters", rank=4, seed=9, train_unembed=False).result()
    [trainer] = background.api.trainers
    assert list(trainer.seeds.values()) == [9] and not trainer.config.lora.train_unembed
    client.forward_backward([datum()], "cross_entropy").result()
    client.optim_step(ADAM).result()
    path = client.save_state("a").result().path
    again = service.create_training_client_from_state_with_optimizer(path).result()
    assert again.get_info().lora_rank == 4
    for each in (client, again):
        each.forward_backward([datum()], "cross_entropy").result()
        each.optim_step(ADAM).result()
    assert background.api.trainers == [trainer]
    one, other = trainer.tenants.values()
    assert one.numbers.detach().equal(other.numbers.detach())

    weights = client.save_weights_for_sampler("w").result().path
    sampler = service.create_sampling_client(model_path=weights).result()
    assert sampler.get_base_model() == "letters"
    prompt = tinker.types.ModelInput.from_ints([1, 2])
    params = tinker.types.SamplingParams(max_tokens=4, seed=3)
    response = sampler.sample(prompt, 2, params).result()
    assert len({sequence.sequence_id for sequence in response.sequences}) == 2
    scores = sampler.compute_logprobs(prompt).result()
    assert scores[0] is None and scores[1] < 0
    rest = tinker.RestClient(base_url=background.url, api_key="tml-test")
    names = {each.checkpoint_id for each in rest.list_checkpoints(client.get_info().model_id).result().checkpoints}
    assert names == {"weights/a", "sampler_weights/w"}
    rest.delete_checkpoint_from_tinker_path(weights).result()
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4
    assert len(rest.list_training_runs().result().training_runs) == 2


def test_300_sample_requests_at_once_are_answered_in_fewer_generator_calls(service, background):
    sampler = service.create_sampling_client(base_model="letters").result()
    params = tinker.types.SamplingParams(max_tokens=3)
    futures = [sampler.sample(tinker.types.ModelInput.from_ints([1, seq % 16]), 1, params) for seq in range(300)]
    assert all(len(future.result().sequences) == 1 for future in futures)
    assert len(background.api.generator.calls) < 300
