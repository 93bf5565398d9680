"""The checks of a caller's arguments. Tables list bad arguments, with texts that each error must contain, such as the name, the value and
the limit.
"""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from waiting import GUARD

from rl_actors.clients.limits import GeneratorLimits
from rl_actors.losses import KL, PPO, CrossEntropy, TruncatedImportanceSampling
from rl_actors.types import OptimParams, Sample, SamplingParams
from rl_actors.validation import (
    validate_optim_params,
    validate_prompts,
    validate_pull,
    validate_samples,
    validate_sampling_params,
    validate_sequences,
)

LIMITS = {"vocab_size": 50, "max_sequence_length": 8, "max_call_bytes": 1000}
CE, ALL_COLUMNS = CrossEntropy(), {"advantages": 1.0, "old_logprobs": -1.0}
nan, inf = math.nan, math.inf


def good(**columns) -> Sample:
    """A sample of 4 positions, whose prompt has 2 tokens."""
    return Sample.from_tokens([1, 2], [3, 4, 5], **columns)


def ids(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def column(name, values, dtype=torch.float32) -> Sample:
    return replace(good(), columns={"loss_weights": torch.ones(4), name: torch.tensor(values, dtype=dtype)})


def positions(count) -> Sample:
    return Sample.from_tokens([1], [2] * count)


def top_k(ids=None, weights=None, *, target_ids=None) -> Sample:
    ids = torch.zeros(4, 2, dtype=torch.int64) if ids is None else ids
    columns = {"target_ids": ids if target_ids is None else target_ids, "target_weights": torch.ones(4, 2)}
    columns["target_weights"] = columns["target_weights"] if weights is None else weights
    return replace(good(), columns={"loss_weights": torch.ones(4), **columns})


def own_loss(logprobs_BL, *, loss_weights, values):
    return (logprobs_BL * values).sum(), {}


EMPTY = Sample(tokens=ids(), targets=ids(), columns={"loss_weights": torch.zeros(0)})
# 1120 bytes: 7 samples of 8 positions. A position has 16 bytes of ids and 4 bytes of loss_weights.
MANY = [positions(8)] * 7

# name of the case -> (samples, loss, type of the error, texts that the message contains in this order). The loss is None for a call of
# forward without a loss.
BAD_SAMPLES = {
    "empty list": ([], CE, ValueError, ["samples is []", "at least 1"]),
    "None instead of a list": (None, CE, ValueError, ["samples is None", "at least 1"]),
    "an iterator": (iter([good()]), CE, ValueError, ["samples is <list_iterator", "give a list"]),
    "one sample without a list": (good(), CE, ValueError, ["samples is Sample(", "give a list"]),
    "a dict instead of a sample": ([good(), {"tokens": [1]}], CE, TypeError, ["sample 1 is a dict", "Sample"]),
    "no positions": ([good(), EMPTY], CE, ValueError, ["sample 1 has 0 positions", "at least 1"]),
    "too many positions": (
        [good(), positions(9)],
        CE,
        ValueError,
        ["sample 1 has 9 positions", "max_sequence_length=8"],
    ),
    "a list of tokens": ([replace(good(), tokens=[1, 2])], CE, TypeError, ["tokens is a list", "[T] int64"]),
    "a list of targets": ([replace(good(), targets=[1, 2])], CE, TypeError, ["targets is a list", "[T] int64"]),
    "a scalar of tokens": ([replace(good(), tokens=torch.tensor(3))], CE, ValueError, ["tokens has shape ()", "[T]"]),
    "a matrix of tokens": ([replace(good(), tokens=ids([1, 2]))], CE, ValueError, ["shape (1, 2)", "[T] int64"]),
    "int32 tokens": ([replace(good(), tokens=ids(1, 2).int())], CE, ValueError, ["dtype torch.int32", "[T] int64"]),
    "float targets": ([replace(good(), targets=ids(1).float())], CE, ValueError, ["targets", "torch.float32", "int64"]),
    "fewer targets than tokens": (
        [replace(good(), targets=ids(2, 3))],
        CE,
        ValueError,
        ["targets has 2 positions", "tokens has 4"],
    ),
    "token equal to vocab_size": (
        [good(), replace(good(), tokens=ids(1, 50, 3, 4))],
        CE,
        ValueError,
        ["sample 1: tokens[1]=50", "0 to 49", "vocab_size=50"],
    ),
    "negative token": ([replace(good(), tokens=ids(1, 2, 3, -1))], CE, ValueError, ["tokens[3]=-1", "0 to 49"]),
    "-100 as a token": ([replace(good(), tokens=ids(-100, 2, 3, 4))], CE, ValueError, ["tokens[0]=-100", "0 to 49"]),
    "target above vocab_size": (
        [replace(good(), targets=ids(1, 2, 3, 99))],
        CE,
        ValueError,
        ["sample 0: targets[3]=99", "0 to 49", "or -100"],
    ),
    "negative target": ([replace(good(), targets=ids(-1, 2, 3, 4))], CE, ValueError, ["targets[0]=-1", "or -100"]),
    "temperature 0": ([replace(good(), temperature=0.0)], CE, ValueError, ["temperature=0.0", "positive"]),
    "negative temperature": ([replace(good(), temperature=-1.0)], CE, ValueError, ["temperature=-1.0", "positive"]),
    "nan temperature": ([replace(good(), temperature=nan)], CE, ValueError, ["temperature=nan", "positive"]),
    "infinite temperature": ([replace(good(), temperature=inf)], CE, ValueError, ["temperature=inf", "finite"]),
    "temperature as text": ([replace(good(), temperature="1")], CE, TypeError, ["temperature='1'", "positive"]),
    "temperature True": (
        [replace(good(), temperature=True)],
        CE,
        TypeError,
        ["temperature=True", "a positive, finite number"],
    ),
    "columns in a list": ([replace(good(), columns=[1.0])], CE, TypeError, ["columns is a list", "names to tensors"]),
    "columns None": ([replace(good(), columns=None)], CE, TypeError, ["columns is a NoneType", "names to tensors"]),
    "a list as column": (
        [replace(good(), columns={"loss_weights": [1.0] * 4})],
        CE,
        TypeError,
        ["column 'loss_weights' is a list", "[T] float32"],
    ),
    "short column": ([column("values", [1, 2, 3])], CE, ValueError, ["'values' has shape (3,)", "[4] float32"]),
    "long column": ([column("values", [1.0] * 5)], CE, ValueError, ["'values' has shape (5,)", "[4] float32"]),
    "scalar column": ([column("values", 1.0)], CE, ValueError, ["'values' has shape ()", "[4] float32"]),
    "matrix column": ([column("values", [[1.0] * 4])], CE, ValueError, ["'values' has shape (1, 4)", "[4] float32"]),
    "float64 column": (
        [column("values", [1.0] * 4, torch.float64)],
        CE,
        ValueError,
        ["dtype torch.float64", "[4] float32"],
    ),
    "missing column": ([good(advantages=1.0)], PPO(), ValueError, ["no column 'old_logprobs'", "PPO reads"]),
    "column missing in one sample": (
        [good(**ALL_COLUMNS), good(advantages=1.0)],
        PPO(),
        ValueError,
        ["sample 1 has no column 'old_logprobs'", "PPO"],
    ),
    "unknown column": (
        [good(advantages=1.0)],
        CE,
        ValueError,
        ["sample 0 has the column 'advantages'", "CrossEntropy reads loss_weights"],
    ),
    "nan in a column": (
        [good(), good(loss_weights=[1.0, nan, 1.0])],
        CE,
        ValueError,
        ["sample 1: column 'loss_weights' holds nan at position 2", "finite"],
    ),
    "inf in a column": (
        [good(**{**ALL_COLUMNS, "advantages": [0.0, 0.0, inf]})],
        PPO(),
        ValueError,
        ["column 'advantages' holds inf at position 3", "finite"],
    ),
    "-inf in a column that only one sample has": (
        [good(), column("values", [0.0, -inf, 0.0, 0.0])],
        None,
        ValueError,
        ["sample 1: column 'values' holds -inf at position 1"],
    ),
    "target ids of one dimension": (
        [column("target_ids", [1] * 4, torch.int64)],
        CE,
        ValueError,
        ["'target_ids' has shape (4,)", "[4, K] int64"],
    ),
    "float target ids": ([top_k(target_ids=torch.zeros(4, 2))], CE, ValueError, ["torch.float32", "[4, K] int64"]),
    "top-K columns with K=0": (
        [top_k(torch.zeros(4, 0).long(), torch.zeros(4, 0))],
        CE,
        ValueError,
        ["shape (4, 0)", "[4, K]"],
    ),
    "target ids without weights": (
        [good(target_ids=[[1, 2]] * 3)],
        CE,
        ValueError,
        ["column 'target_ids'", "no column 'target_weights'"],
    ),
    "target weights without ids": (
        [good(target_weights=[[1, 2]] * 3)],
        CE,
        ValueError,
        ["column 'target_weights'", "no column 'target_ids'"],
    ),
    "more ids than weights": (
        [top_k(torch.zeros(4, 2).long(), torch.zeros(4, 3))],
        CE,
        ValueError,
        ["the second dimensions are", "'target_ids': 2, 'target_weights': 3"],
    ),
    "samples with different K": (
        [top_k(), top_k(torch.zeros(4, 3).long(), torch.zeros(4, 3))],
        CE,
        ValueError,
        ["sample 1: column 'target_ids' has K=3", "sample 0 has K=2"],
    ),
    "a target id equal to vocab_size": (
        [top_k(), top_k(ids([1, 2], [3, 4], [5, 50], [0, 0]))],
        CE,
        ValueError,
        ["sample 1: target_ids[2] holds 50", "0 to 49", "vocab_size=50"],
    ),
    "nan in target weights": (
        [top_k(weights=torch.full((4, 2), nan))],
        CE,
        ValueError,
        ["'target_weights' holds nan at position 0", "finite"],
    ),
    "an optional column in only one sample": (
        [good(**ALL_COLUMNS), good(**ALL_COLUMNS, generator_logprobs=-1.0)],
        PPO(),
        ValueError,
        [
            "sample 1 has the column 'generator_logprobs', but sample 0 lacks it",
            "all samples of a call must have it, or none",
        ],
    ),
    "target_ids in only one sample of a forward call": (
        [top_k(), good()],
        None,
        ValueError,
        ["sample 0 has the column 'target_ids', but sample 1 lacks it"],
    ),
    "a KL without reference logprobs": (
        [good(**ALL_COLUMNS)],
        PPO(kl=KL(coefficient=0.1)),
        ValueError,
        ["no column 'ref_logprobs'", "PPO reads"],
    ),
    "reference logprobs without a KL": (
        [good(**ALL_COLUMNS, ref_logprobs=-1.0)],
        PPO(),
        ValueError,
        ["column 'ref_logprobs'", "PPO reads"],
    ),
    "a correction without the generator's logprobs": (
        [good(**ALL_COLUMNS)],
        PPO(correction=TruncatedImportanceSampling()),
        ValueError,
        ["no column 'generator_logprobs'", "PPO reads"],
    ),
    "an entropy from the caller": (
        [good(**ALL_COLUMNS, entropy=1.0)],
        PPO(entropy_coefficient=0.1),
        ValueError,
        ["column 'entropy'", "PPO reads"],
    ),
    "a loss that the caller wrote, without its column": (
        [good()],
        own_loss,
        ValueError,
        ["no column 'values'", "own_loss reads"],
    ),
    "too many bytes": (MANY, CE, ValueError, ["hold 1120 bytes", "max_call_bytes=1000", "split the call"]),
}

# (field, value, type of the error, text about the limit)
BAD_OPTIM_PARAMS = [
    ("learning_rate", -0.001, ValueError, "at least 0"),
    ("learning_rate", nan, ValueError, "at least 0"),
    ("learning_rate", inf, ValueError, "finite"),
    ("learning_rate", None, TypeError, "at least 0"),
    ("learning_rate", "1e-3", TypeError, "at least 0"),
    ("learning_rate", True, TypeError, "a finite number of at least 0"),
    ("learning_rate", torch.tensor(0.1), TypeError, "a finite number"),
    ("beta1", 1.0, ValueError, "in [0, 1)"),
    ("beta1", -0.1, ValueError, "in [0, 1)"),
    ("beta1", False, TypeError, "a number in [0, 1)"),
    ("beta2", 1.5, ValueError, "in [0, 1)"),
    ("beta2", None, TypeError, "in [0, 1)"),
    ("eps", 0.0, ValueError, "positive"),
    ("eps", -1e-8, ValueError, "positive"),
    ("eps", "1e-8", TypeError, "positive"),
    ("weight_decay", -0.1, ValueError, "at least 0"),
    ("weight_decay", nan, ValueError, "at least 0"),
    ("weight_decay", [0.1], TypeError, "at least 0"),
    ("grad_divisor", 0, ValueError, "positive"),
    ("grad_divisor", -4.0, ValueError, "positive"),
    ("grad_divisor", None, TypeError, "positive"),
    ("grad_divisor", True, TypeError, "positive"),
    ("grad_divisor", inf, ValueError, "finite"),
    ("grad_clip_norm", 0.0, ValueError, "positive"),
    ("grad_clip_norm", -1.0, ValueError, "or None"),
    ("grad_clip_norm", nan, ValueError, "positive"),
    ("grad_clip_norm", inf, ValueError, "finite"),
    ("grad_clip_norm", True, TypeError, "or None"),
]

# (field, value, type of the error, text about the limit), for a vocabulary of 48 tokens
BAD_SAMPLING_PARAMS = [
    ("max_tokens", 0, ValueError, "an integer of at least 1"),
    ("max_tokens", 1.5, TypeError, "an integer of at least 1"),
    ("max_tokens", True, TypeError, "an integer of at least 1"),
    ("max_tokens", None, TypeError, "an integer of at least 1"),
    ("n", 0, ValueError, "an integer of at least 1"),
    ("n", "4", TypeError, "an integer of at least 1"),
    ("n", True, TypeError, "an integer of at least 1"),
    ("temperature", -0.5, ValueError, "a number: 0 (greedy) or in [0.01, 2]"),
    ("temperature", 0.001, ValueError, "in [0.01, 2]"),
    ("temperature", 3.0, ValueError, "in [0.01, 2]"),
    ("temperature", nan, ValueError, "in [0.01, 2]"),
    ("temperature", "hot", TypeError, "a number: 0 (greedy) or in [0.01, 2]"),
    ("temperature", None, TypeError, "a number: 0 (greedy) or in [0.01, 2]"),
    ("temperature", [1.0], TypeError, "a number: 0 (greedy) or in [0.01, 2]"),
    ("temperature", True, TypeError, "a number: 0 (greedy) or in [0.01, 2]"),
    ("top_p", 0.0, ValueError, "a number in (0, 1]"),
    ("top_p", 1.5, ValueError, "a number in (0, 1]"),
    ("top_p", "0.9", TypeError, "a number in (0, 1]"),
    ("top_k", -1, ValueError, "an integer of at least 0"),
    ("top_k", 5.0, TypeError, "an integer of at least 0"),
    ("top_k", False, TypeError, "an integer of at least 0"),
    ("seed", -1, ValueError, "an integer in [0, 2**62), or None"),
    ("seed", 1 << 62, ValueError, "an integer in [0, 2**62), or None"),
    ("seed", 1.0, TypeError, "an integer in [0, 2**62), or None"),
    ("seed", True, TypeError, "an integer in [0, 2**62), or None"),
    ("stop_token_ids", (48,), ValueError, "a tuple of ids, 0 to 47"),
    ("stop_token_ids", (-1,), ValueError, "a tuple of ids"),
    ("stop_token_ids", 5, TypeError, "a tuple of ids"),
    ("stop_token_ids", "ab", TypeError, "a tuple of ids"),
    ("stop_token_ids", (1.5,), TypeError, "a tuple of ids"),
    ("stop_token_ids", (True,), TypeError, "a tuple of ids"),
    ("ignore_stop", "no", TypeError, "True or False"),
]

# (version, timeout, type of the error, texts that the message contains in this order)
BAD_PULLS = [
    (None, 1.0, TypeError, ["version=None", "an integer of at least 0"]),
    ("0", 1.0, TypeError, ["version='0'", "an integer of at least 0"]),
    (0.0, 1.0, TypeError, ["version=0.0", "an integer of at least 0"]),
    (nan, 1.0, TypeError, ["version=nan", "an integer of at least 0"]),
    (True, 1.0, TypeError, ["version=True", "an integer of at least 0"]),
    ([0], 1.0, TypeError, ["version=[0]", "an integer of at least 0"]),
    (-1, 1.0, ValueError, ["version=-1", "an integer of at least 0"]),
    (0, "1", TypeError, ["timeout='1'", "a number of seconds, at least 0"]),
    (0, None, TypeError, ["timeout=None", "a number of seconds, at least 0"]),
    (0, True, TypeError, ["timeout=True", "a number of seconds, at least 0"]),
    (0, -1.0, ValueError, ["timeout=-1.0", "a number of seconds, at least 0"]),
    (0, nan, ValueError, ["timeout=nan", "a number of seconds, at least 0"]),
]


def assert_in_order(message: str, words: list[str]):
    start = 0
    for word in words:
        assert word in message[start:], f"{word!r} is not in {message!r} after {start}"
        start = message.index(word, start) + len(word)


@pytest.mark.parametrize("samples, loss, error, words", BAD_SAMPLES.values(), ids=BAD_SAMPLES)
def test_the_error_for_bad_samples_names_the_value_and_the_limit(samples, loss, error, words):
    with pytest.raises(error) as caught:
        validate_samples(samples, loss, **LIMITS)
    assert_in_order(str(caught.value), words)


@pytest.mark.parametrize("field, value, error, limit", BAD_OPTIM_PARAMS)
def test_the_error_for_bad_optim_params_names_the_value_and_the_limit(field, value, error, limit):
    with pytest.raises(error) as caught:
        validate_optim_params(OptimParams(**{"learning_rate": 1e-3, field: value}))
    assert_in_order(str(caught.value), [f"{field}={value!r}", limit])


def test_optim_params_of_another_type_are_refused():
    with pytest.raises(TypeError, match="params is a dict; it must be OptimParams"):
        validate_optim_params({"learning_rate": 1e-3})


@pytest.mark.parametrize("field, value, error, limit", BAD_SAMPLING_PARAMS)
def test_the_error_for_bad_sampling_params_names_the_value_and_the_limit(field, value, error, limit):
    with pytest.raises(error) as caught:
        validate_sampling_params(SamplingParams(**{field: value}), vocab_size=48)
    assert_in_order(str(caught.value), [f"{field}={value!r}", limit])


@pytest.mark.parametrize("params", [{"max_tokens": 3}, None, OptimParams(learning_rate=0.1)], ids=str)
def test_sampling_params_of_another_type_are_refused(params):
    with pytest.raises(TypeError, match=f"params is a {type(params).__name__}; it must be SamplingParams"):
        validate_sampling_params(params)


@pytest.mark.parametrize("version, timeout, error, words", BAD_PULLS)
def test_a_bad_version_or_timeout_of_a_pull_is_refused(version, timeout, error, words):
    with pytest.raises(error) as caught:
        validate_pull(version, timeout)
    assert_in_order(str(caught.value), words)


def test_a_boolean_is_refused_as_a_token_id():
    for validate, name in ((validate_prompts, "prompt"), (validate_sequences, "sequence")):
        with pytest.raises(TypeError, match=rf"{name} 1 is \[7, True\]; it must be a list of token ids"):
            validate([[5], [7, True]], max_model_len=8, vocab_size=48)


def test_max_tokens_beyond_the_room_of_every_prompt_are_refused_with_the_limit():
    limits = GeneratorLimits(max_model_len=256, vocab_size=48, max_adapters=0, max_adapter_rank=0)
    limits.check_prompts([[5]], SamplingParams(max_tokens=255))
    limits.check_prompts([[5] * 200], SamplingParams(max_tokens=255))  # the completion ends at the limit
    with pytest.raises(ValueError, match="max_tokens=5000 exceeds max_model_len=256, .*; give at most 256"):
        limits.check_prompts([[5]], SamplingParams(max_tokens=5000))
    replace(limits, max_model_len=64).check_prompts([[5]], SamplingParams())  # the default fits every model


def test_a_sequence_may_have_max_model_len_tokens_and_a_prompt_one_less():
    limits = {"max_model_len": 8, "vocab_size": 48}
    validate_prompts([[5] * 7], **limits)
    validate_sequences([[5] * 8], **limits)
    with pytest.raises(ValueError, match=r"prompt 0 has 8 tokens; it must have 1 to 7 \(max_model_len=8\)"):
        validate_prompts([[5] * 8], **limits)
    with pytest.raises(ValueError, match=r"sequence 0 has 9 tokens; it must have 1 to 8 \(max_model_len=8\)"):
        validate_sequences([[5] * 9], **limits)


def test_sampling_params_and_pulls_at_their_limits_are_accepted():
    greedy = SamplingParams(temperature=0, top_p=1, top_k=0, seed=0, stop_token_ids=(0, 47))
    hottest = SamplingParams(temperature=2, top_p=1e-3, seed=(1 << 62) - 1, stop_token_ids=[5], max_tokens=1, n=1)
    for params in (greedy, hottest, SamplingParams(temperature=0.01)):
        validate_sampling_params(params, vocab_size=48)
    validate_pull(0, 0)
    validate_pull(7, inf)


def test_samples_at_their_limits_are_accepted():
    longest = positions(8)
    edge = replace(good(), tokens=ids(0, 49, 0, 49), targets=ids(49, 0, -100, -100))
    validate_samples([longest, edge], CE, **LIMITS)
    validate_samples((good(**ALL_COLUMNS),), PPO(), **LIMITS)
    validate_samples(MANY, CE, **{**LIMITS, "max_call_bytes": 1120})
    validate_samples([top_k(ids([0, 49], [0, 0], [1, 1], [2, 2]))] * 2, CE, **LIMITS)
    validate_samples([good(**ALL_COLUMNS, generator_logprobs=-1.0)] * 2, PPO(), **LIMITS)


def test_forward_takes_any_column():
    validate_samples([good(anything=1.0)], None, **LIMITS)


def test_optim_params_at_their_limits_are_accepted():
    validate_optim_params(OptimParams(learning_rate=0, beta1=0.0, beta2=0.0, grad_clip_norm=None, grad_divisor=1))


WAKES = """
import os
import numpy as np
import torch
import cloudpickle
from rl_actors import CrossEntropy, Sample
from rl_actors.types import RankOutput, SampleList
from rl_actors.validation import validate_samples
from rl_actors.clients.conversion import merge_outputs, to_tensors

COUNT, LENGTH = 32, 8192  # far more positions than torch computes in one thread

def running():
    return set(os.listdir("/proc/self/task"))

def zeros(dtype, length=LENGTH):
    return torch.from_numpy(np.zeros(length, dtype))

samples = [
    to_tensors(Sample(tokens=zeros("int64"), targets=zeros("int64"), columns={"loss_weights": zeros("float32")}))
    for _ in range(COUNT)
]
logprobs = zeros("float32", COUNT * LENGTH)
answer = RankOutput(
    rank=0, indices=list(range(COUNT)), lengths=[LENGTH] * COUNT, values={"logprobs": logprobs}, metrics={}, policy_version=0
)
torch.set_num_threads(3)
before = running()
validate_samples(samples, CrossEntropy(), vocab_size=8, max_sequence_length=LENGTH, max_call_bytes=1 << 30)
cloudpickle.loads(cloudpickle.dumps(SampleList(samples)))
merge_outputs(COUNT, [answer])
behind = running()
logprobs + 1
print(len(behind - before), len(running() - behind))
"""


def test_a_large_call_starts_none_of_torchs_threads_in_the_callers_process():
    """For a large tensor torch uses a thread for every core of the host. Waking these threads can take longer than a training step."""
    done = subprocess.run([sys.executable, "-c", WAKES], capture_output=True, text=True, timeout=GUARD, check=True)
    # The calls started 0 threads. Then `logprobs + 1` started 2, which shows that the program notices new threads.
    assert done.stdout.split() == ["0", "2"]
