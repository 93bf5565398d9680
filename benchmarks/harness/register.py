"""The register of all rows of the table in docs/speed.md.

A program of benchmarks/ measures one or several rows. It appends each result to a file, as one line of JSON. A row names its program, the
line of results that belongs to the row, and the targets of the row.
`make bench` lists the rows, `make bench ROW=NAME` measures one row, and `make bench ROW=missing` measures all rows that have no result.
The program gives each result the text of the column "measured". This module does not import
torch, which would delay the list by seconds.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.harness import results
from benchmarks.harness.rows import ROWS, RUNS, Row

Line = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One row of the table.

    A line of results belongs to the row if it has the name that `line` gives, and the values that `fields` and `compared_fields` give.
    """

    what: str  # text of the column "what": what the row measures
    num_gpus: int  # GPUs that the program needs; 0 stands for a machine without GPUs
    # Arguments of `python -m benchmarks`; the first also names the file of results. One process
    # measures all rows with the same command.
    command: tuple[str, ...] = ()
    line: str = ""  # the line's name; "" if the fields identify the line
    fields: dict[str, Any] = field(default_factory=dict)
    # Like `fields`, but these fields describe the program that rl-actors is compared with.
    compared_fields: dict[str, Any] = field(default_factory=dict)
    at_least: dict[str, float] = field(default_factory=dict)  # field of the line -> lowest value that meets the target
    at_most: dict[str, float] = field(default_factory=dict)  # field of the line -> highest value that meets the target
    # Only if this row is a quotient: the names of two other rows. rl-actors' tokens/s in the first row are divided by its tokens/s in the
    # second row. The `compared_fields` of these two rows are ignored.
    quotient_of: tuple[str, ...] = ()

    @property
    def needs(self) -> str:
        """The devices that the row needs, as a text: "2 GPUs", "1 GPU" or "CPU"."""
        if not self.num_gpus:
            return results.CPU
        return "1 GPU" if self.num_gpus == 1 else f"{self.num_gpus} GPUs"

    def runs_here(self) -> bool:
        """True if this machine has the devices. A machine with GPUs runs no row for a CPU, because the program would use the GPUs."""
        count = len(results.gpus())
        return 0 < self.num_gpus <= count if count else self.num_gpus == 0

    def matches(self, line: Line) -> bool:
        """True if the line belongs to this row."""
        has_name = not self.line or line["name"] == self.line
        wanted = self.fields | self.compared_fields
        return has_name and all(line.get(name) == value for name, value in wanted.items())


READABLE = {
    "kl": "KL",
    "ratio_to_first": "ratio to the run that waits",
    "difference_mean": "mean difference",
    "first_line": "seconds to the first line",
}
"""Field -> its name in the table. A field is listed here if its own name would be hard to read even with spaces instead of "_"."""


def plain(name: str) -> str:
    """A field's name in the table: "tokens_per_second" -> "tokens/s", "kl" -> "KL"."""
    return READABLE.get(name) or name.replace("_per_second", "/s").replace("_", " ")


# --- functions that make rows -------------------------------------------------------------------------------------

SPEEDS = {"0_6b-16k": 40_000, "0_6b-64k": 14_500, "0_6b-packed": 88_000, "4b-16k": 11_000}  # targets in tokens/s
CALLERS, ONE_CALL, STEP = "32 callers, 1 prompt x 64 each", "one generate, 256 prompts x 64", "step of 1,024 samples"
KERNELS = {"flash4": "FlashAttention 4", "flex": "flex attention"}
# ROWS also has a row NAME-flex for each of these names. The two rows differ only in the attention kernel.
ON_BOTH_KERNELS = ("0_6b-16k", "0_6b-packed", "4b-packed")


def _model(name: str) -> str:
    """The name of a model in the table: "0_6b" -> "Qwen3 0.6B"."""
    return "the tiny model" if name == "tiny" else f"Qwen3 {name.replace('_', '.').upper()}"


