"""Seconds that a scheduler of vLLM's engine core takes for a token: ours beside vLLM's own, without a model.

`python -m tests.drills.scheduler`; --requests of a step, --rounds of which the medians are printed.
"""

import argparse
import statistics
import tempfile

from rl_actors import ModelConfig
from tests.test_scheduler import Simulation

NEW_TOKENS = 128


def microseconds(directory: str, num_requests: int, *, grouping: bool) -> float:
    """Of a request in a step. Every request has the prompt of three others."""
    simulation = Simulation(directory, 16 * num_requests, grouping=grouping, max_num_seqs=num_requests)
    for index in range(num_requests):
        simulation.add(str(index), NEW_TOKENS)
    simulation.run()
    assert all(len(received.tokens) == NEW_TOKENS for received in simulation.received.values())
    return simulation.seconds / num_requests / NEW_TOKENS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        ModelConfig().save(directory)
        for num_requests in args.requests:
            times: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(args.rounds):
                for grouping, measured in times.items():
                    measured.append(microseconds(directory, num_requests, grouping=grouping))
            ours = statistics.median(times[True])
            vllms = statistics.median(times[False])
            print(
                f"{num_requests} requests: {ours:.1f} us a token, vLLM's own scheduler {vllms:.1f}, ratio {vllms / ours:.2f}"
            )


if __name__ == "__main__":
    main()
