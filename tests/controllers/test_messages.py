"""What a conversation holds is what the model reads: all fields reach the template, the template's own tokens come out, and text stays text."""

import asyncio
import json

import pyarrow
import pytest
from fakes import ParityReward, RandomGenerator
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from own_models import save_tokenizer
from pyarrow import parquet
from tokenizers import processors
from transformers import AutoTokenizer

from controllers.environments import EnvironmentConfig, Problem, Reply, Scorer, build_environment
from controllers.rollouts.chat import ChatConfig
from controllers.rollouts.episodes import EpisodeLimits, Player
from controllers.rollouts.groups import RolloutConfig, Rollouts
from controllers.rollouts.tokenizer import load_tokenizer
from rl_actors import Completion

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# The parts of Qwen3's template that matter here: tools, tool calls, and thinking that former turns lose.
QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and reasoning %}{{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}{%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {{- '\\n<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role in ('user', 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Like Llama 3's: BOS, headers, trimmed texts.
LLAMA3 = """\
{{- '<|endoftext|>' }}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n\\n' + message.content | trim + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n\\n' }}{%- endif %}"""

# Like DeepSeek-R1's: the last turn loses its thinking, and tool calls stand only beside content that is null.
DEEPSEEK = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is none %}
        {%- for call in message.tool_calls %}{{- call.function.name + call.function.arguments | tojson }}{%- endfor %}
    {%- else %}{{- message.content.split('</think>') | last }}{%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Takes content as text or as a list of texts and of parts; the second text of parts is never shown.
PARTS = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{- message.content }}{%- else %}
        {%- for part in message.content %}
            {%- if part is string %}{{- part }}{%- elif 'image' in part %}{{- '<image>' }}{%- elif loop.first %}{{- part.text }}{%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "required": ["at"]}}}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "weather", "arguments": {"at": "Rome"}}}],
}
TALK = [{"role": "user", "content": "Rain?"}, CALL, {"role": "tool", "content": "no", "name": "weather"}]
DONE = [*TALK, {"role": "assistant", "content": "It is dry.", "reasoning_content": "The tool said no."}]


@pytest.fixture
def load(tmp_path):
    """load(template, bos, chat): a byte-level tokenizer with this template; with `bos` it puts <|endoftext|> before a text."""

    def load(template: str | None, *, bos: bool = False, chat: ChatConfig | None = None):
        save_tokenizer(tmp_path, chat_template=template)
        if bos:
            hf = AutoTokenizer.from_pretrained(tmp_path)
            hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
                single="<|endoftext|> $A <|im_end|>", special_tokens=[("<|endoftext|>", 256), ("<|im_end|>", 258)]
            )
            hf.save_pretrained(tmp_path)
        return load_tokenizer(tmp_path, chat)

    return load


def problems_of(path, rows: list[dict]) -> list[Problem]:
    rows = [*rows, *({"messages": [{"role": "user", "content": str(n)}], "answer": "x"} for n in range(2))]
    rows = [{"answer": row.get("answer", "It is dry."), **row} for row in rows]
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    environment = build_environment(EnvironmentConfig(task=str(path), num_held_out=1))
    problems = [*environment.held_out(), *environment.training_problems]
    return [problem for problem in problems if len(problem.messages) > 1]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_all_fields_of_messages_and_the_tools_reach_the_template(load, tmp_path, name):
    tokenizer = load(QWEN3)
    [problem] = problems_of(tmp_path / name, [{"messages": DONE, "tools": [TOOL]}])
    sample = tokenizer.to_sample(problem)
    whole = [*sample.tokens.tolist(), int(sample.targets[-1])]
    expected = tokenizer.hf.apply_chat_template(DONE, tools=[TOOL], tokenize=False)
    assert tokenizer.hf.decode(whole) == expected.removesuffix("\n")
    for text in ('"name": "weather"', '{"at": "Rome"}', "<think>\nThe tool said no.", "# Tools"):
        assert text in expected
    trained = tokenizer.hf.decode(sample.targets[sample.columns["loss_weights"] == 1].tolist())
    assert '<tool_call>\n{"name": "weather"' in trained and trained.endswith("It is dry.<|im_end|>")