def _shape(row: Row) -> str:
    """The table's text about a shape: "Qwen3 4B, documents of 2,048 in rows of 32,768, FSDP over 2 GPUs"."""
    parts = [_model(row.model)]
    if row.float8:
        parts.append(f"float8 {row.float8_recipe}")
    parts.append(f"documents of {row.document:,} in rows of {row.row_length:,}")
    if row.num_gpus > 1:
        parts.append(f"FSDP over {row.num_gpus} GPUs")
    if row.checkpointing == "none":
        parts.append("nothing recomputed")
    return ", ".join(parts)


def _trainer_row(name: str) -> TableRow:
    """A comparison of our trainer with a trainer made of torchtitan's pieces. A line belongs to the row only if both trainers used the row's
    attention kernel.
    """
    row, speed = ROWS[name], SPEEDS.get(name.removesuffix("-kept"))
    fields = asdict(row)
    if not row.float8:
        del fields["float8_recipe"]  # has no effect without float8
    at_least: dict[str, float] = {}
    if row.num_gpus:
        at_least["ratio"] = 0.98
    if speed:
        at_least["tokens_per_second"] = speed
    kernel = f"; {KERNELS[row.attention]} on both sides" if row.num_gpus else ""
    return TableRow(
        what=f"training compared with torchtitan's own pieces: {_shape(row)}{kernel}",
        num_gpus=row.num_gpus,
        command=("trainer_speed", name),
        fields=fields,
        compared_fields={"reference_attention": row.attention},
        at_least=at_least,
    )


def _kernel_row(name: str) -> TableRow:
    return TableRow(
        what=f"our trainer with FlashAttention 4 compared with flex attention: {_shape(ROWS[name])}",
        num_gpus=ROWS[name].num_gpus,
        quotient_of=(name, f"{name}-flex"),
    )


BEST = "vLLM at its best"


def _generation_row(
    model: str, requests: int, num_gpus: int, tensor_parallel: int = 1, engines: int = 0, ratio: float = 0.0
) -> TableRow:
    """engines: on a GPU; 0: as GeneratorConfig chooses. ratio: the least."""
    how = "" if tensor_parallel == 1 else f", TP{tensor_parallel}"
    options = ("--tensor-parallel", str(tensor_parallel)) if tensor_parallel > 1 else ()
    if engines:
        how = f", {engines} engines"
        options = ("--engines-per-gpu", str(engines))
    return TableRow(
        what=f"generation compared with {BEST}: {_model(model)}{how}, {requests:,} requests at once",
        num_gpus=num_gpus,
        command=("generation", "--model", model, *options, "--requests", str(requests)),
        line=f"{model} {requests} requests{how}",
        fields={"beside": BEST},
        at_least={"ratio": ratio} if ratio else {},
    )


def _replicas_row(model: str, requests: int, num_gpus: int) -> TableRow:
    return TableRow(
        what=f"generation with two replicas compared with one: {_model(model)}, {requests:,} requests at once for each replica",
        num_gpus=num_gpus,
        command=("generation", "--model", model, "--replicas", "2", "--requests", str(requests)),
        line=f"{model} {requests} requests, 2 replicas",
        at_least={"ratio": 1.9} if num_gpus else {},
    )


def _grpo_row(model: str, config: str, num_gpus: int) -> TableRow:
    ahead = num_gpus > 1
    return TableRow(
        what=f"a GRPO step of `--config {config}`"
        + ", and one whose rollouts run ahead compared with the slower of generating and training" * ahead,
        num_gpus=num_gpus,
        command=("grpo_step", "--model", model, *([] if ahead else ["--staleness", "0"])),
        line=f"{model} {config}",
        at_least={"ratio": 0.9} if num_gpus > 1 else {},
    )


def _peer_row(model: str, num_gpus: int, ratio: float) -> TableRow:
    return TableRow(
        what=f"a GRPO step compared with TRL's at its best setting: {_model(model)}",
        num_gpus=num_gpus,
        command=("head_to_head", "--model", model),
        line=f"{model} TRL",
        at_least={"ratio": ratio} if ratio else {},
    )


