#!/usr/bin/env bash
# Make .venv-cookbook, the Python environment for the recipes of tinker-cookbook. It has the packages of tests/cookbook/requirements.txt and sees
# those of .venv. If .venv-cookbook is up to date, do nothing.
#
# The tests of tinker-cookbook are only in the source archive of the package. This script copies the test
# validate_temperature_logprobs.py from the archive to .venv-cookbook/tests.
# To make .venv-cookbook, pip needs a package index. A run that does nothing needs no network.
set -euo pipefail
cd "$(dirname "$0")/.."
requirements=tests/cookbook/requirements.txt
venv=.venv-cookbook
stamp="$(cat $requirements scripts/cookbook.sh | sha256sum | cut -c1-16) $(cat .venv/stamp 2>/dev/null || true) $PWD"
if [[ -x $venv/bin/python && $(cat $venv/stamp 2>/dev/null) == "$stamp" ]]; then exit; fi

echo "[cookbook] making $venv"
rm -rf $venv
"$(readlink -f .venv/bin/python)" -m venv $venv
# On the import path the packages of .venv-cookbook come first, and those of .venv after them.
.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$(echo $venv/lib/python*/site-packages)/zz_shared.pth"
$venv/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps -r $requirements
cookbook=$(grep '^tinker-cookbook==' $requirements)
$venv/bin/python -m pip --disable-pip-version-check --no-input download --quiet --no-deps --no-binary tinker-cookbook -d $venv/source "$cookbook"
mkdir $venv/tests
tar -xzf $venv/source/tinker_cookbook-*.tar.gz -C $venv/tests --strip-components 2 --wildcards '*/tests/validate_temperature_logprobs.py'
rm -r $venv/source
$venv/bin/python -c 'import tinker, tinker_cookbook.recipes.math_rl.train'
echo "$stamp" > $venv/stamp
echo "[cookbook] done"
