"""Sends random requests to the Tinker server, behind which real actors run.

schemathesis makes most requests from the server's own OpenAPI document. The other requests have protobuf
bodies in which some bytes were changed at random. No request may cause a server error, and afterwards the actors must
still train and sample. The tests need the packages schemathesis and tinker, which `.venv-cookbook` has.
"""

import random

import httpx
import pytest
from program import Process
from serving import forward_backward_body
from test_fuzz import TEXT, mutated, with_another_value

schemathesis = pytest.importorskip("schemathesis")
tinker = pytest.importorskip("tinker")
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402  (imported only if schemathesis is installed)

types = tinker.types
pytestmark = pytest.mark.slow
EXAMPLES = 40  # largest number of generated requests to each route


class Target:
    """A server with a session, a training run and a sampler.

    The ids of these three, and the path of saved weights, replace some of the random values in generated requests.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        service = tinker.ServiceClient(base_url=url, api_key="tml-test")
        client = service.create_lora_training_client("tiny_chat", rank=4, seed=0).result()
        service.create_sampling_client(base_model="tiny_chat").result()
        self.model_id = client.get_info().model_id
        session_id = self.model_id.partition(":")[0]
        path = client.save_state("fuzz").result().path
        self.known = {
            "session_id": session_id,
            "model_id": self.model_id,
            "run_id": self.model_id,
            "sampling_session_id": f"{session_id}:sample:0",
            "sampler_id": f"{session_id}:sample:0",
            "tinker_path": path,
            "model_path": path,
            "source_path": path,
        }

    def with_known_names(self, values: object, draw: random.Random) -> object:
        """The fields of a body or of a path, with two changes.

        About half of the ids and weights' paths are replaced by ones that exist. num_samples and max_tokens are made
        small, because large numbers would cause long work.
        """
        if not isinstance(values, dict):
            return values
        changed = dict(values)
        for name in changed.keys() & self.known.keys():
            if draw.random() < 0.5:
                changed[name] = self.known[name]
        if isinstance(changed.get("num_samples"), int):
            changed["num_samples"] = min(changed["num_samples"], 4)
        if isinstance(changed.get("sampling_params"), dict):
            changed["sampling_params"] = changed["sampling_params"] | {"max_tokens": 4}
        return changed

    def require_alive(self) -> None:
        """Train and sample once, in a new session.

        The session is new because a server answers a repeated sequence number of a session with the earlier answer. The
        generated requests have used other sessions.
        """
        service = tinker.ServiceClient(base_url=self.url, api_key="tml-test")
        inputs = {"target_tokens": [2, 3, 4]}
        datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)
        client = service.create_lora_training_client("tiny_chat", rank=4, seed=0).result()
        client.forward_backward([datum], "cross_entropy").result(300)
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result(300)
        sampler = client.save_weights_and_get_sampling_client().result(300)
        answer = sampler.sample(types.ModelInput.from_ints([1, 2]), 1, types.SamplingParams(max_tokens=3)).result(300)
        assert answer.sequences[0].tokens


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Process(tmp_path_factory.mktemp("openapi") / "state", "--max-trainers", "3")
    yield made
    assert made.end() == 0


@pytest.fixture(scope="module")
def target(server):
    return Target(server.url)


def require_no_fault(url: str, response: httpx.Response) -> None:
    """Fail if the response is a server error, or if it is a promise (a request_id) whose answer is a server error."""
    assert response.status_code < 500, (str(response.request.url), response.text)
    is_json = response.headers.get("content-type", "").startswith("application/json")
    promise = response.json() if is_json and response.status_code == 200 else {}
    if not isinstance(promise, dict) or "request_id" not in promise:
        return
    for _ in range(20):
        answer = httpx.post(f"{url}/api/v1/retrieve_future", json={"request_id": promise["request_id"]}, timeout=60)
        if answer.status_code != 408:
            break
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("application/json"):
        assert answer.json().get("category") != "server", (str(response.request.url), answer.text)


def test_generated_requests_to_every_route_cause_no_server_error(server, target):
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    draw, num_sent, reached = random.Random(0), 0, set()
    for result in schema.get_all_operations():
        operation = result.ok()

        @seed(0)
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def send(case) -> None:
            nonlocal num_sent
            case.body = target.with_known_names(case.body, draw)
            case.path_parameters = target.with_known_names(case.path_parameters, draw)
            request = case.as_transport_kwargs(base_url=server.url)
            response = httpx.request(**{name: value for name, value in request.items() if name in PARTS}, timeout=120)
            require_no_fault(server.url, response)
            num_sent += 1
            if response.status_code < 400:
                reached.add(case.operation.label)

        send()
    print(f"\n{num_sent} requests; {len(reached)} routes accepted at least one")
    assert num_sent > 500 and len(reached) > 15
    target.require_alive()


PARTS = {"method", "url", "params", "json", "content", "headers", "cookies"}
"""Names of the arguments that `as_transport_kwargs` of schemathesis returns and that httpx.request takes."""


def test_changed_protobuf_bodies_leave_the_actors_alive(server, target):
    draw = random.Random(0)
    url = f"{server.url}/api/v1/forward_backward"
    for seq in range(10_001, 10_201):
        body = forward_backward_body(target.model_id, seq, TEXT, "cross_entropy")
        body = mutated(body, draw) if seq % 2 else with_another_value(body, target.model_id, draw)
        require_no_fault(server.url, httpx.post(url, content=body, timeout=120))
    target.require_alive()