def _ppo_row(config: str, model: str, num_gpus: int, *arguments: str) -> TableRow:
    return TableRow(
        what=f"the time of a PPO step compared with the total time of the parts that the slowest device runs, each part timed alone: {_model(model)}",
        num_gpus=num_gpus,
        command=("ppo_step", "--config", config, *arguments),
        line=config,
        at_least={"ratio": 0.9} if num_gpus else {},
    )


def _bytes_row(size: str) -> TableRow:
    return TableRow(
        what=f"speed of sending {size} GB of weights to another process through shared memory, compared with a plain copy of the same number of bytes",
        num_gpus=0,
        command=("weight_sync", "--sizes", size),
        line=f"shared memory, {size} GB",
        at_least={"ratio": 0.5},
    )


def _sync_row(model: str, limit: float) -> TableRow:
    return TableRow(
        what=f"seconds of a push and a pull as their callers see them, from one GPU to another: {_model(model)}",
        num_gpus=2,
        command=("weight_sync", "--actors", "--sizes", model),
        line=f"push and pull, {model}, 1 ranks, auto",
        at_most={"seconds": limit},
    )


def _network_row(model: str) -> TableRow:
    return TableRow(
        what=f"seconds of a push and a pull from one GPU to another, with NCCL over the network only, as between hosts: {_model(model)}",
        num_gpus=2,
        command=("weight_sync", "--actors", "--path", "point_to_point", "--network", "--sizes", model),
        line=f"push and pull, {model}, 1 ranks, point_to_point by network",
    )


def _offload_row(model: str) -> TableRow:
    return TableRow(
        what=f"offload and onload of weights, gradients and Adam's state compared with plain copies of the same number of bytes: {_model(model)}",
        num_gpus=1,
        command=("offload", model),
        line=f"offload, {model}",
        at_least={"ratio": 0.6},
    )


def _packing_row(num_gpus: int, *arguments: str) -> TableRow:
    return TableRow(
        what="forward_backward of samples that are packed into rows, compared with samples that are each padded to 4,096 tokens",
        num_gpus=num_gpus,
        command=("packing", *arguments),
        line="packed",
        at_least={"ratio": 3.8} if num_gpus else {},
    )


def _agreement_row(model: str, num_gpus: int) -> TableRow:
    return TableRow(
        what=f"differences between the generator's and the trainer's logprobs in bfloat16, each the largest of all steps: {_model(model)}",
        num_gpus=num_gpus,
        command=("logprob_agreement", "--model", model),
        line=f"{model} worst of all steps",
        at_least={"steps": 50} if num_gpus else {},
        at_most={"difference_mean": 0.02, "kl": 1e-3} if num_gpus else {},
    )


def _run_row(config: str, num_gpus: int) -> TableRow:
    return TableRow(
        what=f"a short run of `--config {config}` from a Hugging Face directory",
        num_gpus=num_gpus,
        command=("runs", config),
        line=config,
        at_least={"updates": 2},
        at_most={"difference_mean": 0.02, "kl": 1e-3},
    )


def _recovery_row(config: str, num_gpus: int) -> TableRow:
    return TableRow(
        what=f"seconds from the kill -9 of one process to the run's next step, with `--config {config}`",
        num_gpus=num_gpus,
        command=("recovery", config),
        line=config,
    )


def _overhead_row(line: str, part: str, what: str, **limits: dict[str, float]) -> TableRow:
    return TableRow(
        what=f"{what}: the client compared with the engine without actors",
        num_gpus=0,
        command=("overhead", "--repeats", "9", part),
        line=line,
        **limits,
    )


