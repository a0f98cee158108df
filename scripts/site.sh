#!/usr/bin/env bash
# Builds the site of the documentation in build/site. A broken link, anchor or diagram fails the build.
#
#   scripts/site.sh         builds it
#   scripts/site.sh serve   shows it at http://127.0.0.1:8000, and builds it again after each change
#
# Its tools, the `docs` extra, get an environment of their own, .venv-site: neither torch nor Flower is needed, since
# docstrings are read and not imported. Mermaid, which draws the diagrams, comes from the npm registry once; without npm
# diagrams stay text. FLOWER_GPU_REPOSITORY, as in hatch_build.py, and FLOWER_GPU_SITE_URL are the addresses of the
# repository and of the site, where they have one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/venv.sh
source scripts/venv.sh

mermaid=@mermaid-js/tiny@11.17.2
mermaid_sha256=28302a2f6bd556bfd223acff76a1fd511bcc9e6f1cac1bad91b904469aeca102
tools=$(sed -n '/^docs = \[/,/^\]/s/^ *"\(.*\)",.*/\1/p' pyproject.toml)

install_tools() {
  say "installing into .venv-site ..."
  local python
  python=$(find_python ensurepip) || { say "needs a Python with venv and pip" && exit 1; }
  "$python" -m venv --clear .venv-site
  xargs .venv-site/bin/python -m pip install --quiet --disable-pip-version-check <<<"$tools"
  printf '%s\n' "$tools" >.venv-site/.installed
}

get_mermaid() (
  mkdir -p .venv-site/share/mermaid && cd .venv-site/share/mermaid &&
    archive=$(npm pack --silent --ignore-scripts "$mermaid" 2>/dev/null) &&
    echo "$mermaid_sha256  $archive" | sha256sum --check --quiet &&
    tar -xzf "$archive" --strip-components 1 package/LICENSE package/dist/mermaid.tiny.js &&
    mv dist/mermaid.tiny.js . && rmdir dist && rm "$archive"
)

if [[ "$(cat .venv-site/.installed 2>/dev/null)" != "$tools" ]]; then install_tools; fi
library=.venv-site/share/mermaid/mermaid.tiny.js
if [[ ! -e $library ]]; then
  get_mermaid || say "no Mermaid (npm pack $mermaid): diagrams stay text"
fi
# Without Mermaid or Node.js the diagrams cannot be checked.
if [[ -e $library ]] && command -v node >/dev/null; then
  find README.md docs examples -name '*.md' -print0 | xargs -0 node scripts/check_diagrams.js "$library"
fi
export NO_MKDOCS_2_WARNING=1 PATH="$PWD/.venv-site/bin:$PATH" # mkdocstrings looks for ruff there
if [[ ${1:-} == serve ]]; then exec mkdocs serve; fi
mkdocs build --strict "$@" # not --quiet: what is not logged is not counted as a warning
say "built: build/site/index.html"