def test_tools_may_be_the_text_of_json(tmp_path):
    [problem] = problems_of(tmp_path / "rows.jsonl", [{"messages": DONE, "tools": json.dumps([TOOL])}])
    assert problem.tools == [TOOL]


@pytest.mark.parametrize("template", [CHATML, CHATML.replace("message.content", "m(message)")])
def test_the_weight_of_a_message_is_its_loss_weight(load, template):
    marks = "{% generation %}{{- message.content }}{% endgeneration %}"
    if "m(message)" in template:
        template = CHATML.replace(
            "'\\n' + message.content + '<|im_end|>\\n' }}",
            "'\\n' }}{% if message.role == 'assistant' %}"
            + marks
            + "{% else %}{{- message.content }}{% endif %}{{- '<|im_end|>\\n' }}",
        )
    tokenizer = load(template)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "first", "weight": 0}]
    talk += [{"role": "user", "content": "b"}, {"role": "assistant", "content": "second", "weight": 0.5}]
    sample = tokenizer.to_sample(Problem(prompt="", answer="", key="", messages=talk))
    weights = sample.columns["loss_weights"]
    assert set(weights.tolist()) <= {0.0, 0.5}
    assert (
        "first" not in (trained := tokenizer.hf.decode(sample.targets[weights != 0].tolist())) and "second" in trained
    )


@pytest.mark.parametrize("weight", [-1, True, "1", float("nan")])
def test_a_wrong_weight_is_refused_with_its_row(tmp_path, weight):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": weight}]
    with pytest.raises(ValueError, match=r"rows.jsonl:1: a message has the weight"):
        problems_of(tmp_path / "rows.jsonl", [{"messages": talk}])


@pytest.mark.parametrize("role", ["developer", "Human"])
def test_a_message_that_the_template_drops_is_refused(load, role):
    tokenizer = load(QWEN3)
    talk = [{"role": role, "content": "Be brief."}, {"role": "user", "content": "a"}]
    with pytest.raises(ValueError, match=f"drops a text .* of message 0, whose role is '{role}': {role}: 'Be brief.'"):
        tokenizer.encode_prompt(Problem(prompt="", answer="", key="", messages=talk))
    with pytest.raises(ValueError, match="tool call of message 1"):  # CHATML shows no tool calls
        load(CHATML).encode_prompt(
            Problem(prompt="", answer="", key="", messages=[TALK[0], {**CALL, "content": ""}, TALK[2]])
        )


SECOND = [{"role": "user", "content": "please add 1 and 2. Rain in Rome?"}]
ADD = {"function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("template", "messages", "tools", "dropped"),
    [
        (CHATML, [*SECOND, {"role": "assistant", "content": "", "tool_calls": [ADD]}, *TALK[:1]], [], "message 1"),
        (QWEN3, [{"role": "developer", "content": "Rome"}, *SECOND], [], "message 0"),
        (CHATML, [*SECOND, {"role": "assistant", "content": "3", "reasoning_content": "1 + 2"}], [], "message 1"),
        (CHATML, SECOND, [TOOL], "drops the tools"),
        (QWEN3, [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], [], "message 0"),
        (
            QWEN3.replace("function.arguments if function.arguments is string else function.arguments | tojson", "1"),
            [*SECOND, {"role": "assistant", "content": "", "tool_calls": [ADD]}, *TALK[:1]],
            [],
            "message 1",
        ),
    ],
)
def test_a_text_that_also_stands_elsewhere_does_not_hide_that_the_template_drops_it(
    load, template, messages, tools, dropped
):
    tokenizer = load(template)
    with pytest.raises(ValueError, match=dropped):
        if messages[-1]["role"] == "assistant":
            tokenizer.to_sample(Problem(prompt="", answer="", key="", messages=messages, tools=tools))
        else:
            tokenizer.encode_prompt(Problem(prompt="", answer="", key="", messages=messages, tools=tools))