def _serve_rows(model: str = "") -> dict[str, TableRow]:
    """Rows of the Tinker server.

    model: a value of --model of benchmarks.serve_overhead, for rows on one GPU. With "" the rows are for the config tiny_chat on a CPU.
    """
    prefix, suffix = (f"{model}: ", model) if model else ("", "cpu")
    lines: dict[str, tuple[str, str, dict[str, dict[str, float]]]] = {
        "samples": ("256 requests of 32 + 128 tokens", "sampling", {"at_least": {"ratio": 0.85}}),
        "small-sample": ("1 request of 8 + 1 tokens", "sampling", {}),
        "step": ("step of 1,024 samples of 256 tokens", "training", {"at_most": {"ratio": 1.15}}),
        "small-step": ("step of 1 sample of 9 tokens", "training", {}),
    }
    rows = {}
    for name, (line, part, limits) in lines.items():
        rows[f"serve-{name}-{suffix}"] = TableRow(
            what=f"calls through the Tinker SDK and the server, compared with calls through the actors' clients; {prefix}{line}",
            num_gpus=1 if model else 0,
            command=("serve_overhead", *(("--model", model) if model else ()), part),
            line=f"{prefix}{line}",
            **limits,
        )
    if not model:
        rows["serve-samples-beside-training-cpu"] = TableRow(
            what="the Tinker server, 256 requests of 32 + 128 tokens: the time while another client trains, compared with the time while no client trains",
            num_gpus=0,
            command=("serve_overhead", "together"),
            line="256 requests beside training",
        )
    return rows


