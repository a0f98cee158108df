#!/usr/bin/env bash
# Runs what takes too long for each change, or fails for reasons that are not the change's.
# - Tests of properties with many new examples.
# - The tests that depend on the version of Flower with the newest flwr-nightly, so that the next release surprises
#   nobody. They run in .venv-nightly: a copy of the environment of tests/run.sh, in which flwr-nightly replaces flwr.
set -euo pipefail
here=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$here"
# shellcheck source=scripts/venv.sh
source scripts/venv.sh
# shellcheck source=.ci/test_versions.sh
source .ci/test_versions.sh
ensure_venv "$here" dev

explored=0
bare tests/run.sh -q -m hypothesis --hypothesis-profile explore || explored=$?

nightly=$here/.venv-nightly
rm -rf "$nightly"
# Hard links take no space. pip and sed replace files and never write into them, so the original stays as it is.
cp -al "$venv" "$nightly" 2>/dev/null || { rm -rf "$nightly" && cp -a "$venv" "$nightly"; }
{ grep -rlIF "$venv" "$nightly/bin" "$nightly/pyvenv.cfg" || true; } | xargs sed -i "s#$venv#$nightly#g"
pip=("$nightly/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" uninstall --yes flwr flwr-nightly
"${pip[@]}" install --pre flwr-nightly
"$nightly/bin/python" - <<'PYTHON'
import importlib.metadata, sys

import flwr

names = {each.name for each in importlib.metadata.distributions() if each.name.startswith("flwr")}
assert flwr.__file__.startswith(sys.prefix) and "flwr" not in names, (flwr.__file__, names)
print("flwr-nightly", importlib.metadata.version("flwr-nightly"))
PYTHON
test_versions "$nightly/bin/python"
exit "$explored"
