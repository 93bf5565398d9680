"""A Qwen3 of 13 million parameters learns three-digit addition on one GPU, in minutes.

It also runs on a CPU, in hours.
"""

from configs.tiny import addition, sft_phase
from controllers.algorithms.schedules import ScheduleConfig
from controllers.grpo import GRPOConfig
from controllers.rollouts.groups import RolloutConfig
from rl_actors import GeneratorConfig, ModelConfig, TrainerConfig


def small() -> GRPOConfig:
    """Supervised steps until a third of the sampled answers are right, then GRPO."""
    trainer = TrainerConfig(
        model=ModelConfig(
            vocab_size=16,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=8,
            head_dim=64,
            max_position_embeddings=128,
            # rope_theta is small, as in configs/tiny.py: a text has at most twelve tokens
            rope_theta=10.0,
            tie_word_embeddings=False,
        ),
        compute_dtype="bfloat16",
        max_sequence_length=64,
        # a microbatch of one row varies only in length, so torch compiles just twice
        tokens_per_row=4096,
        logprob_chunk_tokens=1 << 13,
        setup_timeout=600.0,
    )
    trainer.compile.enable = True
    generator = GeneratorConfig(
        dtype="bfloat16", max_model_len=64, max_num_seqs=1024, gpu_memory_utilization=0.3, setup_timeout=600.0
    )
    return GRPOConfig(
        **addition(digits=3),
        trainer=trainer,
        generator=generator,
        steps=100,
        updates_per_step=2,
        # this model is surer of its wrong answers than tiny.py's, so it explores only at a higher
        # temperature
        rollouts=RolloutConfig(groups_per_step=128, group_size=8, temperature=1.5),
        schedule=ScheduleConfig(kind="linear_warmup_linear", learning_rate=1.5e-4, warmup_steps=2, min_ratio=0.1),
        sft=sft_phase(stop_at=0.35, learning_rate=6e-4, batch_size=256),
        sft_steps=2000,
        checkpoint_every=100,
    )