# The rows by name, in the order in which `make bench ROW=missing` measures them.
TABLE = {
    **{name: _trainer_row(name) for name in ROWS if not name.endswith("-kept")},
    **{f"kernel-{name}": _kernel_row(name) for name in ON_BOTH_KERNELS},
    "float8-against-bf16": TableRow(
        what=f"our trainer in float8 compared with bfloat16: {_shape(ROWS['4b-packed'])}",
        num_gpus=1,
        at_least={"ratio": 1.2},
        quotient_of=("4b-packed-float8", "4b-packed"),
    ),
    "two-gpus-against-one": TableRow(
        what=f"our trainer on two GPUs compared with one: {_shape(ROWS['4b-packed'])}",
        num_gpus=2,
        at_least={"ratio": 1.9},
        quotient_of=("4b-packed-2gpu", "4b-packed"),
    ),
    **{
        f"generation-{count}": _generation_row("0_6b", count, 1, ratio=ratio)
        for count, ratio in ((64, 0.95), (256, 1.3), (1024, 1.7))
    },
    **{
        f"generation-1024-{engines}-engines": _generation_row("0_6b", 1024, 1, engines=engines) for engines in (1, 2, 4)
    },
    "generation-256-4b": _generation_row("4b", 256, 1, ratio=1.0),
    **{
        f"generation-{count}-tp2": _generation_row("0_6b", count, 2, tensor_parallel=2, ratio=0.95)
        for count in (64, 256, 1024)
    },
    "generation-256-two-replicas": _replicas_row("0_6b", 256, 2),
    **{f"generation-{count}-cpu": _generation_row("tiny", count, 0) for count in (16, 64, 256)},
    "packed-against-padded": _packing_row(1),
    "packed-against-padded-cpu": _packing_row(0, "--samples", "16", "--ways", "packed"),
    "grpo-step-0_6b": _grpo_row("0_6b", "qwen3_0_6b", 2),
    "grpo-step-0_6b-one-gpu": _grpo_row("0_6b", "qwen3_0_6b_one_gpu", 1),
    "grpo-step-cpu": _grpo_row("tiny", "tiny", 0),
    "trl-0_6b": _peer_row("0_6b", 1, 2.5),
    "trl-1_7b": _peer_row("1_7b", 1, 2.0),
    "trl-cpu": _peer_row("tiny", 0, 0.0),
    "ppo-step-0_6b": _ppo_row("qwen3_0_6b_ppo", "0_6b", 2),
    "ppo-step-4b": _ppo_row("qwen3_4b_ppo", "4b", 2, "--samples", "512"),
    "ppo-step-cpu": _ppo_row("tiny_ppo", "tiny", 0),
    **{f"weights-{size}gb-cpu": _bytes_row(size) for size in ("0.1", "0.5", "1.2")},
    **{f"weights-{model}": _sync_row(model, limit) for model, limit in (("0_6b", 0.1), ("4b", 0.2), ("8b", 0.8))},
    **{f"weights-{model}-network": _network_row(model) for model in ("0_6b", "4b")},
    "ahead-cpu": TableRow(
        what="a run of the tiny model whose generator works ahead of the trainer by at most two versions, compared with a run whose "
        "rollouts wait for the trainer; rewards take 1.5 s on average",
        num_gpus=0,
        command=("async_loop", "--staleness", "0", "2", "--steps", "60", "--seconds", "1.5"),
        line="staleness 2, rewards of 1.5 s",
        at_least={"ratio_to_first": 1.4},
    ),
    "offload-0_6b": _offload_row("0_6b"),
    "offload-4b": _offload_row("4b"),
    "agreement-0_6b": _agreement_row("0_6b", 1),
    "agreement-cpu": _agreement_row("tiny", 0),
    "generation-256-8b-fp8": TableRow(
        what=f"generation in float8 compared with bfloat16: {_model('8b')}, 256 requests at once",
        num_gpus=1,
        command=("generation", "--model", "8b", "--quantization", "fp8", "--requests", "256"),
        line="8b 256 requests, fp8",
        at_least={"ratio": 1.2},
    ),
    "agreement-8b-fp8": TableRow(
        what=f"differences between the logprobs of the generator in float8 and of the trainer in bfloat16: {_model('8b')}",
        num_gpus=2,
        command=("logprob_agreement", "--model", "8b", "--quantization", "fp8"),
        line="8b, fp8, worst of all steps",
        at_most={"difference_mean": 0.03},
    ),
    "learns-small": TableRow(
        what="supervised steps and GRPO of a model of 13 million parameters on three-digit addition",
        num_gpus=1,
        command=("learns", "--config", "small"),
        line="small",
        at_least={"accuracy": 0.95},
        at_most={"seconds": 480},
    ),
    "startup-cpu": TableRow(
        what="the start of a run, from the command to the first line of metrics.jsonl: config `tiny`, median of three",
        num_gpus=0,
        command=("startup",),
        line="start",
        at_most={"first_line": 15},
    ),
    "startup-0_6b": TableRow(
        what=f"the start of a run whose kernels were compiled before, from the command to its first step: {_model('0_6b')}, median of all starts but the first",
        num_gpus=1,
        command=("startup", "--model", "0_6b"),
        line="0_6b start",
        at_most={"first_line": 60},
    ),
    "make-grpo-cpu": TableRow(
        what="the whole run of `make grpo`, median of three",
        num_gpus=0,
        command=("startup", "--whole"),
        line="whole run",
        at_least={"accuracy": 0.9},
        at_most={"seconds": 150},
    ),
    **{f"run-{name}{'-cpu' * (num_gpus == 0)}": _run_row(name, num_gpus) for name, num_gpus in RUNS.items()},
    "recovery-0_6b": _recovery_row("qwen3_0_6b", 2),
    "recovery-cpu": _recovery_row("tiny", 0),
    "float8-curve": TableRow(
        what="loss of the 100th step in float8 compared with bfloat16, and the largest difference in the 100 steps",
        num_gpus=1,
        command=("float8",),
        line="float8 against bfloat16",
    ),
    "overhead-step-cpu": _overhead_row(STEP, "training", "a training step of 1,024 samples", at_most={"ratio": 1.1}),
    "overhead-generate-cpu": _overhead_row(
        ONE_CALL, "generation", "one generate of 256 prompts, 64 new tokens each", at_least={"ratio": 0.9}
    ),
    "overhead-callers-cpu": _overhead_row(
        CALLERS, "generation", "32 callers with one prompt each, 64 new tokens a prompt", at_least={"ratio": 0.7}
    ),
    **_serve_rows("0_6b"),
    **_serve_rows(),
    **{name: _trainer_row(name) for name in ROWS if name.endswith("-kept")},
}

# Names of the rows in the README's table, in the order of the table. The table leaves out rows that have no result.
HEADLINE = ("trl-0_6b", "generation-256", "0_6b-packed")
