"""PPO of the tiny model on two-digit addition: a policy, a value model of the same shape, and one reward at the end of an answer."""

from configs.tiny import sft_phase, tiny
from controllers.critic import CriticConfig
from controllers.gae import GAEConfig
from controllers.ppo import PPOConfig
from controllers.rollouts import RolloutConfig
from controllers.schedules import ScheduleConfig


def tiny_ppo() -> PPOConfig:
    """Supervised steps until about a fifth of the sampled answers are right, and then PPO."""
    base = tiny()
    return PPOConfig(
        alphabet=base.alphabet,
        max_tokens=base.max_tokens + 1,  # so that the longest right answer ends by itself
        environment=base.environment,
        trainer=base.trainer,
        generator=base.generator,
        steps=70,
        updates_per_step=3,
        epochs_per_step=2,
        rollouts=RolloutConfig(groups_per_step=768, group_size=1, max_refills=0, advantage="gae", temperature=1.3),
        gae=GAEConfig(bootstrap=False),  # an answer that is too long is wrong
        schedule=ScheduleConfig(kind="linear_warmup_linear", learning_rate=4e-4, warmup_steps=2, min_ratio=0.1),
        critic=CriticConfig(schedule=ScheduleConfig(learning_rate=1e-3, warmup_steps=2), warmup_steps=2),
        sft=sft_phase(stop_at=0.2),
        sft_steps=600,
    )
