#!/usr/bin/env bash
# packages.sh: names the Debian packages that the VM and the module's tests need and that are missing, one a line.
# packages.sh --install: installs them (as root).
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source=common.sh
source ./common.sh

# What each is for: the VM; its initramfs; building modules and the test programs; RDMA in the VM.
packages="qemu-system-x86 qemu-system-common seabios ipxe-qemu
busybox-static cpio kmod xz-utils zstd
build-essential gcc-12 bc pahole libelf-dev sparse dkms
rdma-core ibverbs-providers ibverbs-utils libibverbs-dev iproute2 pciutils"

missing() {
    local package
    for package in $packages; do
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || printf '%s\n' "$package"
    done
}

list=$(missing)
case ${1:-} in
'') [[ -z $list ]] || printf '%s\n' "$list" ;;
--install)
    [[ -n $list ]] || exit 0
    list=${list//$'\n'/ }
    [[ $(id -u) == 0 ]] || fail "these Debian packages are missing, and only root may install them: $list
  sudo apt-get install -y --no-install-recommends $list"
    say "installing $list"
    export DEBIAN_FRONTEND=noninteractive
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    # shellcheck disable=SC2086  # a list of names
    if ! { apt-get update -q && apt-get install -y -q --no-install-recommends $list; } >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        fail "apt-get could not install $list"
    fi
    ;;
*) fail "unknown argument: $1 (only --install is known)" ;;
esac
