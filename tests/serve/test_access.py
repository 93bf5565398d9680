"""Tests of the Tinker server: keys, rate limits, access log, arguments of its command, metrics, and signed URLs of
exported weights.
"""

import asyncio
import io
import json
import socket

import httpx
import pytest
from serving import Api

from controllers.tinker_server.access import WORK, Access, hash_of, read_keys
from controllers.tinker_server.command import greet, listen, read_address, read_arguments


def test_each_key_sees_only_its_own_runs(tmp_path):
    owners = {hash_of("tml-alice"): "alice", hash_of("tml-bob"): "bob"}

    async def main():
        async with Api(tmp_path) as api:
            app = Access(api.app, owners=owners)

            def client(key: str) -> httpx.AsyncClient:
                base = "http://localhost/api/v1"
                return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=base, headers={"X-API-Key": key})

            sessions = {}
            for name in ("alice", "bob"):
                api.http = client(f"tml-{name}")
                await api.__aenter__()
                sessions[name] = api.session
                if name == "alice":
                    alices = await api.create_model()
                    promise = await api.post("optim_step", model_id=alices, seq_id=1, adam_params={})
            assert (await api.http.get(f"/training_runs/{alices}")).status_code == 404
            assert (await api.http.post("/get_info", json={"model_id": alices})).status_code == 404
            assert (await api.http.post("/retrieve_future", json=promise)).status_code in (410, 422)
            assert (await api.fetch({"request_id": promise["request_id"]})).status_code == 410
            assert (await api.http.get("/training_runs")).json()["training_runs"] == []
            assert (await api.http.get(f"/sessions/{sessions['alice']}")).status_code == 404
            for wrong in ("tml-eve", ""):
                response = await client(wrong).get("/get_server_capabilities")
                assert response.status_code == 401
            assert (await client("").get("/healthz")).status_code == 200

    asyncio.run(main())


def test_a_call_above_the_rate_limit_gets_a_429_and_a_heartbeat_does_not(tmp_path):
    async def main():
        async with Api(tmp_path) as api:
            log = io.StringIO()
            app = Access(api.app, owners=None, rate=0.5, burst=2, log=log)
            api.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost/api/v1")
            codes = []
            for _ in range(4):
                codes.append(
                    (await api.http.post("/optim_step", json={"model_id": "x", "adam_params": {}})).status_code
                )
            assert codes == [200, 200, 429, 429]
            response = await api.http.post("/optim_step", json={"model_id": "x", "adam_params": {}})
            assert 1 <= int(response.headers["retry-after"]) <= 2
            await api.post("session_heartbeat", session_id=api.session)
            lines = [json.loads(line) for line in log.getvalue().splitlines()]
            assert [line["status"] for line in lines] == [*codes, 429, 200]
            assert lines[0]["path"] == "/api/v1/optim_step" and lines[0]["owner"] == "anyone"

    asyncio.run(main())


def test_the_rate_limit_applies_to_every_request_that_computes_or_that_writes_weights(tmp_path):
    async def main():
        async with Api(tmp_path) as api:
            paths = [path for path, methods in api.app.openapi()["paths"].items() if "post" in methods]
            cheap = {
                *("config", "dynamic_config", "create_session", "session_heartbeat", "finish", "telemetry"),
                *("get_info", "create_sampling_session", "retrieve_future", "publish", "weights_info"),
            }
            assert {path.rpartition("/")[2] for path in paths} - cheap == WORK

    asyncio.run(main())


def test_read_keys_gives_the_owner_of_each_hash_and_refuses_a_wrong_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"# people\nalice {hash_of('tml-a')}\n\nalice {hash_of('tml-b')}\n")
    assert read_keys(file) == {hash_of("tml-a"): "alice", hash_of("tml-b"): "alice"}
    for text, error in [
        ("alice tml-secret\n", "line 1"),
        ("", "has no key"),
        (f"a {hash_of('x')}\nb {hash_of('x')}", "line 2"),
    ]:
        file.write_text(text)
        with pytest.raises(ValueError, match=error):
            read_keys(file)


@pytest.mark.parametrize("address", ["0.0.0.0:8000", "10.0.0.1:80", "example.org:1", "[::]:80"])
def test_without_keys_only_loopback_addresses_are_served(address, capsys):
    with pytest.raises(ValueError, match="give --keys"):
        read_address(address, has_keys=False)
    read_address(address, has_keys=True)
    assert "unencrypted" in capsys.readouterr().err


def test_the_command_parses_its_arguments_and_refuses_wrong_ones(tmp_path):
    assert read_address("[::1]:80", has_keys=False) == ("::1", 80)
    found = read_arguments("serve", ["--serve-as", "Qwen/Qwen3-8B=/models/x", "--state", str(tmp_path), "--rate", "5"])
    assert (found.config.name, found.config.hf_path, found.rate) == ("Qwen/Qwen3-8B", "/models/x", 5.0)
    assert found.address == ("127.0.0.1", 8000) and found.owners is None
    for wrong in (["--address", "8000"], ["--address", "127.0.0.1:99999"], ["--rate", "0"], ["--keys", "/none"]):
        with pytest.raises((ValueError, OSError)):
            read_arguments("serve", wrong)


