"""Tests of which modules import which. No module imports a module of a higher level.

LEVELS has the levels. Each folder of controllers has one, and the values are the modules of level 0, such as rl_actors.types.

The function `violations` reads the imports from the source. An import inside a function or under TYPE_CHECKING counts, too. A name that is
looked up at run time, such as `tiny` in `--config tiny`, does not count as an import.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import GUARD

pytestmark = pytest.mark.slow  # `make check` runs this file
ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rl_actors", "controllers", "configs")
# Prefix of a module's name -> level. If several prefixes fit a module, the longest one counts.
LEVELS = {
    "configs": 14,
    "controllers.grpo": 13,
    "controllers.ppo": 13,
    "controllers.sft": 13,
    "controllers.dpo": 13,
    "controllers.service": 12,
    "controllers.tinker_server": 12,
    "controllers.program": 11,
    "controllers.algorithms": 10,
    "controllers.run": 9,
    "controllers.rollouts": 8,
    "controllers.environments": 7,
    "controllers.observe": 6,
    "controllers.config_file": 5,
    "controllers.command": 5,
    "controllers": 5,
    "rl_actors": 4,  # the package's own __init__ imports the clients
    "rl_actors.clients": 4,
    "rl_actors.policy_trainer": 3,
    "rl_actors.generator": 3,
    "rl_actors.engine": 2,
    "rl_actors.vllm": 2,
    "rl_actors.transports": 1,
    "rl_actors.processes": 1,
    "rl_actors.processes.output": 0,
    "rl_actors.processes.threads": 0,
    "rl_actors.adapters": 0,
    "rl_actors.config": 0,
    "rl_actors.field_types": 0,
    "rl_actors.finite": 0,
    "rl_actors.hub": 0,
    "rl_actors.json_files": 0,
    "rl_actors.layouts": 0,
    "rl_actors.losses": 0,
    "rl_actors.memory_estimate": 0,
    "rl_actors.metrics": 0,
    "rl_actors.model_config": 0,
    "rl_actors.model_flops": 0,
    "rl_actors.parts": 0,
    "rl_actors.seeds": 0,
    "rl_actors.texts": 0,
    "rl_actors.trusted_files": 0,
    "rl_actors.types": 0,
    "rl_actors.validation": 0,
}


def level(module: str) -> int | None:
    """The level of a module: 2 for "rl_actors.engine.packing". None for a module outside PACKAGES."""
    parts = module.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((LEVELS[prefix] for prefix in prefixes if prefix in LEVELS), None)


def is_within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def sources(root: Path, *folders: str) -> dict[str, Path]:
    """Maps the name of each module to its file: {"rl_actors.types": root/rl_actors/types.py, "rl_actors": root/rl_actors/__init__.py, ...}"""
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    return {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imports(module: str, path: Path, known: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """Yields (line, imported module). `from rl_actors import types` counts as an import of rl_actors.types, and not of all of rl_actors."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, [base, node.module]))
            for alias in node.names:
                whole = f"{source}.{alias.name}"
                is_module = whole in known or whole == "torchtitan.experiments"
                yield node.lineno, whole if is_module else source


def violations(root: Path) -> list[str]:
    known = sources(root, *PACKAGES, "benchmarks", "tests", "scripts")
    found = []
    for module, path in known.items():
        here = level(module)
        in_engine, in_vllm = is_within(module, "rl_actors.engine"), is_within(module, "rl_actors.vllm")
        for line, imported in imports(module, path, known):
            there = level(imported)
            broken = {
                "imports go downwards": here is not None and there is not None and there > here,
                "the engine, vllm and the values do not import Monarch": (here == 0 or in_engine or in_vllm)
                and is_within(imported, "monarch"),
                "the engine and the values do not import vLLM": (here == 0 or in_engine)
                and is_within(imported, "vllm", "rl_actors.vllm"),
                "no module imports torchtitan.experiments": is_within(imported, "torchtitan.experiments"),
            }
            where = f"{path.relative_to(root)}:{line} imports {imported}"
            found += [f"{where}: {rule}" for rule, is_broken in broken.items() if is_broken]
    return found


def loaded_after(code: str) -> dict:
    """Run `code` in a new process. Returns {"modules": the modules that it has loaded, "cuda": whether it has initialised CUDA}."""
    report = "import json, sys; t = sys.modules.get('torch'); cuda = bool(t and t.cuda.is_initialized())"
    program = f"{code}\n{report}\nprint(json.dumps(dict(modules=list(sys.modules), cuda=cuda)))"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=GUARD)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_no_module_breaks_a_rule_about_imports():
    assert violations(ROOT) == []


