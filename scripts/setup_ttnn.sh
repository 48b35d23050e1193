#!/usr/bin/env bash
# Makes .venv-ttnn, in which TTNN judges our layouts: ttnn, wolfpine (a simulated chip) and a stand-in compiler.
# ttnn has no wheel for the Python of .venv (docs/ttnn-oracle.md tells more).
#
#   TTNN_PYTHON=/path/to/python3.12   use this interpreter (3.12 or 3.10)
#
# Each step is skipped while its inputs are what they were when it last succeeded.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv-ttnn
stamps=$venv/.stamps
# shellcheck source=scripts/steps.sh
source scripts/steps.sh

fits() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 10)))' >/dev/null 2>&1; }

find_python() {
    if [[ -n "${TTNN_PYTHON:-}" ]]; then
        fits "$TTNN_PYTHON" || fail "TTNN_PYTHON=$TTNN_PYTHON is neither a Python 3.12 nor a 3.10"
        printf '%s' "$TTNN_PYTHON"
        return
    fi
    local candidate versions=${PYENV_ROOT:-$HOME/.pyenv}/versions
    for candidate in python3.12 python3.10 python3 python \
        "$versions"/3.12*/bin/python3.12 "$versions"/3.10*/bin/python3.10; do
        if fits "$candidate"; then
            printf '%s' "$candidate"
            return
        fi
    done
    fail "no Python 3.12 or 3.10 on PATH or in pyenv; ttnn 0.81.1 has wheels for these two only.
  Ubuntu 24.04:  sudo apt-get install -y python3.12-venv
  pyenv:         pyenv install 3.12
  elsewhere:     make setup-ttnn TTNN_PYTHON=/path/to/python3.12"
}

# Names the Debian packages that are missing, one a line. The kernels of TTNN's own ops are compiled with them.
missing_packages() {
    command -v g++ >/dev/null || echo build-essential
    command -v riscv64-unknown-elf-g++ >/dev/null || echo gcc-riscv64-unknown-elf
    [[ -d /usr/lib/picolibc/riscv64-unknown-elf/include ]] || echo picolibc-riscv64-unknown-elf
}

install_packages() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off -q -r requirements/ttnn.txt
}

# The compilers' versions are arguments so that another compiler makes the step run again.
make_root() { "$venv/bin/python" tests/ttnn/compiler/make_root.py "$1"; }

missing=$(missing_packages)
if [[ ${1:-} == --print-missing ]]; then
    [[ -z $missing ]] || printf '%s\n' "$missing"
    exit 0
fi
if [[ -n $missing ]]; then
    missing=$(tr '\n' ' ' <<<"$missing")
    fail "these Debian packages are missing: $missing
  sudo apt-get install -y ${missing% }"
fi

if ! fits "$venv/bin/python"; then
    python=$(find_python)
    say "making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
fi
mkdir -p "$stamps"
step packages "ttnn and wolfpine: 0.9 GB on disk, about a minute the first time" requirements/ttnn.txt install_packages
sources=$(find tests/ttnn/compiler -type f -not -name '*.pyc' | sort | tr '\n' ' ')
step root "the stand-in compiler" "requirements/ttnn.txt $sources" \
    make_root "$PWD/$venv/root" "$(g++ -dumpfullversion)" "$(riscv64-unknown-elf-g++ -dumpfullversion)"
