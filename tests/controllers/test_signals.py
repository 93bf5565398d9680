"""Tests of real runs that get Ctrl-C or SIGTERM: the checkpoint, the resumed run, the screen and the exit status."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time

import pytest
from test_grpo import PARITY, ROOT, processes_of
from waiting import GUARD, wait_until

from controllers.observe.run_folder import RunFolder, read_jsonl
from controllers.run import checkpoints
from controllers.run.interruption import REPEATED_WITHIN

WIDTH = 200
LONG = ["--config", "tiny", "--steps", "1000", "--checkpoint-every", "1000", "--evaluate-every", "1000"]
LONG += ["--rollouts.groups-per-step", "8", *PARITY]
SLOW_STEPS = ["--sft.batch-size", "20000", "--samples-per-forward-backward", "20000"]  # each step takes seconds


class Terminal:
    """A run of controllers.grpo in a terminal of its own.

    Ctrl-C in the terminal sends SIGINT to all processes of the run, except those in a session of their own, such as
    vLLM's core.
    marker: a text in the environment of all processes of the run, by which `processes_of` finds them.
    """

    def __init__(self, *arguments: object, marker: str) -> None:
        self.control, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 40, WIDTH, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "controllers.grpo", *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, "TERM": "xterm", "RL_ACTORS_TEST_MARKER": marker},
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
            preexec_fn=self._take_terminal,
        )
        os.close(inside)
        self.written = b""
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _take_terminal(self) -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self.control, 1 << 16)
            except OSError:  # the last process of the terminal has ended
                return
            self.written += chunk

    def press_ctrl_c(self) -> None:
        os.write(self.control, b"\x03")

    def shows(self, text: str) -> bool:
        return any(text in line for line in screen(self.written.decode(errors="replace")))

    def finish(self) -> list[str]:
        """Wait for the end of the program. Returns the lines that the terminal then shows."""
        try:
            self.process.wait(GUARD)
        finally:
            self.process.kill()
            self.reader.join(GUARD)
            os.close(self.control)
        return screen(self.written.decode(errors="replace"))


def screen(written: str) -> list[str]:
    """The lines that a terminal shows after a program has written these characters.

    The terminal is WIDTH columns wide and high enough for all lines.
    """
    lines, row, column = [""], 0, 0
    for code, letter, character in re.findall(r"\x1b\[([?\d;]*)([A-Za-z])|(.)", written, re.DOTALL):
        if letter == "A":
            row = max(0, row - int(code or 1))
        elif letter == "K":
            lines[row] = ""
        elif character == "\r":
            column = 0
        elif character == "\n":
            row += 1
        elif character >= " ":
            if column == WIDTH:
                row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
            before = lines[row].ljust(column)
            lines[row] = before[:column] + character + before[column + 1 :]
            column += 1
        lines += [""] * (row + 1 - len(lines))
    return [line.rstrip() for line in lines]


def steps_of(folder: RunFolder) -> list[int]:
    return [record["step"] for record in read_jsonl(folder.metrics)]


def newest_step(folder: RunFolder) -> int | None:
    newest = checkpoints.newest(folder.checkpoints)
    return checkpoints.read(newest)["step"] if newest else None


@pytest.mark.slow
def test_after_ctrl_c_a_run_finishes_its_step_saves_a_checkpoint_and_leaves_one_panel_on_the_screen(tmp_path):
    folder, marker = RunFolder(tmp_path / "run"), str(tmp_path)
    terminal = Terminal("--output-dir", folder.path, *LONG, "--sft-steps", 3, marker=marker)
    wait_until(lambda: len(steps_of(folder)) > 5, "a GRPO step")
    terminal.press_ctrl_c()
    shown = "\n".join(terminal.finish())
    assert terminal.process.returncode == 130, shown
    steps = steps_of(folder)
    assert steps == list(range(len(steps)))
    assert newest_step(folder) == steps[-1]
    outcome = json.loads(folder.outcome.read_text())
    assert (outcome["status"], outcome["error"], outcome["step"]) == ("interrupted", "SIGINT", steps[-1])
    command = f"python -m controllers.grpo --resume {folder.path}"
    assert f"to continue this run from step {steps[-1] + 1}: {command}" in shown
    assert sum(" elapsed, " in line for line in shown.splitlines()) == 1, shown
    assert "Traceback" not in shown
    wait_until(lambda: not processes_of(marker), "the end of the run's processes")


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_run_at_once_and_without_a_checkpoint(tmp_path):
    folder, marker = RunFolder(tmp_path / "run"), str(tmp_path)
    terminal = Terminal("--output-dir", folder.path, *LONG, "--sft-steps", 1000, *SLOW_STEPS, marker=marker)
    wait_until(lambda: steps_of(folder), "the first step")
    terminal.press_ctrl_c()
    wait_until(lambda: terminal.shows("SIGINT: "), "the answer to Ctrl-C")
    time.sleep(REPEATED_WITHIN)  # until then the run ignores a second signal
    terminal.press_ctrl_c()
    shown = "\n".join(terminal.finish())
    assert terminal.process.returncode == 130, shown
    assert newest_step(folder) is None
    assert json.loads(folder.outcome.read_text())["status"] == "interrupted"
    assert "no checkpoint is complete" in shown and "Traceback" not in shown
    wait_until(lambda: not processes_of(marker), "the end of the run's processes")


@pytest.mark.slow
def test_sigterm_to_every_process_leaves_a_checkpoint_that_a_resumed_run_continues_from(tmp_path):
    """A scheduler sends SIGTERM to all processes of a job."""
    folder, marker = RunFolder(tmp_path / "run"), str(tmp_path)
    terminal = Terminal("--output-dir", folder.path, *LONG, "--sft-steps", 3, marker=marker)
    wait_until(lambda: len(steps_of(folder)) > 5, "a GRPO step")
    for process in processes_of(marker):
        process.send_signal(signal.SIGTERM)
    shown = "\n".join(terminal.finish())
    assert terminal.process.returncode == 143, shown
    before = read_jsonl(folder.metrics)
    assert newest_step(folder) == before[-1]["step"]
    wait_until(lambda: not processes_of(marker), "the end of the run's processes")
    last = before[-1]["step"] + 2
    # --steps counts only GRPO steps. The 3 supervised steps come before them.
    resumed = Terminal("--resume", folder.path, "--steps", last - 3, marker=marker)
    shown = "\n".join(resumed.finish())
    assert resumed.process.returncode == 0, shown
    after = read_jsonl(folder.metrics)
    assert after[: len(before)] == before
    assert [record["step"] for record in after] == list(range(last + 1))
    assert after[len(before)]["policy_version"] == before[-1]["policy_version"] + 1


@pytest.mark.slow
def test_a_run_without_checkpoints_prints_no_command_that_resumes_it(tmp_path):
    folder, marker = RunFolder(tmp_path / "run"), str(tmp_path)
    terminal = Terminal("--output-dir", folder.path, *LONG, "--sft-steps", 3, "--checkpoint-every", 0, marker=marker)
    wait_until(lambda: steps_of(folder), "the first step")
    terminal.press_ctrl_c()
    shown = "\n".join(terminal.finish())
    assert terminal.process.returncode == 130, shown
    assert not folder.checkpoints.exists() and "--resume" not in shown
