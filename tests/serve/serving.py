"""A Tinker server whose trainers and generator are fakes in this process. A Tinker server serves programs that use the SDK `tinker`.

Tests send requests in the form of this SDK, without a network.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import numpy as np
from fakes import UnigramGenerator, UnigramTrainer

from controllers.tinker_server import tinker_pb2
from controllers.tinker_server.config import ServeConfig
from controllers.tinker_server.requests import SamplingLimits
from controllers.tinker_server.routes import make_app
from controllers.tinker_server.server import Server
from rl_actors import GeneratorConfig, ModelConfig, TrainerConfig

VOCABULARY = 16
LONGEST = 64  # largest number of tokens in a sequence


class Letters:
    """A tokenizer: id 0 is "a", id 1 is "b", and so on."""

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(97 + token) for token in tokens)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(letter) - 97 for letter in text]


class Api:
    """A server with fake actors, and methods that send it requests in the form of the SDK."""

    def __init__(self, folder: Path, **fields: object) -> None:
        self.folder = folder
        base = folder / "base"
        base.mkdir(exist_ok=True)
        (base / "config.json").write_text(json.dumps({}))
        model = ModelConfig(vocab_size=VOCABULARY)
        fields = {"name": "letters", "hf_path": str(base), "hold_seconds": 0.05} | fields
        self.config = ServeConfig(
            trainer=TrainerConfig(model=model, max_sequence_length=LONGEST),
            generator=GeneratorConfig(model=model, max_model_len=LONGEST, max_adapters=2, max_adapter_rank=8),
            **fields,
        )
        self.trainers: list[UnigramTrainer] = []
        self.generator = UnigramGenerator(folder / "samplers", VOCABULARY)
        self.server = Server(
            self.config,
            folder,
            spawn=self._spawn,
            generator=self.generator,
            sampling=SamplingLimits(
                max_model_len=LONGEST, vocab_size=VOCABULARY, end_token_ids=(0,), tokenizer=Letters()
            ),
        )
        self.store = self.server.store
        self.app = make_app(self.server)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://localhost/api/v1")
        self.num_samplers = 0

    def _spawn(self, config: TrainerConfig) -> UnigramTrainer:
        self.trainers.append(UnigramTrainer(config))
        return self.trainers[-1]

    async def __aenter__(self) -> "Api":
        self.session = (await self.post("create_session", tags=[], sdk_version="0.38.0"))["session_id"]
        return self

    async def __aexit__(self, *_) -> None:
        await self.http.aclose()
        await self.server.close()

    async def post(self, route: str, **body: object) -> dict:
        response = await self.http.post(f"/{route}", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    async def fetch(self, promise: Mapping) -> httpx.Response:
        """Ask for the result of a long request until the server has the result, and return the response.

        promise: the server's first answer to the request. Its request_id identifies the result.
        """
        while True:
            response = await self.http.post("/retrieve_future", json={"request_id": promise["request_id"]})
            if response.status_code != 408:
                return response

    async def answer(self, promise: Mapping) -> dict:
        """The result of a promise, decoded from JSON."""
        response = await self.fetch(promise)
        assert response.status_code == 200, response.text
        return response.json()

    async def error(self, promise: Mapping) -> str:
        """The error of a promise that failed because of the user's input."""
        answer = await self.answer(promise)
        assert answer.get("category") == "user", answer
        return answer["error"]

    async def create_model(self, seq: int = 0, **lora: object) -> str:
        lora_config = {"rank": 0} | lora
        promise = await self.post(
            "create_model", session_id=self.session, model_seq_id=seq, base_model="letters", lora_config=lora_config
        )
        return (await self.answer(promise))["model_id"]

    async def send_forward_backward(
        self, model: str, seq: int, data: list, loss: str = "cross_entropy", **more
    ) -> dict:
        body = forward_backward_body(model, seq, data, loss, **more)
        response = await self.http.post(
            "/forward_backward", content=body, headers={"Content-Type": "application/x-protobuf"}
        )
        assert response.status_code == 200, response.text
        return response.json()

    async def forward_backward(self, model: str, seq: int, data: list, loss: str = "cross_entropy", **more):
        """(logprobs of each datum, metrics)."""
        return await self.output(await self.send_forward_backward(model, seq, data, loss, **more))

    async def output(self, promise: Mapping):
        response = await self.fetch(promise)
        assert response.headers["content-type"] == "application/x-protobuf", response.text
        message = tinker_pb2.ForwardBackwardOutput.FromString(response.content)
        rows = []
        for record in message.loss_fn_outputs:
            tensor = record.fields["logprobs"]
            flat = np.frombuffer(tensor.data, "<f4")
            ends = np.frombuffer(tensor.offsets, "<i8") // 4
            for begin, end in zip(ends[:-1], ends[1:], strict=True):
                is_empty = 0 in tensor.trailing_shape
                rows.append(flat[begin:end].reshape(0 if is_empty else -1, *tensor.trailing_shape))
        return rows, dict(message.metrics)

    async def optim_step(self, model: str, seq: int, **params: float) -> dict:
        params = {"learning_rate": 0.1} | params
        return await self.answer(await self.post("optim_step", model_id=model, seq_id=seq, adam_params=params))

    async def sampler(self, **where: object) -> str:
        """Create a sampling session, and return its id. where: its base_model or its model_path."""
        self.num_samplers += 1
        seq = 1000 + self.num_samplers
        body = await self.post("create_sampling_session", session_id=self.session, sampling_session_seq_id=seq, **where)
        return body["sampling_session_id"]

    async def send_sample(self, sampler: str, seq: int, prompt: Sequence[int] = (1, 2), **more) -> dict:
        params = {"max_tokens": 5} | more.pop("params", {})
        chunks = [{"type": "encoded_text", "tokens": list(prompt)}]
        fields = {
            "sampling_session_id": sampler,
            "seq_id": seq,
            "sampling_params": params,
            "prompt": {"chunks": chunks},
        }
        return await self.post("asample", **fields, **more)

    async def sample(self, sampler: str, seq: int, prompt: Sequence[int] = (1, 2), **more):
        response = await self.fetch(await self.send_sample(sampler, seq, prompt, **more))
        assert response.headers["content-type"] == "application/x-protobuf", response.text
        return tinker_pb2.SampleResponse.FromString(response.content)


def forward_backward_body(model: str, seq: int, data: list, loss: str, *, config=None, forward_only=False) -> bytes:
    """The body of a forward_backward request, in protobuf.

    data: a pair (tokens, inputs) for each datum. inputs: {name of an input of the loss: array}.
    """
    message = tinker_pb2.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn=loss)
    message.forward_only = forward_only
    for name, value in (config or {}).items():
        if isinstance(value, str):
            message.loss_fn_config_v2[name].text = value
        else:
            message.loss_fn_config_v2[name].number = value
    for tokens, inputs in data:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(tokens, "<i4").tobytes()
        for name, values in inputs.items():
            values = np.asarray(values)
            is_integer = np.issubdtype(values.dtype, np.integer)
            tensor = datum.loss_fn_inputs[name]
            tensor.dtype = 2 if is_integer else 1
            tensor.dense = values.astype("<i8" if is_integer else "<f4").tobytes()
            tensor.shape.extend(values.shape)
    return message.SerializeToString()
