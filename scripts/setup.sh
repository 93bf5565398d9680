#!/usr/bin/env bash
# Make .venv for this machine's device (CPU or CUDA). The lock, a list of pinned packages, says which packages to install. If .venv is finished
# and was made in this folder from this lock, do nothing. Otherwise say why, and replace .venv. A .venv with packages that the user has added is
# renamed and not deleted.
#
#   scripts/setup.sh            DEVICE=cpu|cuda and PYTHON=PATH override the detected device and Python
#   scripts/setup.sh --stamp    only print what .venv/stamp must contain so that .venv is not replaced: device, hash of the lock, folder
set -euo pipefail
cd "$(dirname "$0")/.."
started=$SECONDS
# If the user interrupts pip, pip fails with an ordinary error. Without this trap the script would then continue.
trap 'exit 130' INT TERM

say() { echo "[setup] $*"; }
die() { echo "[setup] error: $*" >&2; exit 1; }

device=${DEVICE:-$(nvidia-smi -L 2>/dev/null | grep -q '^GPU ' && echo cuda || echo cpu)}
[[ $device == cpu || $device == cuda ]] || die "DEVICE=$device, but it must be cpu or cuda"
lock=rl_actors/requirements/$device.txt
# The folder is part of the stamp, because a copied .venv would import the code of the original folder.
lock_hash=$(sha256sum < "$lock" | cut -c1-16)
stamp="$device $lock_hash $PWD"
if [[ ${1:-} == --stamp ]]; then echo "$stamp"; exit; fi

# If this script runs twice at the same time (for `make test` and `make grpo`), the second run waits here, so that the two never write into .venv
# at the same time.
exec 9< scripts/setup.sh
flock 9
if [[ -x .venv/bin/python && $(cat .venv/stamp 2>/dev/null) == "$stamp" ]]; then exit; fi

[[ $(uname -sm) == "Linux x86_64" ]] || die "the pinned packages are for Linux x86_64, but this machine is $(uname -sm)"

choose_python() {
    local candidate
    for candidate in "$@"; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            echo "$candidate"; return
        fi
    done
    die "none of $* is Python 3.11 or 3.12 with venv; install one (Debian, Ubuntu: apt install python3.11-venv) or set PYTHON=PATH"
}
if [[ -n ${PYTHON:-} ]]; then candidates=("$PYTHON")
elif [[ $device == cuda ]]; then candidates=(python3.12 python3.11 python3)
else candidates=(python3.11 python3.12 python3); fi

why_replace() {
    local old_device old_lock old_folder why=""
    if [[ ! -f .venv/stamp ]]; then echo "this script did not finish it"; return; fi
    read -r old_device old_lock old_folder < .venv/stamp
    [[ $old_device == "$device" ]] || why+=", it is for $old_device and not for $device"
    [[ $old_device != "$device" || $old_lock == "$lock_hash" ]] || why+=", $lock has changed since .venv was made"
    [[ $old_folder == "$PWD" ]] || why+=", it was made in $old_folder and refers to that folder"
    [[ -x .venv/bin/python ]] || why+=", its Python does not exist any more"
    echo "${why#, }"
}
# The packages of .venv that are neither in the lock nor in .venv/lock.txt, the lock from which .venv was made.
added_packages() {
    comm -23 <(find .venv/lib -maxdepth 3 -name '*.dist-info' -printf '%f\n' | sed -E 's/-[^-]*\.dist-info$//' | as_names) \
        <({ cat "$lock" .venv/lock.txt 2>/dev/null || true; echo "pip setuptools rl-actors" | tr ' ' '\n'; } | sed 's/==.*//' | as_names)
}
as_names() { tr '[:upper:]' '[:lower:]' | sed -E 's/[-_.]+/-/g' | sort -u; }

if [[ -e .venv || -L .venv ]]; then say "replacing .venv: $(why_replace)"; fi
python=$(choose_python "${candidates[@]}")
if [[ -d .venv/lib ]]; then
    added=$(added_packages | xargs)
    if [[ -n $added ]]; then
        kept=.venv-$(date +%Y%m%d-%H%M%S)
        mv .venv "$kept"
        say "the old .venv holds packages that are not in the lock: $added"
        say "so it was renamed $kept; install those packages in the new .venv, and delete $kept when you need nothing from it"
    fi
fi
rm -rf .venv
"$python" -m venv .venv
log=.venv/setup.log
uv_version=uv==0.13.9
pip() { .venv/bin/python -m pip --disable-pip-version-check --no-input install --no-deps --no-compile "$@" >> "$log" 2>&1; }
failed() { tail -n 15 "$log" >&2; die "$1 (whole output: $log); remove the cause and run make setup again"; }

say "installing the $(grep -c == "$lock") packages of $lock into .venv for $device, with $("$python" -V) (some minutes; output: $log)"
if [[ $device == cpu ]]; then
    torch=$(grep '^torch==' "$lock")
    if ! pip "$torch"; then
        say "pip cannot install $torch from its configured sources, so it tries PyTorch's CPU index"
        pip --index-url https://download.pytorch.org/whl/cpu "$torch" || failed "cannot install $torch"
    fi
    say "$torch installed after $((SECONDS - started)) s"
fi
# uv installs the same packages in a fifth of pip's time. uv does not read pip's settings, so this script passes pip's index to uv. If uv cannot be
# installed, or fails to install a package, pip installs the rest.
uv_folder=.venv/uv
index=$(.venv/bin/python -m pip config get global.index-url 2>/dev/null || echo "${PIP_INDEX_URL:-}")
[[ -z $index ]] || export UV_DEFAULT_INDEX=$index
if pip --target "$uv_folder" "$uv_version" &&
    "$uv_folder/bin/uv" pip install --no-progress --no-deps --python .venv/bin/python -r "$lock" >> "$log" 2>&1; then
    say "packages of $lock installed by uv"
else
    say "uv failed, so pip installs the packages of $lock"
    pip -r "$lock" || failed "cannot install $lock"
fi
rm -rf "$uv_folder"
pip --no-build-isolation --editable . || failed "cannot install the project into .venv"
say "packages installed after $((SECONDS - started)) s, compiling and importing them"
# Compile on all cores; pip would use one core. If the compiled files were missing and PYTHONDONTWRITEBYTECODE were set, every process would
# compile the modules that it imports, which takes 30 s of each run.
.venv/bin/python -m compileall -q -j 0 .venv/lib >> "$log" 2>&1 || true     # some packages ship templates that are not Python
.venv/bin/python -c 'import torch, transformers, vllm, monarch.actor, torchtitan, torchstore, reasoning_gym' >> "$log" 2>&1 ||
    failed "the installed packages do not import"
cp "$lock" .venv/lock.txt
echo "$stamp" > .venv/stamp
say "done in $((SECONDS - started)) s"
