"""Tests that each process of a Tinker server uses at most 5% more memory after 10,000 requests of several kinds than after 5,000."""

import random
from pathlib import Path

import pytest
from program import Process

tinker = pytest.importorskip("tinker")
types = tinker.types
pytestmark = pytest.mark.slow

NUM_REQUESTS = 10_000
NUM_AT_ONCE = 100
MOST_GROWTH = 1.05
ADAM = types.AdamParams(learning_rate=1e-4)


def resident_bytes(root: int) -> dict[str, int]:
    """LoadedRun bytes of a process and of all its descendants. The keys are "pid name"."""
    parents, names, sizes = {}, {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            sizes[int(folder.name)] = int((folder / "statm").read_text().split()[1]) * 4096
        except OSError:  # the process has ended in the meantime
            continue
        names[int(folder.name)], parents[int(folder.name)] = name, int(rest.split()[1])
    found = {}
    for pid in sizes:
        above = pid
        while above not in (root, 0, 1):
            above = parents.get(above, 0)
        if above == root:
            found[f"{pid} {names[pid]}"] = sizes[pid]
    return found


class Mixture:
    """Sends requests of several kinds, in waves of about NUM_AT_ONCE requests that run at the same time."""

    def __init__(self, url: str) -> None:
        self.draw = random.Random(0)
        self.service = tinker.ServiceClient(base_url=url, api_key="tml-test")
        self.rest = tinker.RestClient(base_url=url, api_key="tml-test")
        self.client = self.service.create_lora_training_client("tiny_chat", rank=4, seed=0).result()
        self.sampler = self.service.create_sampling_client(base_model="tiny_chat").result()

    def fill_cache(self) -> None:
        """Send prompts that use every block of the generator's KV cache.

        A page of memory counts as resident only after its first use. So every page of the cache must have been used
        before the memory is measured for the first time.

        The cache has 256 MiB, which is enough for 65,536 tokens. All prompts together have 72,000 tokens. The tokens are
        random, because prompts with a common beginning would share blocks.
        """
        params = types.SamplingParams(max_tokens=1)
        prompts = [[self.draw.randrange(256) for _ in range(2000)] for _ in range(36)]
        for future in [self.sampler.sample(types.ModelInput.from_ints(each), 1, params) for each in prompts]:
            future.result(600)

    def wave(self) -> int:
        """Send the requests of a wave, wait for their answers, and return the number of requests.

        After one wave in five, save the weights for a new sampler.
        """
        futures = []
        while len(futures) < NUM_AT_ONCE:
            futures += self.some()
        for future in futures:
            future.result(600)
        if self.draw.random() < 0.2:
            self.sampler = self.client.save_weights_and_get_sampling_client().result()
            return len(futures) + 1
        return len(futures)

    def some(self) -> list:
        """Send one random request, or the two requests of a training step. Returns their futures."""
        tokens = [self.draw.randrange(256) for _ in range(self.draw.randint(5, 40))]
        text = types.ModelInput.from_ints(tokens[:-1])
        kind = self.draw.random()
        if kind < 0.5:
            params = types.SamplingParams(max_tokens=self.draw.randint(1, 8))
            return [self.sampler.sample(text, self.draw.choice((1, 1, 4)), params)]
        if kind < 0.65:
            return [self.sampler.compute_logprobs(text)]
        if kind < 0.75:
            return [self.rest.list_training_runs()]
        data = [types.Datum(model_input=text, loss_fn_inputs={"target_tokens": tokens[1:]})]
        if kind < 0.8:
            return [self.client.forward(data, "cross_entropy")]
        return [self.client.forward_backward(data, "cross_entropy"), self.client.optim_step(ADAM)]


def test_memory_does_not_grow_with_the_number_of_requests(tmp_path):
    server = Process(tmp_path / "state")
    mixture = Mixture(server.url)
    mixture.fill_cache()
    readings = []
    num_sent = 0
    for goal in (NUM_REQUESTS // 2, NUM_REQUESTS):
        while num_sent < goal:
            num_sent += mixture.wave()
        readings.append(resident_bytes(server.process.pid))
    first, second = readings
    print(f"\n{'process':<28} MiB after {NUM_REQUESTS // 2:,}  after {NUM_REQUESTS:,}")
    for name, size in second.items():
        print(f"{name:<28} {first.get(name, 0) >> 20:>15,} {size >> 20:>13,}")
    assert server.end() == 0
    assert first.keys() == second.keys()
    grown = {name: second[name] / first[name] for name in first if second[name] > MOST_GROWTH * first[name]}
    assert not grown
