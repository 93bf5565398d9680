"""The one register of rows of the table: what measures each, which line of benchmarks/results holds it, what it should reach.

`make bench` lists them, `make bench ROW=NAME` measures one, `make bench ROW=missing` the rest. Imports no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness import results
from benchmarks.harness.rows import ROWS, RUNS

Line = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """What measures it, which line of benchmarks/results holds it, what it should reach."""

    what: str
    num_gpus: int  # at least; 0: a machine without any
    command: tuple[str, ...] = ()  # of `python -m benchmarks`; the first word names the file of results, too
    argument: str = ""  # behind it; one process measures all rows of the same command
    line: str = ""
    measured: Callable[[Line], str]  # what the table says of what `newest` gives
    at_least: dict[str, float] = field(default_factory=dict)  # field of the line -> limit
    at_most: dict[str, float] = field(default_factory=dict)
    quotient_of: tuple[str, ...] = ()  # two other rows: the ratio is of their tokens/s, and there is no command

    @property
    def needs(self) -> str:
        return f"{self.num_gpus} GPU{'s' * (self.num_gpus > 1)}" if self.num_gpus else results.CPU

    def runs_here(self) -> bool:
        count = len(results.gpus())
        return 0 < self.num_gpus <= count if count else self.num_gpus == 0


def plain(name: str) -> str:
    return name.replace("_per_second", "/s").replace("_", " ")


def _beside(line: Line) -> str:
    """tokens_per_second and the one other field that ends so."""
    (other,) = (value for name, value in line.items() if name.endswith("_tokens_per_second"))
    return f"{line['tokens_per_second']:,.0f} beside {other:,.0f} tokens/s"


def _training(line: Line) -> str:
    use = f"MFU {line['mfu_torchtitan']:.3f}, causal {line['mfu_causal']:.3f}; " if line["num_gpus"] else ""
    peaks = f"peak {line['peak_gib']:.1f} beside {line['reference_peak_gib']:.1f} GiB; " if line["num_gpus"] else ""
    kernels = f"{line['attention']} beside flex" if line["num_gpus"] else ""
    return f"{_beside(line)}; {use}{peaks}{kernels}".removesuffix("; ")


def _overhead(line: Line) -> str:
    return f"{line['client_seconds'] * 1e3:,.0f} beside {line['engine_seconds'] * 1e3:,.0f} ms"


def _grpo_step(line: Line) -> str:
    """Seconds of the step and of every phase, and how busy each GPU was, the trainer's first; the rest of the step it was idle."""
    model = line["name"].removesuffix("step")
    phases = [phase for name, phase in line["file"].items() if name.startswith(model) and name != line["name"]]
    named = [f"{phase['name'].removeprefix(model)} {phase['seconds']:.3g} s{_gpus(phase)}" for phase in phases]
    return "; ".join([f"step {line['seconds']:.3g} s{_gpus(line, idle=True)}", *named])


def _gpus(line: Line, *, idle: bool = False) -> str:
    busy = [line[name] for name in sorted(line) if name.endswith("_busy")]
    shares = ", ".join(f"{1 - share if idle else share:.0%}" for share in busy)
    return f" ({'idle' if idle else 'busy'} {shares})" if shares else ""


def _agreement(line: Line) -> str:
    return (
        f"mean difference {line['difference_mean']:.1e}; worst token {line['difference_max']:.1e}; KL {line['kl']:.1e}; "
        f"entropy {line['entropy'][0]:.2f} to {line['entropy'][1]:.2f} nats; {line['steps']} steps"
    )


def _learns(line: Line) -> str:
    return f"held-out accuracy {line['accuracy_before']:.3f} to {line['accuracy']:.3f} in {line['seconds']:.0f} s"


def _run(line: Line) -> str:
    parts = ", ".join(f"{part} {line[f'{part}_seconds']:.3g}" for part in ("generate", "train", "sync"))
    peaks = f"; peak {', '.join(f'{x:.0f}' for x in line['peak_gib'])} GiB" if "peak_gib" in line else ""
    share = f", vLLM's share {line['generator_share']:g}" if "generator_share" in line else ""
    return (
        f"{line['updates']} updates; mean difference of logprobs {line['difference_mean']:.1e}, worst token "
        f"{line['difference_max']:.1e}; {parts} s a step; {line['seconds']:.0f} s in all{peaks}{share}"
    )


