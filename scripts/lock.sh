#!/usr/bin/env bash
# Rewrite rl_actors/requirements/{cpu,cuda}.txt from pyproject.toml with uv. If pyproject.toml still allows a version that the old file pins, uv
# keeps this version. The script passes its arguments to uv only for cpu.txt, because uv must be told where the CPU build of torch is. So
# `--upgrade` as a further argument upgrades only cpu.txt.
#
#   scripts/lock.sh --torch-backend cpu       # or: --find-links DIR_WITH_THE_CPU_WHEEL_OF_TORCH
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
folder=rl_actors/requirements

lock() {                                                     # lock DEVICE PYTHON UV_OPTION...
    local device=$1 python=$2 out=$folder/$1.txt; shift 2
    uv pip compile pyproject.toml --quiet --extra "$device" --extra loop --extra torchstore --extra wandb --extra kubernetes --extra dev \
        --overrides "$folder/$device-overrides.txt" \
        --python-version "$python" --python-platform x86_64-manylinux_2_39 \
        --no-annotate --no-header --output-file "$out" "$@" > /dev/null
    { sed "s/DEVICE/$device/; s/PYTHON/$python/" <<'EOF'
# Everything that runs and tests rl-actors on DEVICE: Linux x86-64, resolved for Python PYTHON. Install with pip's --no-deps (make setup does).
# Made by scripts/lock.sh: uv pip compile of pyproject.toml, all extras but that of the other device, with torchstore's old pins of torch and Monarch overridden.
EOF
      cat "$out"; } > "$work/out"
    cp "$work/out" "$out"
}
lock cpu 3.11 --excludes "$folder/cpu-excludes.txt" "$@"
lock cuda 3.12
