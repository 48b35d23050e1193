# shellcheck shell=bash
# Sourced by the scripts in this folder: messages, the cache, what must be installed.

# Kernels, downloaded once. Outside the repository: `make clean` and a fresh clone keep them.
cache=${XDG_CACHE_HOME:-$HOME/.cache}/hawk/kmod

# The suite of the kernel that boots in the VM. It has virtio-pci built in, soft-RoCE and follow_pfnmap_start().
# shellcheck disable=SC2034  # used by the sourcing scripts
vm_suite=bookworm-backports

say() { printf '==> %s\n' "$*" >&2; }
fail() {
    printf '%s: %s\n' "$(basename "$0" .sh)" "$*" >&2
    exit 1
}

# require_debian_12: the kernels come from Debian 12's archive and are built for with its gcc.
require_debian_12() {
    local id='' version=''
    if [[ -r /etc/os-release ]]; then
        id=$(. /etc/os-release && printf '%s' "${ID:-}")
        version=$(. /etc/os-release && printf '%s' "${VERSION_ID:-}")
    fi
    [[ $id == debian && $version == 12 ]] || fail "this needs Debian 12 on x86-64: its kernels are
  downloaded with apt, and its QEMU, gcc and user space run in the VM. Found: ${id:-unknown} ${version}."
    [[ $(dpkg --print-architecture) == amd64 ]] || fail "this needs an amd64 Debian, not $(dpkg --print-architecture)"
}