def _layout(line: Line) -> str:
    share, figure = max((value, name) for name, value in line.items() if name.endswith("_of_limit"))
    name = figure.removesuffix("_of_limit")
    return f"nearest to its limit: {plain(name)}, {line[name]:.1e}, {share:.0%} of it"


def _float8(line: Line) -> str:
    return (
        f"last loss {line['final']:.4f} beside {line['final_bfloat16']:.4f}; largest difference {line['largest_difference']:.4f} "
        f"at step {line['at_step']}"
    )


def _trainer_twice(line: Line) -> str:
    return f"{line['differing']} of {line['numbers']:,} numbers differ"


def _generator_twice(line: Line) -> str:
    return f"{line['other_tokens']} of {line['completions']} completions have other tokens"


def _quotient(line: Line) -> str:
    return f"{line['over']['tokens_per_second']:,.0f} beside {line['under']['tokens_per_second']:,.0f} tokens/s"


SPEEDS = {"0_6b-16k": 40_000, "0_6b-64k": 14_500, "0_6b-packed": 88_000, "4b-16k": 11_000}  # tokens/s
CALLERS, ONE_CALL, STEP = "32 callers, 1 prompt x 64 each", "one generate, 256 prompts x 64", "step of 1,024 samples"


def _trainer_row(name: str) -> TableRow:
    row, speed = ROWS[name], SPEEDS.get(name.removesuffix("-kept"))
    return TableRow(
        what=f"training beside torchtitan's pieces: {row.model}{f', float8 {row.float8_recipe}' * row.float8}, documents of {row.document:,} in rows of "
        f"{row.row_length:,}{', nothing computed twice' * (row.checkpointing == 'none')}",
        num_gpus=row.num_gpus,
        command=("trainer_speed", name),
        line=name,
        measured=_training,
        at_least={"ratio": 0.98} | ({"tokens_per_second": speed} if speed else {}) if row.num_gpus else {},
    )


def _generation_row(model: str, requests: int, num_gpus: int) -> TableRow:
    return TableRow(
        what=f"generation, {requests:,} requests at once, beside the bare engine",
        num_gpus=num_gpus,
        command=("generation", "--model", model, "--requests"),
        argument=str(requests),
        line=f"{model} {requests} requests",
        measured=_beside,
        at_least={"ratio": 0.95} if num_gpus else {},
    )


def _grpo_row(model: str, num_gpus: int, *arguments: str) -> TableRow:
    return TableRow(
        what="a synchronous GRPO step taken apart",
        num_gpus=num_gpus,
        command=("grpo_step", "--model", model, *arguments),
        line=f"{model} step",
        measured=_grpo_step,
    )


def _packing_row(num_gpus: int, *arguments: str) -> TableRow:
    return TableRow(
        what="samples packed beside padded to 4,096",
        num_gpus=num_gpus,
        command=("packing", *arguments),
        line="packed",
        measured=_beside,
        at_least={"ratio": 3.8} if num_gpus else {},
    )


def _agreement_row(model: str, num_gpus: int) -> TableRow:
    return TableRow(
        what="logprobs of generator and trainer in bfloat16, the worst of all steps",
        num_gpus=num_gpus,
        command=("logprob_agreement", "--model", model),
        line=f"{model} worst of all steps",
        measured=_agreement,
        at_least={"steps": 50} if num_gpus else {},
        at_most={"difference_mean": 0.02, "kl": 1e-3} if num_gpus else {},
    )


def _run_row(config: str, num_gpus: int) -> TableRow:
    return TableRow(
        what=f"a short run of `--config {config}` from a Hugging Face directory",
        num_gpus=num_gpus,
        command=("runs", config),
        line=config,
        measured=_run,
        at_least={"updates": 2},
        at_most={"difference_mean": 0.02, "kl": 1e-3},
    )


def _layout_row(line: str, num_gpus: int) -> TableRow:
    return TableRow(
        what=f"{line} on {num_gpus} GPUs beside one" if "," in line else f"{line}: goes on with the same loss",
        num_gpus=num_gpus,
        command=("layouts",),
        line=line,
        measured=_layout,
        at_least={"within": True},
    )


