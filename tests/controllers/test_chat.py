"""Tests of chat templates: the prompt of a conversation, the tokens that supervised training trains on, and the tokens that end a text."""

import asyncio
import json

import pytest
from fakes import ParityReward, RandomGenerator
from own_models import CHAT_TEMPLATE, save_tokenizer

from controllers.environments import Message, Problem
from controllers.rollouts.chat import ChatConfig
from controllers.rollouts.episodes import EpisodeLimits
from controllers.rollouts.evaluation import EvaluationSet, Evaluator, PassAtKConfig
from controllers.rollouts.groups import RolloutConfig, Rollouts
from controllers.rollouts.queue import RolloutQueue
from controllers.rollouts.tokenizer import load_tokenizer

UNMARKED = CHAT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
"""CHAT_TEMPLATE without transformers' marks around the assistant's text."""

CONVERSATION = [
    Message(role="user", content="2+2"),
    Message(role="assistant", content="four"),
    Message(role="user", content="and 3+3"),
    Message(role="assistant", content="six"),
]


@pytest.fixture
def make(tmp_path):
    """make(template, chat, generation) saves a tokenizer with this template, and loads it. generation: the content of generation_config.json."""

    def make(template: str | None = CHAT_TEMPLATE, chat: ChatConfig | None = None, generation: object = None):
        save_tokenizer(tmp_path, chat_template=template)
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return load_tokenizer(tmp_path, chat)

    return make


def problem(*messages: Message, prompt: str = "1+1", answer: str = "2") -> Problem:
    return Problem(prompt=prompt, answer=answer, key=prompt, messages=list(messages))


def written(tokenizer, tokens: list[int]) -> str:
    return tokenizer.hf.decode(tokens)


def test_the_prompt_of_a_problem_without_messages_is_plain_text_unless_chat_is_enabled(make):
    assert written(make(), make().encode_prompt(problem())) == "1+1"
    chat = make(chat=ChatConfig(enabled=True))
    expected = "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
    assert written(chat, chat.encode_prompt(problem())) == expected


def test_messages_go_through_the_template_with_the_system_message_and_without_thinking(make):
    tokenizer = make(chat=ChatConfig(system="Be brief.", thinking=False))
    prompt = tokenizer.encode_prompt(problem(*CONVERSATION[:3]))
    assert written(tokenizer, prompt) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>\n"
        "<|im_start|>user\nand 3+3<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    own = problem(Message(role="system", content="Be long."), CONVERSATION[0])
    assert "Be brief." not in written(tokenizer, tokenizer.encode_prompt(own))


def test_the_prompt_of_a_conversation_ends_before_the_assistants_last_turn(make):
    tokenizer = make()
    assert tokenizer.encode_prompt(problem(*CONVERSATION)) == tokenizer.encode_prompt(problem(*CONVERSATION[:3]))


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, UNMARKED], ids=["marked", "unmarked"])
def test_supervised_training_trains_every_turn_of_the_assistant_and_nothing_else(make, template):
    tokenizer = make(template)
    sample = tokenizer.to_sample(problem(*CONVERSATION))
    trained = sample.targets[sample.columns["loss_weights"] == 1]
    assert written(tokenizer, trained.tolist()) == "four<|im_end|>six<|im_end|>"
    whole = [*sample.tokens.tolist(), int(sample.targets[-1])]
    assert written(tokenizer, whole).endswith("assistant\nsix<|im_end|>")


def test_the_trained_tokens_are_those_in_the_assistant_mask_of_transformers(make):
    tokenizer = make(UNMARKED)
    sample = tokenizer.to_sample(problem(*CONVERSATION))
    marked = make(CHAT_TEMPLATE).hf.apply_chat_template(
        CONVERSATION, return_dict=True, return_assistant_tokens_mask=True
    )
    mask = marked["assistant_masks"][1 : len(sample) + 1]
    assert sum(mask) == sum(marked["assistant_masks"]) > 0
    assert sample.tokens.tolist() == marked["input_ids"][: len(sample)]
    assert sample.columns["loss_weights"].tolist() == mask


