"""Tests of the data that the Tinker server's status page shows."""

from controllers.tinker_server import status
from controllers.tinker_server.server import POINTS


def test_every_measurement_but_the_first_adds_a_point_to_each_rate_and_only_the_newest_points_are_kept(api):
    async def use(api):
        for second in range(POINTS + 2):
            api.server.num_sampled_tokens = 10 * second * second
            api.server.measure(2.0 * second)
        curve = api.server.rates["sampled"]
        # Every round of the loop but the first adds the point 5 * (2 * second - 1). The first point, 5, was dropped.
        assert len(curve) == POINTS and curve[0] == 5.0 * 3 and curve[-1] == 5.0 * (2 * POINTS + 1)

    api(use)


def test_the_page_shows_the_base_model_and_hides_what_belongs_to_other_owners(api):
    async def use(api):
        model = await api.create_model()
        promise = await api.post("save_weights_for_sampler", model_id=model, path="seven", seq_id=1)
        await api.answer(promise)
        api.trainers[0].gate.clear()  # forward_backward now waits, so its request stays in the queue
        waiting = await api.send_forward_backward(model, 2, [([1, 2], {"target_tokens": [2, 3]})])
        # "anyone" is the owner of all requests without an API key.
        own, other = status.page_data(api.server, "anyone"), status.page_data(api.server, "bob")
        api.trainers[0].gate.set()
        await api.output(waiting)

        assert [(each["call"], each["waiting"]) for each in own["queue"]] == [("forward_backward", 1)]
        assert [each["weights"] for each in own["versions"]] == [
            f"tinker://{model}/sampler_weights/seven",
            "the base model",
        ]
        assert [run["id"] for run in own["runs"]] == [model]
        assert (other["queue"], other["runs"]) == ([], [])
        assert [each["weights"] for each in other["versions"]] == ["the base model"]
        assert status.page_data(api.server, "anyone")["queue"] == []

    api(use)


def test_a_loss_that_is_not_finite_is_null_on_the_page(api):
    async def use(api):
        model = await api.create_model()
        api.server.curves[model].losses.extend([1.0, float("-inf"), float("nan")])
        reply = await api.http.get("http://localhost/status.json")
        assert reply.status_code == 200
        [run] = [run for run in reply.json()["runs"] if run["id"] == model]
        assert [1.0, None, None] in run.values()

    api(use)


def test_a_long_id_of_a_session_is_refused_and_not_repeated(api):
    async def use(api):
        body = {"sampling_session_id": "s" * 100_000, "seq_id": 1, "num_samples": 1024, "prompt": {"chunks": []}}
        body["sampling_params"] = {"max_tokens": 1}
        reply = await api.http.post("/asample", json=body)
        assert reply.status_code == 422 and b"at most 512 characters" in reply.content and len(reply.content) < 1000

    api(use)


def test_the_page_counts_steps_and_losses_that_its_curves_have_dropped(api):
    async def use(api):
        model = await api.create_model()
        curves = api.server.curves[model]
        curves.num_losses = curves.num_steps = POINTS
        curves.losses.extend([0.5] * POINTS)
        await api.forward_backward(model, 1, [([1, 2], {"target_tokens": [2, 3]})])
        await api.optim_step(model, 2)
        [run] = status.page_data(api.server, "anyone")["runs"]
        assert (len(run["losses"]), run["num_losses"], run["num_steps"]) == (POINTS, POINTS + 1, POINTS + 1)

    api(use)


def test_every_number_says_what_it_counts(api):
    async def use(api):
        shown = dict(status.page_data(api.server, "anyone")["numbers"])
        assert shown["version of the whole weights in the generator; -1: none"] == -1
        assert "_" not in "".join(shown)
        text = (await api.http.get("http://localhost/metrics")).text
        assert "# HELP rl_actors_serve_optim_steps_total optimizer steps since the start\n" in text

    api(use)