def test_an_observation_that_the_template_drops_is_refused(load):
    with pytest.raises(ValueError, match="role is 'developer'"):
        load(QWEN3).encode_observation([{"role": "developer", "content": "secret"}], after=258)


def test_private_use_characters_are_ordinary_text_and_tools_never_become_special_tokens(load):
    tokenizer = load(QWEN3)
    for text in ("a \ue0005\ue001 b", "a \ue0000\ue001 b <|im_end|>"):
        tokens = tokenizer.encode_prompt(
            Problem(prompt=text, answer="", key="", messages=[{"role": "user", "content": text}])
        )
        assert text in tokenizer.hf.decode(tokens) and tokens.count(258) == 1
        assert tokenizer.encode_observation([{"role": "user", "content": text}], after=258).count(258) == 1
    tool = {"type": "function", "function": {"name": "end", "description": "writes <|im_end|>"}}
    problem = Problem(prompt="", answer="", key="", messages=[{"role": "user", "content": "a"}], tools=[tool])
    tokens = tokenizer.encode_prompt(problem)
    assert tokens.count(258) == 2 and "writes <|im_end|>" in tokenizer.hf.decode(tokens)


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_null_inside_a_tool_or_a_call_is_kept_where_the_file_has_it(tmp_path, ending):
    call = {"function": {"name": "weather", "arguments": {"at": "Rome", "until": None}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"default": None, "type": "string"}}}
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    [problem] = problems_of(tmp_path / f"rows{ending}", [{"messages": talk, "tools": [tool], "answer": "x"}])
    if ending == ".jsonl":
        assert problem.messages[1]["tool_calls"] == [call] and problem.tools == [tool]
    else:  # Parquet cannot tell null from a field that only other rows have
        assert problem.messages[1]["tool_calls"][0]["function"]["arguments"] == {"at": "Rome"}


@pytest.mark.parametrize("content", [None, ""])
def test_calls_are_shown_by_a_template_that_shows_them_beside_null_only(load, content):
    call = {"role": "assistant", "content": content, "tool_calls": [ADD]}
    tokens = load(DEEPSEEK).encode_prompt(Problem(prompt="", answer="", key="", messages=[*SECOND, call, TALK[2]]))
    assert 'assistant\nadd{"a": 1}<|im_end|>' in load(DEEPSEEK).hf.decode(tokens)
    shows_none = CHATML.replace("'<|im_end|>", "(message.tool_calls | default('') | string) + '<|im_end|>")
    tokens = load(shows_none).encode_prompt(Problem(prompt="", answer="", key="", messages=[*SECOND, call, TALK[2]]))
    assert "assistant\n[{'function'" in load(shows_none).hf.decode(tokens)


def test_thinking_in_the_text_of_the_trained_turn_is_not_dropped_silently(load):
    thinks = {"role": "assistant", "content": "<think>\n1 and 2\n</think>\n\n3"}
    problem = Problem(prompt="", answer="", key="", messages=[*SECOND, thinks])
    for template in (QWEN3, CHATML):
        sample = load(template).to_sample(problem)
        assert "\n1 and 2\n" in load(template).hf.decode(sample.targets.tolist())
    with pytest.raises(ValueError, match="drops a text or a tool call of message 1"):
        load(DEEPSEEK).to_sample(problem)
    before = {**thinks, "content": "First. " + thinks["content"]}  # Qwen3 shows no text before the thinking
    with pytest.raises(ValueError, match="drops a text or a tool call of message 1"):
        load(QWEN3).to_sample(Problem(prompt="", answer="", key="", messages=[*SECOND, before]))


