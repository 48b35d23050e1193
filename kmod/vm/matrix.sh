#!/usr/bin/env bash
# matrix.sh: builds the module and its stand-ins for every kernel of Debian 12 that they support, with the compiler's
# extra warnings and sparse. Exit status: 0 when all build without a warning.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=common.sh
source "$here/common.sh"

require_debian_12
"$here/packages.sh" --install
failed=0
for suite in bookworm "$vm_suite"; do
    # The tests boot the newer one: its image comes along, so that it is downloaded once.
    image=''
    [[ $suite != "$vm_suite" ]] || image=image
    kernel=$("$here/kernel.sh" "$suite" $image)
    kver=$(<"$kernel/kver")
    # Built anew, and apart from what the tests load: a warning is only given by a compiler that runs.
    build=$here/../build/matrix/$suite
    rm -rf "$build"
    mkdir -p "$build"
    log=$build/log
    status=0
    make -s -C "$here/.." modules test-modules W=1 C=1 BUILD="$(realpath "$build")" \
        KDIR="$kernel/headers/usr/src/linux-headers-$kver" >"$log" 2>&1 || status=$?
    if ((status)) || grep -qE 'warning|error' "$log"; then
        failed=1
        echo "not ok build $kver"
        grep -E 'warning|error|\*\*\*' "$log" | head -n 20 | sed 's/^/    /'
    else
        echo "ok build $kver: W=1 and sparse, no warning"
    fi
done
exit "$failed"
