"""Request bodies that no client would send. The server answers them without a server error, and training goes on."""

import random

import numpy as np
from serving import forward_backward_body

TEXT = [([1, 2, 3], {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]})]
ODD = [None, True, -1, 0, 1 << 70, 1.5, float(10**308), "", "x", "tinker://a/b/c", [], [[]], {}, {"rank": -1}]


def mutated(body: bytes, draw: random.Random) -> bytes:
    """The body with some bytes replaced, removed or repeated. Most such bodies cannot be read."""
    changed = bytearray(body)
    for _ in range(draw.randint(1, 6)):
        place = draw.randrange(len(changed))
        match draw.randrange(3):
            case 0:
                changed[place] = draw.randrange(256)
            case 1:
                del changed[place : place + draw.randint(1, 5)]
            case _:
                changed[place:place] = changed[place : place + draw.randint(1, 9)]
    return bytes(changed)


def with_another_value(body: bytes, model: str, draw: random.Random) -> bytes:
    """The body with one byte replaced, somewhere after the model's name. Most such bodies can be read, and reach the trainer."""
    changed = bytearray(body)
    behind_the_name = body.index(model.encode()) + len(model)
    changed[draw.randrange(behind_the_name, len(changed))] = draw.randrange(256)
    return bytes(changed)


def test_changed_protobuf_bodies_cause_no_server_error_and_training_goes_on(api):
    async def use(api):
        model, draw = await api.create_model(), random.Random(0)
        seen = set()
        for seq in range(1, 121):
            loss = draw.choice(["cross_entropy", "ppo", "gspo"])
            columns = {name: np.ones(3) for name in ("logprobs", "advantages", "sequence_ratio_mask")}
            data = TEXT if loss == "cross_entropy" else [([1, 2, 3], {"target_tokens": [2, 3, 4], **columns})]
            body = forward_backward_body(model, seq, data, loss)
            body = mutated(body, draw) if seq % 2 else with_another_value(body, model, draw)
            response = await api.http.post("/forward_backward", content=body)
            seen.add(response.status_code)
            assert response.status_code in (200, 400), response.text
            if response.status_code == 200:
                answer = await api.fetch(response.json())
                is_error = answer.headers["content-type"] == "application/json"  # results are protobuf
                assert not is_error or answer.json()["category"] == "user", answer.text
        assert seen == {200, 400}
        # The changed bodies have left gradients, which may be infinite or NaN. This step clears them.
        await api.optim_step(model, 999)
        await api.forward_backward(model, 1000, TEXT)
        answer = await api.optim_step(model, 1001)
        assert "metrics" in answer, answer

    api(use)


def test_an_odd_value_in_any_field_of_a_json_body_causes_no_server_error(api):
    async def use(api):
        schema = api.app.openapi()
        model = await api.create_model()
        sampler = await api.sampler(base_model="letters")
        known = {"model_id": model, "session_id": api.session, "sampling_session_id": sampler, "base_model": "letters"}
        num_sent = 0
        for path, methods in schema["paths"].items():
            for method, route in methods.items():
                content = route.get("requestBody", {}).get("content", {}).get("application/json")
                if content is None:
                    continue
                fields = schema["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]["properties"]
                valid = {name: known[name] for name in fields if name in known}
                for name in fields:
                    for value in ODD:
                        url = f"http://localhost{path}".replace("{session_id}", api.session).replace("{run_id}", model)
                        response = await api.http.request(method, url, json=valid | {name: value})
                        num_sent += 1
                        assert response.status_code < 500, (path, name, value, response.text)
                        promise = response.json() if response.content else {}
                        if "request_id" in promise:
                            answer = await api.fetch(promise)
                            is_json = answer.headers["content-type"] == "application/json"
                            assert not is_json or answer.json().get("category") != "server", (path, name, value)
        assert num_sent > 400

    api(use)