def test_every_part_of_a_content_counts_and_null_is_no_part(load, tmp_path):
    tokenizer = load(PARTS)
    part = {"type": "text", "text": "Rain?", "image": None}
    row = {"messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": ["hello"]}]}
    [problem] = problems_of(tmp_path / "rows.jsonl", [row])
    sample = tokenizer.to_sample(problem)
    assert tokenizer.hf.decode(sample.tokens.tolist()).endswith("Rain?<|im_end|>\n<|im_start|>assistant\nhello")
    two = [{"role": "user", "content": [part | {"text": "a"}, {"type": "text", "text": "b"}]}]
    with pytest.raises(ValueError, match="drops a text or a tool call of message 0"):
        tokenizer.encode_prompt(Problem(prompt="", answer="", key="", messages=two))


@pytest.mark.parametrize(
    "calls", ["weather", ["weather"], [{"function": "weather"}], [{"name": None}], {"name": "f"}, [3]]
)
def test_malformed_tool_calls_are_refused_with_their_row(tmp_path, calls):
    talk = [*SECOND, {"role": "assistant", "content": "", "tool_calls": calls}]
    with pytest.raises(ValueError, match=r"rows.jsonl:1: a message has the tool calls"):
        problems_of(tmp_path / "rows.jsonl", [{"messages": talk}])


TEXTS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\ue000\ue001"), min_size=1, max_size=12
).filter(lambda text: text.strip() and "<|" not in text)
TURNS = st.lists(st.tuples(TEXTS, TEXTS, st.booleans()), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=TURNS, system=st.one_of(st.none(), TEXTS))
@pytest.mark.parametrize("template", [QWEN3, LLAMA3, CHATML], ids=["qwen3", "llama3", "chatml"])
def test_a_conversation_gives_the_tokens_of_the_template_itself(load, template, turns, system):
    tokenizer = load(template, bos=template is LLAMA3)
    talk = [{"role": "system", "content": system}] if system else []
    tools = [TOOL] if template is QWEN3 and turns[0][2] else []
    for asked, answered, thinks in turns:
        talk += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        if thinks and template is QWEN3:
            talk[-1] |= {
                "reasoning_content": asked,
                "tool_calls": [{"function": {"name": "f", "arguments": {"x": asked}}}],
            }
    problem = Problem(prompt="", answer="", key="", messages=talk, tools=tools)
    options = {"tools": tools or None, "tokenize": True, "return_dict": True}
    expected = tokenizer.hf.apply_chat_template(talk[:-1], add_generation_prompt=True, **options)["input_ids"]
    assert tokenizer.encode_prompt(problem) == expected
    if template is not QWEN3:  # whose former turns lose their thinking, so their tokens are not found
        whole = tokenizer.hf.apply_chat_template(talk, **options)["input_ids"]
        sample = tokenizer.to_sample(problem)
        found = [*sample.tokens.tolist(), int(sample.targets[-1])]
        assert found == whole[: len(found)]


def test_a_plain_prompt_begins_with_the_tokenizers_own_bos_and_a_template_writes_one(load):
    tokenizer = load(LLAMA3, bos=True)
    plain = Problem(prompt="1+1=", answer="2", key="")
    assert tokenizer.encode_prompt(plain) == [256, *tokenizer.encode("1+1=")] == tokenizer.hf("1+1=")["input_ids"][:-1]
    assert tokenizer.encode_prompts([plain, plain]) == [tokenizer.encode_prompt(plain)] * 2
    sample = tokenizer.to_sample(plain)
    assert sample.tokens.tolist() == [*tokenizer.encode_prompt(plain), *tokenizer.encode("2")]
    assert tokenizer.sample_lengths([plain]) == [len(sample)]
    assert tokenizer.encode_observation("hi") == [256, *tokenizer.encode("hi")]
    assert tokenizer.encode_observation("hi", after=65) == tokenizer.encode("hi")
    chat = Problem(prompt="", answer="", key="", messages=[{"role": "user", "content": "a"}])
    assert tokenizer.encode_prompt(chat).count(256) == 1
    assert load(CHATML).encode_prompt(plain) == tokenizer.encode("1+1=")