def test_every_folder_of_the_packages_has_a_level_of_its_own_and_none_is_left_over():
    folders = {path.parent.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    expected = {".".join(folder.parts) for folder in folders}
    assert {name for name in LEVELS if (ROOT / name.replace(".", "/")).is_dir()} == expected


def test_importing_rl_actors_loads_neither_vllm_nor_torchtitans_trainer_and_does_not_initialise_cuda():
    state = loaded_after("import rl_actors")
    heavy = [
        name for name in state["modules"] if is_within(name, "vllm", "torchtitan.trainer", "torchtitan.experiments")
    ]
    assert (heavy, state["cuda"]) == ([], False)


def test_the_engine_and_what_it_imports_load_neither_monarch_nor_vllm():
    engine = sources(ROOT, "rl_actors/engine")
    state = loaded_after("\n".join(f"import {module}" for module in engine))
    assert [name for name in state["modules"] if is_within(name, "monarch", "vllm")] == []


def test_the_processes_that_compute_rewards_load_neither_torch_nor_monarch():
    state = loaded_after("import controllers.environments.pool")
    assert [name for name in state["modules"] if is_within(name, "torch", "monarch", "transformers")] == []


def test_a_module_of_the_package_is_found_without_an_import_of_its_own():
    code = (
        "import rl_actors; assert rl_actors.types.Sample is rl_actors.Sample; assert not hasattr(rl_actors, 'nothing')"
    )
    assert "rl_actors.types" in loaded_after(code)["modules"]


# Path -> source of each file of a small project that keeps all rules.
TREE = {
    "configs/tiny.py": "from controllers.grpo import train\nfrom rl_actors.config import C\n",
    "controllers/grpo.py": "import rl_actors\nfrom rl_actors.losses import PPO\nfrom .rollouts import groups\n",
    "controllers/rollouts/groups.py": "from rl_actors.clients.trainer import TrainerClient\nimport rl_actors.types as types\n",
    "rl_actors/__init__.py": "from rl_actors.clients.trainer import TrainerClient\n",
    "rl_actors/clients/trainer.py": "import monarch.actor\nfrom rl_actors.engine.packing import Planner\n",
    "rl_actors/engine/packing.py": "import torchtitan.models.qwen3\nfrom rl_actors import types\nfrom ..losses import PPO\n",
    "rl_actors/vllm/engine.py": "from vllm import LLMEngine\nfrom rl_actors import types\n",
    "rl_actors/transports/store.py": "from monarch.actor import Actor\n",
    "rl_actors/losses/__init__.py": "from rl_actors.types import Sample\n",
    "rl_actors/types.py": "import torch\n",
    "rl_actors/config.py": "",
}


@pytest.mark.parametrize(
    # `line` is added to the file `path`. `imported` is the module whose import breaks a rule, or "" if no rule is broken.
    ("path", "line", "imported"),
    [
        (None, "", ""),
        ("controllers/grpo.py", "import configs.tiny", "configs.tiny"),
        (
            "rl_actors/clients/trainer.py",
            "def f():\n    from controllers.rollouts import groups",
            "controllers.rollouts.groups",
        ),
        ("controllers/rollouts/groups.py", "def f():\n    from controllers import grpo", "controllers.grpo"),
        ("rl_actors/types.py", "import configs", "configs"),
        (
            "rl_actors/engine/packing.py",
            "from rl_actors.clients.trainer import TrainerClient",
            "rl_actors.clients.trainer",
        ),
        ("rl_actors/engine/packing.py", "from rl_actors import TrainerClient", "rl_actors"),
        ("rl_actors/engine/packing.py", "from ..clients import trainer", "rl_actors.clients.trainer"),
        ("rl_actors/engine/packing.py", "from monarch.actor import Actor", "monarch.actor"),
        ("rl_actors/engine/packing.py", "import vllm", "vllm"),
        ("rl_actors/losses/__init__.py", "from ..engine import packing", "rl_actors.engine.packing"),
        ("rl_actors/types.py", "import rl_actors.transports.store", "rl_actors.transports.store"),
        ("rl_actors/clients/trainer.py", "from torchtitan.experiments.rl import x", "torchtitan.experiments.rl"),
        ("rl_actors/vllm/engine.py", "from monarch.actor import Actor", "monarch.actor"),
        ("rl_actors/vllm/engine.py", "from rl_actors.engine import packing", ""),
        ("rl_actors/engine/packing.py", "from rl_actors.vllm import engine", "rl_actors.vllm.engine"),
        ("rl_actors/transports/store.py", "from rl_actors.engine import packing", "rl_actors.engine.packing"),
        ("rl_actors/policy_trainer.py", "from rl_actors.clients import trainer", "rl_actors.clients.trainer"),
        ("benchmarks/overhead.py", "from torchtitan import experiments", "torchtitan.experiments"),
    ],
)
def test_violations_finds_exactly_the_imports_that_break_a_rule(tmp_path, path, line, imported):
    tree = dict(TREE)
    if path:
        tree[path] = tree.get(path, "") + line + "\n"
    for name, text in tree.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = violations(tmp_path)
    assert [text.split(" imports ")[1].split(":")[0] for text in found] == ([imported] if imported else [])
