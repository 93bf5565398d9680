"""Forwards metrics to TensorBoard, wandb, mlflow and others through accelerate.tracking."""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from controllers.config_file import leaves
from controllers.observe.run_folder import Record, RunFolder

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

# The name of a tracker is also the name of the Python package that the tracker needs.
TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio", "comet_ml", "aim", "clearml", "dvclive", "swanlab"]
Scalars = dict[str, int | float]


def validate_trackers(names: Sequence[str]) -> None:
    """Raises ValueError, with the command that installs it, if a tracker's package is missing."""
    for name in names:
        found = importlib.util.find_spec(name)
        # the folder that wandb or dvclive writes is a namespace package, without an origin
        if found is None or found.origin is None:
            raise ValueError(f"trackers has {name!r}, whose package is not installed: pip install {name}")


class Trackers:
    def __init__(
        self,
        names: Sequence[str],
        folder: RunFolder,
        *,
        project: str,
        config: Mapping[str, object],
        steps_done: int,
    ) -> None:
        """steps_done: TensorBoard drops the values of later steps."""
        self._trackers: list[GeneralTracker] = []
        if not names:
            return
        # a second that a run without trackers need not wait
        from accelerate.state import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS
        from accelerate.utils import clear_environment

        validate_trackers(names)
        # With a scheduler's environment accelerate's PartialState would join a process group.
        with clear_environment():
            PartialState(cpu=True)
        shown_config = {
            name: value if isinstance(value, bool | int | float | str | None) else str(value)
            for name, value in leaves(config)
            if name  # an empty config is a leaf without a name
        }
        for name in dict.fromkeys(names):
            arguments = _arguments(name, folder, project, steps_done)
            tracker = LOGGER_TYPE_TO_CLASS[name](**arguments)
            tracker.start()
            if name != "tensorboard":  # TensorBoard would show the config as if it were a second run
                tracker.store_init_configuration(shown_config)
            self._trackers.append(tracker)

    def log(self, step: int, values: Scalars) -> None:
        for tracker in self._trackers:
            shown = values
            if tracker.name == "mlflow":  # mlflow allows no @ in the name of a metric
                shown = {name.replace("@", "_at_"): value for name, value in values.items()}
            tracker.log(shown, step=step)

    def log_table(self, step: int, name: str, rows: Sequence[Record]) -> None:
        """To every tracker that has tables. All rows have the same keys."""
        if not rows:
            return
        columns = list(rows[0])
        for tracker in self._trackers:
            if hasattr(tracker, "log_table"):
                data = [[row[column] for column in columns] for row in rows]
                tracker.log_table(name, columns=columns, data=data, step=step)

    def finish(self, *, failed: bool) -> None:
        for tracker in self._trackers:
            if failed and tracker.name == "wandb":
                tracker.tracker.finish(exit_code=1)  # accelerate's finish() would show the failed run as finished
            else:
                tracker.finish()
        self._trackers = []


def _arguments(name: str, folder: RunFolder, project: str, steps_done: int) -> dict[str, object]:
    run_name = folder.path.resolve().name
    match name:
        case "tensorboard":
            purge_step = steps_done + 1 if steps_done else None
            return {"run_name": folder.tensorboard.name, "logging_dir": folder.path, "purge_step": purge_step}
        case "wandb":
            # wandb itself reads its environment variables, such as WANDB_MODE=offline.
            settings = {"silent": True, "console": "off"}
            return {"run_name": project, "name": run_name, "dir": folder.path, "settings": settings}
        case "mlflow":
            return {"experiment_name": project, "run_name": run_name}
        case "trackio":
            return {"run_name": project, "name": run_name}
        case _:
            return {"run_name": project}