@pytest.mark.parametrize("template", [QWEN3, LLAMA3, CHATML], ids=["qwen3", "llama3", "chatml"])
def test_text_that_spells_a_special_token_stays_text(load, template):
    tokenizer = load(template)
    spelled = "a<|im_end|>b<|endoftext|>"
    assert not {256, 257, 258} & set(tokenizer.encode(spelled))
    assert tokenizer.decode(tokenizer.encode(spelled)) == spelled
    talk = [{"role": "user", "content": spelled}]
    tokens = tokenizer.encode_prompt(Problem(prompt="", answer="", key="", messages=talk))
    expected = tokenizer.hf.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    plain = tokenizer.hf.apply_chat_template(
        [{"role": "user", "content": "ab"}], add_generation_prompt=True, return_dict=True
    )
    assert tokenizer.hf.decode(tokens) == expected
    assert [t for t in tokens if t >= 256] == [t for t in plain["input_ids"] if t >= 256]
    after = tokenizer.encode_observation(talk, after=258)
    assert [t for t in after if t >= 256] == [257, 258, 257]


def test_an_observation_may_contain_the_words_of_the_former_turn(load):
    tokenizer = load(CHATML)
    talk = [{"role": "user", "content": "the former turn of the assistant was wrong"}]
    assert "was wrong" in tokenizer.hf.decode(tokenizer.encode_observation(talk, after=258))
    assert "user\nthe former turn of" in tokenizer.hf.decode(tokenizer.encode_observation(talk, after=258))


def test_a_lone_surrogate_is_refused(load):
    with pytest.raises(ValueError, match=r"'a\\ud800' holds a lone surrogate"):
        load(CHATML).encode("a\ud800")


def test_the_record_of_a_prompt_is_what_the_policy_read(load):
    tokenizer = load(CHATML)

    class Talks(ParityReward):
        def problem(self, index: int) -> Problem:
            talk = [{"role": "user", "content": f"really {index}"}]
            return Problem(prompt=f"shown {index}", answer="", key=str(index), messages=talk)

    async def record() -> dict:
        limits = EpisodeLimits(max_turns=1, max_tokens=64, max_tokens_per_turn=2)
        config = RolloutConfig(group_size=2)
        rollouts = Rollouts(config, Talks(0.0, 1), tokenizer, RandomGenerator(), limits=limits, seed=0)
        groups = {}
        await rollouts.complete([3], groups.__setitem__)
        return groups[0]

    assert asyncio.run(record()).prompt_text == "<|im_start|>user\nreally 3<|im_end|>\n<|im_start|>assistant\n"


class Tools:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def episode(self, problem: Problem) -> "Tools":
        return self

    def reset(self) -> str:
        return "go"

    def step(self, completion: str) -> Reply:
        self.heard.append(completion)
        return Reply(is_over=True)


@pytest.mark.parametrize(("keeps", "heard"), [(True, "<|im_start|>f"), (False, "f")])
def test_an_episode_may_keep_special_tokens(load, keeps, heard):
    tokenizer, environment = load(CHATML), Tools()
    environment.keeps_special_tokens = keeps

    async def policy(tokens: list[int], turn: int) -> Completion:
        said = [257, *tokenizer.encode("f"), 258]
        return Completion(tokens=said, logprobs=[0.0] * 3, policy_versions=[0] * 3, finish_reason="stop")

    limits = EpisodeLimits(max_turns=2, max_tokens=64, max_tokens_per_turn=8)
    player = Player(tokenizer=tokenizer, limits=limits, scorer=Scorer())
    asyncio.run(player.play(environment, Problem(prompt="go", answer="", key=""), policy))
    assert environment.heard == [heard]
