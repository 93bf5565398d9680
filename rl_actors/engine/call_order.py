"""The legal order of calls on a trainer, as a state machine of four states.

idle: no gradients are accumulated. open: gradients are accumulated. broken: a call failed,
gradients may be incomplete. inconsistent: a call failed, some weights may have changed.
"""

IDLE = "idle"
OPEN = "open"
BROKEN = "broken"
INCONSISTENT = "inconsistent"

_IDLE_OR_OPEN = {
    "forward",
    "forward_backward",
    "discard_gradients",
    "offload",
    "onload",
    "push_model_state_dict",
    "export_hf",
    "export_lora",
}
# Calls that only read do not change the state. `info` is always legal.
LEGAL = {
    IDLE: _IDLE_OR_OPEN | {"save_checkpoint", "load_checkpoint", "pull_model_state_dict", "profile"},
    OPEN: _IDLE_OR_OPEN | {"optim_step"},
    BROKEN: {"discard_gradients"},
    INCONSISTENT: {"load_checkpoint", "pull_model_state_dict"},
}
_HINT = {
    IDLE: "no gradients are accumulated: call forward_backward first",
    OPEN: "gradients are accumulated: call optim_step or discard_gradients first",
    BROKEN: "the last call failed before it was done: call discard_gradients first",
    INCONSISTENT: "the last call failed and may have changed some of the weights: call load_checkpoint first, or spawn the trainer again",
}


class StepState:
    """forward_backward opens a step, optim_step or discard_gradients closes it, failures break it."""

    def __init__(self) -> None:
        self.state = IDLE

    def require(self, call: str) -> None:
        """Raises RuntimeError if `call` is not legal now."""
        if call not in LEGAL[self.state]:
            raise RuntimeError(f"{call} is not possible while the trainer is {self.state}: {_HINT[self.state]}")

    def open(self) -> None:
        self.state = OPEN

    def close(self) -> None:
        self.state = IDLE

    def mark_broken(self, *, weights: bool) -> None:
        """weights: the failed call may have changed weights, which discard_gradients cannot repair."""
        self.state = INCONSISTENT if weights else BROKEN