def test_an_answer_becomes_the_assistants_last_turn(make):
    tokenizer = make()
    with_answer = tokenizer.to_sample(problem(*CONVERSATION[:3], answer="six"))
    assert with_answer.targets.tolist() == tokenizer.to_sample(problem(*CONVERSATION)).targets.tolist()
    plain = tokenizer.to_sample(problem())
    assert written(tokenizer, plain.targets[plain.columns["loss_weights"] == 1].tolist()) == "2<|im_end|>"


@pytest.mark.parametrize(
    ("generation", "stops", "end"),
    [
        ({"eos_token_id": [258, 256]}, (258, 256), 258),
        ({"eos_token_id": 256}, (256,), 256),  # the tokenizer's own end token is 258
        ({}, (258,), 258),
        (None, (258,), 258),
    ],
)
def test_stop_tokens_come_from_generation_config_or_else_from_the_tokenizer(make, generation, stops, end):
    tokenizer = make(generation=generation)
    assert tokenizer.stop_token_ids == stops and tokenizer.end_token_id == end


REFUSED = {  # template, ChatConfig, pattern of the error text
    "no template": (None, ChatConfig(enabled=True), "has no chat template; give it one"),
    "template reads no enable_thinking": (
        "{{ messages[0].content }}",
        ChatConfig(thinking=False),
        "does not read enable_thinking",
    ),
    "template raises": (
        "{{ raise_exception('only users') }}",
        ChatConfig(),
        "does not take the conversation user: '2\\+2'.*only users",
    ),
    "template has a syntax error": ("{% if %}", ChatConfig(), "does not take the conversation"),
    "turn has no stop token": (
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        ChatConfig(),
        "does not end message 1 with one of the stop tokens \\[258\\]",
    ),
    "text depends on the number of messages": (
        "{{ messages | length }}" + UNMARKED,
        ChatConfig(),
        "are not the beginning of the whole conversation",
    ),
    "template marks nothing": (
        "{% if false %}{% generation %}{% endgeneration %}{% endif %}a",
        ChatConfig(),
        "no turn of the assistant to train on",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_template_that_cannot_be_used_is_refused_with_the_reason(make, case):
    template, chat, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        make(template, chat).to_sample(problem(*CONVERSATION))


@pytest.mark.parametrize("ids", [[300], "eos", [1.5]])
def test_a_stop_token_that_the_tokenizer_lacks_is_refused(make, ids):
    with pytest.raises(
        ValueError, match="generation_config.json has eos_token_id=.*, but the tokenizer has the tokens 0 to 258"
    ):
        make(generation={"eos_token_id": ids})


def test_rollouts_and_evaluation_send_prompts_from_the_template_and_all_stop_tokens(make):
    tokenizer = make(chat=ChatConfig(enabled=True), generation={"eos_token_id": [258, 256]})
    environment, generator = ParityReward(0.0, 3), RandomGenerator()
    config = RolloutConfig(groups_per_step=2, group_size=2, dynamic_sampling_rounds=0)
    limits = EpisodeLimits(max_turns=1, max_tokens=64, max_tokens_per_turn=4)
    rollouts = Rollouts(config, environment, tokenizer, generator, limits=limits, seed=0)
    sets = [EvaluationSet(name="", environment=environment, problems=environment.held_out())]
    evaluator = Evaluator(
        sets=sets,
        generator=generator,
        tokenizer=tokenizer,
        limits=limits,
        seed=0,
        pass_at_k=PassAtKConfig(),
    )
    asyncio.run(RolloutQueue(rollouts).next_batch(version=0))
    asyncio.run(evaluator())
    trained, held_out = generator.generations
    assert [written(tokenizer, prompt) for prompt in trained.prompts + held_out.prompts] == [
        f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        for prompt in ("0+0=", "1+0=", "0+99=", "1+99=", "2+99=")
    ]
    assert trained.params.stop_token_ids == held_out.params.stop_token_ids == (258, 256)