def _overhead_row(line: str, part: str, **limits: dict[str, float]) -> TableRow:
    return TableRow(
        what=f"{line}, through the client beside the engine alone",
        num_gpus=0,
        command=("overhead", "--repeats", "9"),
        argument=part,
        line=line,
        measured=_overhead,
        **limits,
    )


# In the order in which `missing` measures them.
TABLE = {
    **{name: _trainer_row(name) for name in ROWS if not name.endswith("-kept")},
    "float8-against-bf16": TableRow(
        what="training in float8 beside bfloat16",
        num_gpus=1,
        measured=_quotient,
        at_least={"ratio": 1.2},
        quotient_of=("4b-packed-float8", "4b-packed"),
    ),
    "two-gpus-against-one": TableRow(
        what="training on two GPUs beside one",
        num_gpus=2,
        measured=_quotient,
        at_least={"ratio": 1.9},
        quotient_of=("4b-packed-2gpu", "4b-packed"),
    ),
    **{f"generation-{count}": _generation_row("0_6b", count, 1) for count in (64, 256, 1024)},
    **{f"generation-{count}-cpu": _generation_row("tiny", count, 0) for count in (16, 64)},
    "packed-against-padded": _packing_row(1),
    "packed-against-padded-cpu": _packing_row(0, "--samples", "16", "--ways", "packed"),
    "grpo-step-0_6b": _grpo_row("0_6b", 2, "--steps", "2"),
    "grpo-step-1_7b": _grpo_row("1_7b", 2, "--steps", "2", "--groups", "16"),
    "grpo-step-cpu": _grpo_row("tiny", 0),
    "agreement-0_6b": _agreement_row("0_6b", 1),
    "agreement-cpu": _agreement_row("tiny", 0),
    "learns-small": TableRow(
        what="SFT and GRPO of 13 million parameters on three-digit addition",
        num_gpus=1,
        command=("learns", "--config", "small"),
        line="small",
        measured=_learns,
        at_least={"accuracy": 0.95},
        at_most={"seconds": 480},
    ),
    **{f"run-{name}{'-cpu' * (num_gpus == 0)}": _run_row(name, num_gpus) for name, num_gpus in RUNS.items()},
    **{f"layout-{name}": _layout_row(f"{name}, bfloat16", 2) for name in ("FSDP2", "TP2", "CP2", "PP2")},
    "layout-FSDP2xTP2": _layout_row("FSDP2xTP2, bfloat16", 4),
    "checkpoint-4-to-2": _layout_row("checkpoint FSDP2xTP2 to FSDP2", 4),
    "float8-curve": TableRow(
        what="loss over 100 steps in float8 beside bfloat16",
        num_gpus=1,
        command=("float8",),
        line="float8 against bfloat16",
        measured=_float8,
    ),
    "trainer-twice": TableRow(
        what="the same rollouts through two trainers with deterministic kernels",
        num_gpus=1,
        command=("determinism",),
        line="trainer deterministic",
        measured=_trainer_twice,
        at_least={"bit_equal": True},
    ),
    "generator-twice": TableRow(
        what="seeded requests alone and among others, in vLLM's batch-invariant mode",
        num_gpus=1,
        command=("determinism",),
        line="generator batch-invariant, long prompts, alone and among others",
        measured=_generator_twice,
        at_most={"other_tokens": 0},
    ),
    "overhead-step-cpu": _overhead_row(STEP, "training", at_most={"ratio": 1.1}),
    "overhead-generate-cpu": _overhead_row(ONE_CALL, "generation", at_least={"ratio": 0.9}),
    "overhead-callers-cpu": _overhead_row(CALLERS, "generation", at_least={"ratio": 0.7}),
    **{name: _trainer_row(name) for name in ROWS if name.endswith("-kept")},
}

# Rows of the README, in its order. Rows that were not run are left out there.
HEADLINE = (
    "0_6b-packed",
    "4b-packed",
    "8b-packed-4gpu",
    "generation-256",
    "float8-against-bf16",
    "packed-against-padded",
    "tiny-cpu",
)
