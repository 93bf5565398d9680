"""Episodes: the tokens that are trained on, the tokens that the policy gets, limits, faulty environments, and episodes in the queue of rollouts."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace

import pytest
import torch
from own_models import CHAT_TEMPLATE, save_tokenizer

from configs.tiny_game import tiny_game, tiny_tool
from controllers.environments import EpisodeError, Message, Problem, Reply, Scorer, build_environment
from controllers.environments.calculator import CalculatorError, Products, calculate
from controllers.environments.config import EnvironmentConfig
from controllers.environments.guessing import GuessingGame
from controllers.environments.scorer import together
from controllers.rollouts.chat import ChatConfig
from controllers.rollouts.episodes import EpisodeLimits, PlayedEpisode, Player, TurnSender
from controllers.rollouts.evaluation import EvaluationSet, Evaluator, PassAtKConfig
from controllers.rollouts.groups import RolloutConfig, Rollouts
from controllers.rollouts.queue import RolloutQueue
from controllers.rollouts.tokenizer import Tokenizer, build_character_tokenizer, load_tokenizer
from rl_actors import Completion, SamplingParams
from rl_actors.seeds import hashed_seed

LIMITS = EpisodeLimits(max_turns=4, max_tokens=64, max_tokens_per_turn=6)


@pytest.fixture(scope="module")
def characters(tmp_path_factory) -> Tokenizer:
    """A tokenizer of characters. The id of <pad> is 0, the id of <eos> is 1, and the ids of the characters begin at 2."""
    path = tmp_path_factory.mktemp("characters")
    build_character_tokenizer(path, "0123456789?+-=ab!")
    return load_tokenizer(path)


@dataclass
class Echo:
    """An environment with given replies. `beginning` begins every episode. `replies` has the reply to each turn of an episode, in order.

    `heard` has the texts of the turns of all episodes.
    """

    replies: list[Reply]
    beginning: object = "?"
    num_episodes: int = 0
    heard: list[str] = field(default_factory=list)

    def problem(self, index: int) -> Problem:
        return Problem(prompt="?", answer="", key=str(index), metadata={"index": index})

    def held_out(self) -> list[Problem]:
        return [self.problem(index) for index in range(3)]

    def episode(self, problem: Problem) -> "EchoEpisode":
        self.num_episodes += 1
        return EchoEpisode(self)


class EchoEpisode:
    def __init__(self, environment: Echo) -> None:
        self.environment, self.replies = environment, list(environment.replies)

    def reset(self):
        return self.environment.beginning

    async def step(self, completion: str):
        self.environment.heard.append(completion)
        return self.replies.pop(0)


def turns(*said: list[int], version: int = 0):
    """A policy that samples the tokens said[k] in turn k of an episode, with the policy_version `version` + k.

    policy.seen has, for each turn, the tokens that the policy got.
    """

    async def policy(tokens: list[int], turn: int) -> Completion:
        seen.append(list(tokens))
        logprobs = [-0.5 - turn] * len(said[turn])
        versions = [version + turn] * len(said[turn])
        return Completion(tokens=said[turn], logprobs=logprobs, policy_versions=versions, finish_reason="stop")

    seen: list[list[int]] = []
    policy.seen = seen
    return policy


def play(environment, policy, tokenizer: Tokenizer, limits: EpisodeLimits = LIMITS, **scorer: object) -> PlayedEpisode:
    player = Player(tokenizer=tokenizer, limits=limits, scorer=Scorer(**scorer))
    return asyncio.run(player.play(environment, environment.problem(0), policy))


TWO_TURNS = [Reply(observation="+-", reward=0.25), Reply(observation="=", reward=1.0, is_over=True)]


def test_only_sampled_tokens_are_trained_on_and_each_has_the_logprob_and_version_of_its_turn(characters):
    policy = turns([2, 1], [3, 4, 1], version=7)
    episode = play(Echo(TWO_TURNS), policy, characters)
    mark, plus, minus = characters.encode("?+-")
    assert policy.seen == [[mark], [mark, 2, 1, plus, minus]]
    assert episode.prompt == [mark] and episode.completion.tokens == [2, 1, plus, minus, 3, 4, 1]
    assert episode.is_action == [True, True, False, False, True, True, True]
    assert episode.completion.logprobs == [-0.5, -0.5, 0, 0, -1.5, -1.5, -1.5]
    assert episode.completion.policy_versions == [7, 7, 7, 7, 8, 8, 8]
    assert episode.rewards_per_token == [0, 0.25, 0, 0, 0, 0, 1.0] and episode.reward == 1.25
    assert episode.completion.finish_reason == "stop"
    sample = episode.to_sample(advantage=2.0, temperature=0.7)
    weights = [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    assert sample.targets.tolist() == episode.completion.tokens and sample.temperature == 0.7
    assert sample.columns["loss_weights"].tolist() == weights
    assert sample.columns["advantages"].tolist() == [2 * weight for weight in weights]
    assert torch.equal(sample.columns["old_logprobs"], torch.tensor(episode.completion.logprobs))


def test_sampled_tokens_are_kept_even_if_encoding_their_text_gives_other_tokens(tmp_path):
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Built
    from transformers import PreTrainedTokenizerFast

    built = Built(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    built.pre_tokenizer, built.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    built.add_special_tokens([AddedToken("<end>", special=True)])
    PreTrainedTokenizerFast(tokenizer_object=built, eos_token="<end>").save_pretrained(str(tmp_path))
    tokenizer = load_tokenizer(tmp_path)
    policy = turns([0, 1, 3], [0, 1, 3])
    environment = Echo([Reply(observation="b"), Reply(is_over=True)], beginning="ab")
    episode = play(environment, policy, tokenizer)
    # The tokenizer encodes "ab" as one token. The policy sampled "a" and "b" as two tokens.
    assert environment.heard == ["ab", "ab"] and tokenizer.encode("ab") == [2]
    assert policy.seen[1] == [2, 0, 1, 3, 1]
    assert episode.prompt + episode.completion.tokens == [2, 0, 1, 3, 1, 0, 1, 3]


# ends_itself: True if the policy samples the end token of its turn. Otherwise the chat template adds it.
@pytest.mark.parametrize("ends_itself", [True, False])
def test_messages_go_through_the_chat_template_without_encoding_earlier_turns(tmp_path, ends_itself):
    save_tokenizer(tmp_path, chat_template=CHAT_TEMPLATE)
    tokenizer = load_tokenizer(tmp_path, ChatConfig(system="Be brief."))
    said = tokenizer.encode("four") + [tokenizer.end_token_id] * ends_itself
    beginning = [Message(role="user", content="2+2")]
    reply = Reply(observation=[Message(role="tool", content="right"), Message(role="user", content="3+3")])
    policy = turns(said, said)
    limits = EpisodeLimits(max_turns=2, max_tokens=400, max_tokens_per_turn=8)
    episode = play(Echo([reply, Reply(is_over=True)], beginning=beginning), policy, tokenizer, limits)
    whole = [Message(role="system", content="Be brief."), *beginning, Message(role="assistant", content="four")]
    rendered = tokenizer.chat.prompt([*whole, *reply.observation])
    assert policy.seen[1] == rendered
    is_action = [False] * len(episode.prompt) + episode.is_action
    assert is_action[len(episode.prompt) : len(episode.prompt) + len(said)] == [True] * len(said)
    assert sum(is_action) == 2 * len(said)  # an end token that the template adds is not trained on
    assert episode.lines[2].text == "tool: right\nuser: 3+3"


def test_token_ids_of_an_observation_stay_as_they_are(characters):
    policy = turns([2, 1], [3, 1])
    environment = Echo([Reply(observation=[9, 9]), Reply(is_over=True)], beginning=[5, 1, 7])
    play(environment, policy, characters)
    assert policy.seen == [[5, 1, 7], [5, 1, 7, 2, 1, 9, 9]]


@pytest.mark.parametrize(
    "limits",
    [
        EpisodeLimits(max_turns=2, max_tokens=64, max_tokens_per_turn=2),
        EpisodeLimits(max_turns=9, max_tokens=8, max_tokens_per_turn=2),
    ],
    ids=["turns", "tokens"],
)
def test_an_episode_that_reaches_a_limit_ends_with_a_token_of_the_policy(characters, limits):
    endless = Echo([Reply(observation="+", reward=0.5)] * 9)
    episode = play(endless, turns(*[[2, 1]] * 9), characters, limits)
    plus = characters.encode("+")
    assert episode.completion.tokens == [2, 1, *plus, 2, 1] and episode.num_turns == 2
    assert episode.completion.finish_reason == "length" and episode.reward == 1.0
    assert [line.text for line in episode.lines] == ["?", "0", "+", "0", "+"]


class Raises(Echo):
    """An environment whose first `failures` episodes fail at their second turn."""

    failures = 1

    def episode(self, problem):
        made = super().episode(problem)
        if self.num_episodes <= self.failures:
            made.replies = [TWO_TURNS[0]]  # the second turn then raises IndexError
        return made


class Hangs(Echo):
    def episode(self, problem):
        made = super().episode(problem)
        if self.num_episodes == 1:
            made.reset = asyncio.Event().wait  # never ends
        return made


@pytest.mark.parametrize(
    ("environment", "scorer"), [(Raises(TWO_TURNS), {}), (Hangs(TWO_TURNS), {"timeout": 0.05})], ids=["raises", "hangs"]
)
def test_an_episode_that_fails_is_played_again_from_its_beginning_and_counts_as_a_retry(
    characters, environment, scorer
):
    environment.num_episodes = 0
    episode = play(environment, turns([2, 1], [3, 1]), characters, **scorer)
    assert environment.num_episodes == 2 and episode.num_retries == 1
    assert len(episode.completion.tokens) == 6  # nothing of the failed episode is left


def test_an_episode_that_always_fails_raises_an_error_that_names_its_last_failure(characters):
    environment = Raises(TWO_TURNS)
    environment.failures = 9
    with pytest.raises(EpisodeError, match=r"the episode of '\?' failed 3 times, the last time in turn 2: IndexError"):
        play(environment, turns([2, 1], [3, 1]), characters, max_retries=2)
    assert environment.num_episodes == 3


def test_a_timeout_that_the_environment_raises_keeps_its_text(characters):
    async def lose() -> None:
        raise TimeoutError("the database is away")

    environment = Echo(TWO_TURNS)
    environment.episode = lambda problem: SimpleNamespace(reset=lose)
    with pytest.raises(EpisodeError, match=r"in reset: TimeoutError\('the database is away'\)"):
        play(environment, turns([2, 1]), characters, max_retries=0)


@pytest.mark.parametrize(
    ("replies", "beginning", "message"),
    [
        ([None], "?", r"step after turn 1 of '\?' returned None; it must be a Reply"),
        ([("+", 1.0, True)], "?", "it must be a Reply"),
        ([Reply(reward=float("nan"))], "?", "returned the reward nan; it must be a finite number"),
        ([Reply(reward="1")], "?", "returned the reward '1'; it must be a finite number"),
        ([Reply(is_over=1)], "?", "returned is_over=1; it must be True or False"),
        ([Reply(observation=5)], "?", "gave the observation 5; it must be a text, a list of messages"),
        ([Reply(observation=[2, 99])], "?", "token ids from 0 to 18"),
        ([Reply(observation=[{"role": "user"}])], "?", "a list of messages with role and content"),
        (
            [Reply(observation="x")],
            "?",
            r"step after turn 1 of '\?': \['x'\] of 'x' are not in the tokenizer's alphabet",
        ),
        ([], "", r"reset of '\?' gave 0 tokens; it must give at least 1"),
        ([], "?" * 59, r"gave 59 tokens; .* leave room for a turn of max_tokens=6 tokens in an episode of at most 64"),
    ],
)
def test_an_invalid_result_of_reset_or_step_is_named_and_the_episode_is_not_played_again(
    characters, replies, beginning, message
):
    environment = Echo(replies, beginning=beginning)
    with pytest.raises(EpisodeError, match=message):
        play(environment, turns([2, 1]), characters)
    assert environment.num_episodes == 1


Answer = Callable[[list[int], int], list[int]]


@dataclass
class TalkingGenerator:
    """Answers a prompt with the tokens that `answer(prompt, index)` gives.

    The first `failures` calls with several prompts give only the completion of their first prompt and then fail.
    """

    answer: Answer
    failures: int = 0
    calls: list[list[int]] = field(default_factory=list)  # the indices of every call
    params: list[SamplingParams] = field(default_factory=list)
    num_open: int = 0  # calls that have not ended

    async def generate_each(self, prompts, params, indices):
        self.calls.append(list(indices))
        self.params.append(params)
        self.num_open += 1
        try:
            for place, (prompt, index) in enumerate(zip(prompts, indices, strict=True)):
                await asyncio.sleep(0)
                if self.failures and place == 1:
                    self.failures -= 1
                    raise RuntimeError("the engine has died")
                tokens = self.answer(prompt, index)
                ones = [1.0] * len(tokens)
                made = Completion(tokens=tokens, logprobs=ones, policy_versions=[0] * len(tokens), finish_reason="stop")
                yield place, [made]
        finally:
            self.num_open -= 1


def some_digit(prompt: list[int], index: int) -> list[int]:
    return [2 + index * 7 % 10]


def queue_of(generator, tokenizer, environment=None, *, pending=(), cursor=0, **options) -> RolloutQueue:
    config = RolloutConfig(**{"groups_per_step": 2, "group_size": 3, "dynamic_sampling_rounds": 0, **options})
    limits = EpisodeLimits(max_turns=4, max_tokens=64, max_tokens_per_turn=1)
    environment = environment or GuessingGame(seed=0, num_held_out=10)
    rollouts = Rollouts(config, environment, tokenizer, generator, limits=limits, seed=0)
    return RolloutQueue(rollouts, pending=pending, cursor=cursor)


def drawn(generator, tokenizer, num_steps: int, **options) -> list[dict]:
    """The records of all groups of the first `num_steps` steps."""

    async def scenario() -> list[dict]:
        async with queue_of(generator, tokenizer, **options) as queue:
            return [record for _ in range(num_steps) for record in (await queue.next_batch(0)).to_record()]

    return asyncio.run(scenario())


def test_turns_that_are_ready_together_go_in_one_call_and_have_distinct_seeds(characters):
    generator = TalkingGenerator(some_digit)
    drawn(generator, characters, 3)
    assert len(generator.calls[0]) == 6  # 2 groups of 3 episodes
    indices = [index for call in generator.calls for index in call]
    assert len(set(indices)) == len(indices)
    # The seed of a turn is a hash of params.seed and the turn's index. With 3 episodes per problem and at most
    # 4 turns per episode, the turns of episode e of problem p have the indices from (3 p + e) * 4 on.
    assert sorted(generator.calls[0]) == [0, 4, 8, 12, 16, 20]  # the first turns of 2 problems with 3 episodes each
    assert {params.seed for params in generator.params} == {hashed_seed(0, "rollouts")}


def test_a_slow_tool_delays_only_its_own_episode(characters):
    class Slow(Echo):
        def episode(self, problem):
            made = super().episode(problem)
            if self.num_episodes == 1:
                made.step = self.wait
            return made

        async def wait(self, completion):
            await self.may_go.wait()
            return Reply(reward=1.0, is_over=True)

    async def scenario() -> None:
        environment, generator = Slow([TWO_TURNS[0], TWO_TURNS[0], TWO_TURNS[1]]), TalkingGenerator(some_digit)
        environment.may_go = asyncio.Event()
        async with queue_of(generator, characters, environment, groups_per_step=1) as queue:
            waiting = asyncio.create_task(queue.next_batch(0))
            while len(generator.calls) < 3:
                await asyncio.sleep(0)
            assert [len(call) for call in generator.calls] == [3, 2, 2] and not waiting.done()
            environment.may_go.set()
            batch = await waiting
            assert [group.lengths for group in batch.groups] == [[1, 3, 3]]

    asyncio.run(scenario())


def test_after_an_error_of_the_generator_a_problem_gets_fresh_episodes_and_no_problem_is_lost(characters):
    undisturbed = drawn(TalkingGenerator(some_digit), characters, 2)
    generator = TalkingGenerator(some_digit, failures=1)
    assert drawn(generator, characters, 2) == undisturbed
    with pytest.raises(RuntimeError, match="the engine has died"):
        drawn(TalkingGenerator(some_digit, failures=9), characters, 1)


def test_a_resumed_queue_plays_the_episodes_that_the_first_queue_would_have_played(characters):
    async def scenario() -> None:
        generator = TalkingGenerator(some_digit)
        async with queue_of(generator, characters, max_staleness=1) as queue:
            await queue.next_batch(0)
            state = queue.state()
            expected = (await queue.next_batch(0)).to_record()
        async with queue_of(TalkingGenerator(some_digit), characters, max_staleness=1, **state) as resumed:
            assert (await resumed.next_batch(0)).to_record() == expected
        while generator.num_open:
            await asyncio.sleep(0)

    asyncio.run(scenario())


def test_leaving_the_block_of_a_queue_ends_its_calls_to_the_generator(characters):
    async def scenario() -> None:
        generator = TalkingGenerator(some_digit)
        async with queue_of(generator, characters) as queue:
            waiting = asyncio.create_task(queue.next_batch(0))
            while not generator.num_open:
                await asyncio.sleep(0)
            waiting.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert generator.num_open == 0

    asyncio.run(scenario())


def test_the_queue_raises_the_error_of_an_invalid_result_of_step(characters):
    with pytest.raises(EpisodeError, match="returned None; it must be a Reply"):
        drawn(TalkingGenerator(some_digit), characters, 1, environment=Echo([None]))


def test_a_group_of_episodes_has_summed_rewards_for_grpo_and_rewards_per_token_for_ppo(characters):
    class Scored(Echo):
        def episode(self, problem):
            made = super().episode(problem)
            made.replies = [Reply(observation="+", reward=0.25 * self.num_episodes), Reply(reward=1.0, is_over=True)]
            return made

    async def scenario():
        generator = TalkingGenerator(some_digit)
        async with queue_of(generator, characters, Scored([]), groups_per_step=1, group_size=2) as queue:
            return await queue.next_batch(0)

    batch = asyncio.run(scenario())
    [group] = batch.groups
    assert group.rewards == [1.25, 1.5] and group.lengths == [2, 2] and group.truncated == [False, False]
    assert group.rewards_per_token == [[0.25, 0.0, 1.0], [0.5, 0.0, 1.0]]
    assert group.is_action == [[True, False, True]] * 2
    low, high = batch.advantages[0]
    assert [sample.columns["advantages"].tolist() for sample in batch.samples] == [[low, 0, low], [high, 0, high]]
    metrics = batch.metrics()
    assert metrics["tokens/generated"] == 4 and metrics["episode/turns_mean"] == 2
    [record] = batch.to_record()
    assert record["conversations"][1] == [
        {"role": "environment", "text": "?", "reward": None},
        {"role": "policy", "text": characters.decode(group.completions[1].tokens[:1]), "reward": 0.5},
        {"role": "environment", "text": "+", "reward": None},
        {"role": "policy", "text": characters.decode(group.completions[1].tokens[2:]), "reward": 1.0},
    ]


def test_evaluation_plays_greedy_episodes_of_the_held_out_problems(characters):
    def search(prompt: list[int], index: int) -> list[int]:
        """Guess by binary search, with the hints that the prompt has so far."""
        low, high = 0, 9
        for guess, hint in zip(prompt[1::2], prompt[2::2], strict=True):
            if characters.decode([hint]) == "+":
                low = guess - 2 + 1
            else:
                high = guess - 2 - 1
        return [2 + (low + high) // 2]

    generator, environment = TalkingGenerator(search), GuessingGame(seed=0, num_held_out=10)
    limits = EpisodeLimits(max_turns=4, max_tokens=64, max_tokens_per_turn=1)
    evaluator = Evaluator(
        sets=[EvaluationSet(name="", environment=environment, problems=environment.held_out())],
        generator=generator,
        tokenizer=characters,
        limits=limits,
        seed=0,
        pass_at_k=PassAtKConfig(num_samples=2, k=(1,)),
    )
    scores = asyncio.run(evaluator())
    assert scores.metrics == {"eval/reward": 1.0, "eval/pass@1": 1.0}
    assert [sample["completion"] for sample in scores.samples[:2]] == ["4\n-\n1\n-\n0\n=", "4\n-\n1\n="]
    assert generator.params[0].temperature == 0 and generator.params[0].n == 1


def test_a_demonstration_trains_the_policy_on_its_turns_with_their_end_tokens(tmp_path):
    build_character_tokenizer(tmp_path, "0123456789*c=?")
    tokenizer = load_tokenizer(tmp_path)
    player = Player(
        tokenizer=tokenizer, limits=EpisodeLimits(max_turns=3, max_tokens=64, max_tokens_per_turn=7), scorer=Scorer()
    )
    environment = Products(seed=0, num_held_out=100)
    problems = [environment.problem(index) for index in range(300)]
    asks = [problem for problem in problems if len(environment.demonstration(problem)) == 2]
    # A third of the demonstrations have two turns, and ask the calculator in the first turn. The other demonstrations
    # only guess a number.
    assert 60 < len(asks) < 140
    problem = asks[0]
    sample = asyncio.run(player.demonstrate(environment, problem))
    trained = sample.targets[sample.columns["loss_weights"] != 0].tolist()
    expression = problem.prompt.removesuffix("?")
    eos = [tokenizer.end_token_id]
    assert set(sample.columns) == {"loss_weights"}  # cross_entropy requires no other column
    assert trained == tokenizer.encode(f"c{expression}") + eos + tokenizer.encode(problem.answer) + eos
    game = GuessingGame(seed=0, num_held_out=10)
    with pytest.raises(
        ValueError, match="GuessingGame has no method `demonstration`, so a run cannot have supervised steps"
    ):
        asyncio.run(player.demonstrate(game, game.problem(0)))


def test_the_game_and_the_products_reward_only_right_answers():
    game = GuessingGame(seed=3, num_held_out=10)
    assert sorted(game.problem(index).answer for index in range(10)) == [str(digit) for digit in range(10)]
    one = game.episode(Problem(prompt="?", answer="7", key="7"))
    replies = [one.step(guess) for guess in ("3", "x", "9", "7")]
    assert [(each.observation, each.reward, each.is_over) for each in replies] == [
        ("+", 0.0, False),
        ("?", 0.0, False),
        ("-", 0.0, False),
        ("=", 1.0, True),
    ]
    products = Products(seed=3, num_held_out=200)
    held_out = {problem.key for problem in products.held_out()}
    assert len(held_out) == 200 and all(products.problem(index).key not in held_out for index in range(500))
    two = products.episode(Problem(prompt="47*83?", answer="3901", key=""))
    assert two.step("c47*83").observation == "=3901?" and two.step("c47*").observation == "=?"
    assert two.step("3901") == Reply(reward=1.0, is_over=True)
    assert products.episode(Problem(prompt="47*83?", answer="3901", key="")).step("390").reward == 0.0


@pytest.mark.parametrize("make_config", [tiny_game, tiny_tool])
def test_random_turns_of_a_shipped_task_fit_its_alphabet_and_its_limits(tmp_path, make_config):
    """A policy with random weights may produce any text, so the test's policy samples random tokens.

    In the task with a tool, many of the turns begin like a request to the calculator or like an answer.
    """
    config, draw = make_config(), Random(0)
    config.validate()
    build_character_tokenizer(tmp_path, config.alphabet)
    tokenizer, environment = load_tokenizer(tmp_path), build_environment(config.environment)
    assert len(tokenizer) <= config.trainer.model.vocab_size

    async def policy(tokens: list[int], turn: int) -> Completion:
        said = [draw.randrange(len(tokenizer)) for _ in range(config.max_tokens)]
        if config.max_tokens > 1 and draw.random() < 0.7:
            said = tokenizer.encode("c" if draw.random() < 0.7 else "9") + said[1:]
        zeros = [0] * len(said)
        return Completion(tokens=said, logprobs=[0.0] * len(said), policy_versions=zeros, finish_reason="length")

    player = Player(tokenizer=tokenizer, limits=config.episode_limits(), scorer=Scorer())
    for index in range(300):
        episode = asyncio.run(player.play(environment, environment.problem(index), policy))
        assert 1 <= episode.num_turns <= config.episodes.max_turns and episode.reward in (0.0, 1.0)


@pytest.mark.parametrize(
    ("expression", "value"), [("12*34", 408), (" 7-10 ", -3), ("(1+2)*-3", -9), ("17//5", 3), ("17%5", 2)]
)
def test_the_calculator_computes_arithmetic(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "__import__('os').getpid()",
        "print(1)",
        "a",
        "(1).real",
        "[1]*9",
        "'a'*9",
        "1/0",
        "1//0",
        "1+",
        "",
        "9" * 31,
        "*".join(["9" * 20] * 2),
        "1+" * 150 + "1",
        "(" * 99 + "1",
        "True",
        "1.5",
        "lambda: 1",
    ],
)
def test_the_calculator_refuses_everything_else(expression):
    with pytest.raises(CalculatorError):
        calculate(expression)


def test_a_task_with_episodes_is_refused_in_a_mixture_and_with_reward_workers():
    task = "controllers.environments.guessing:GuessingGame"
    with pytest.raises(ValueError, match="mixture, .*GuessingGame: .* is played in episodes; a mixture takes only"):
        build_environment(EnvironmentConfig(mixture=[{"task": task}], num_held_out=10))
    with pytest.raises(ValueError, match="reward_workers=2, but environment has episodes"):
        Scorer.of(EnvironmentConfig(reward_workers=2), {"environment": GuessingGame(seed=0, num_held_out=1)})


def test_the_first_error_in_together_cancels_the_other_coroutines():
    ended = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def fail() -> None:
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        asyncio.run(together([wait(), fail()]))
    assert ended == [True]


def test_a_turn_that_the_generator_refuses_raises_in_its_episode():
    class Refusing:
        def generate_each(self, prompts, params, indices):
            raise ValueError("prompt 0 has 0 tokens")

    async def scenario() -> None:
        async with TurnSender(Refusing(), SimpleNamespace()) as sender:
            await sender.complete(0, [], 0)

    with pytest.raises(ValueError, match="prompt 0 has 0 tokens"):
        asyncio.run(scenario())