def test_a_connection_to_the_server_sends_small_answers_at_once():
    async def accepted() -> int:
        found = asyncio.get_running_loop().create_future()

        def accept(_, writer: asyncio.StreamWriter) -> None:
            found.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = listen(("127.0.0.1", 0))
        async with await asyncio.start_server(accept, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            writer.close()
            return await found

    assert asyncio.run(accepted()) != 0


def test_the_server_reports_its_metrics_and_the_status_of_its_runs(api):
    async def use(api):
        model = await api.create_model()
        await api.forward_backward(model, 1, [([1, 2], {"target_tokens": [2, 3]})])
        await api.optim_step(model, 2)
        await api.sample(await api.sampler(base_model="letters"), 1, params={"max_tokens": 3, "stop": []})
        outer = httpx.AsyncClient(transport=httpx.ASGITransport(api.app), base_url="http://localhost")
        text = (await outer.get("/metrics")).text
        assert "rl_actors_serve_sampled_tokens_total 3.0\n" in text
        assert "rl_actors_serve_trained_positions_total 2.0\n" in text and "serve_requests_waiting 0.0\n" in text
        shown = (await outer.get("/status.json")).json()
        [run] = shown["runs"]
        assert (run["id"], len(run["losses"]), len(run["grad_norms"]), run["num_steps"]) == (model, 1, 1, 1)
        page = await outer.get("/")
        assert page.headers["content-type"].startswith("text/html") and "https://" not in page.text
        assert (await outer.get("/healthz")).json() == {"status": "ok"}

    api(use)


def test_a_signed_url_fetches_exported_weights_without_a_key(api):
    async def use(api):
        model = await api.create_model()
        promise = await api.post("save_weights_external", model_id=model, path="out", seq_id=1)
        assert (await api.answer(promise))["path"] == f"tinker://{model}/external_weights/out"
        encrypted = await api.post(
            "save_weights_external", model_id=model, path="x", seq_id=2, age_encryption_recipients=["age1"]
        )
        assert "age_encryption_recipients is not supported" in await api.error(encrypted)
        at = f"/training_runs/{model}/checkpoints/external_weights/out/external_weights_urls"
        found = (await api.http.get(at)).json()
        [(name, url)] = found["urls"].items()
        app = Access(api.app, owners={hash_of("tml-a"): "a"})
        plain = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        fetched = await plain.get(url)
        assert name == "numbers.pt" and fetched.status_code == 200 and len(fetched.content) > 100
        later = url.replace("/download/", "/download/9")
        expires, signature = url.partition("/download/")[2].split("/")[:2]
        of_another = url.replace(f"{expires}/{signature}", f"{expires}/%C3%A9")
        for wrong in (later, of_another, url.replace("numbers.pt", "state.pt"), url + "x"):
            assert (await plain.get(wrong)).status_code == 404
        await api.http.delete(f"/training_runs/{model}/checkpoints/external_weights/out")
        assert (await plain.get(url)).status_code == 404

    api(use)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "127.0.0.1:8000"}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "LOCALHOST:1"}, 200),
        ({"Host": "evil.example"}, 403),  # a page whose name was changed to 127.0.0.1
        ({"Host": "127.0.0.1.evil.example:8000"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": "10.0.0.1"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "http://127.0.0.1:8000"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_a_server_without_keys_answers_only_its_own_machine(tmp_path, headers, status):
    async def main(owners, expected):
        async with Api(tmp_path) as api:
            app = Access(api.app, owners=owners)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                for path in ("/healthz", "/", "/api/v1/get_server_capabilities"):
                    response = await client.get(path, headers=headers | {"X-API-Key": "tml-alice"})
                    assert response.status_code == expected, (path, response.text)

    asyncio.run(main(None, status))
    asyncio.run(main({hash_of("tml-alice"): "alice"}, 200))


@pytest.mark.parametrize("route", ["create_session", "telemetry", "forward_backward", "optim_step"])
def test_a_server_without_keys_refuses_bodies_of_a_type_that_any_page_may_send(tmp_path, route):
    async def main():
        async with Api(tmp_path) as api:
            app = Access(api.app, owners=None)
            base = "http://localhost/api/v1"
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=base) as client:
                for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
                    response = await client.post(f"/{route}", content=b"{}", headers={"Content-Type": kind})
                    assert response.status_code == 415 and "application/json" in response.text
                for kind in ("application/json", "application/x-protobuf", "application/json; charset=utf-8"):
                    response = await client.post(f"/{route}", content=b"{}", headers={"Content-Type": kind})
                    assert response.status_code != 415

    asyncio.run(main())


def test_the_server_says_at_its_start_that_its_root_is_a_page(capsys):
    greet(("127.0.0.1", 8000), "tml-any")
    out, err = capsys.readouterr()
    assert err == "the page of this server: http://127.0.0.1:8000/\n"
    assert out == "export TINKER_BASE_URL=http://127.0.0.1:8000\nexport TINKER_API_KEY=tml-any\n"
    greet(("::1", 80), "k")
    assert capsys.readouterr().err == "the page of this server: http://[::1]:80/\n"
