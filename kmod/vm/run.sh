#!/usr/bin/env bash
# run.sh [options] SCRIPT [ARG...]: boots Debian's kernel in QEMU and runs SCRIPT there, as root, with bash.
#
#   --work DIR       shared with the VM, writable, at /vm (default: a temporary folder, removed at the end)
#   --log FILE       where the console goes (default: standard output)
#   --timeout SEC    after which the VM is killed (default 300)
#   --bar FILE       a file that the VM sees as BAR 2 of a PCI function (ivshmem-plain); its size is a power of 2
#   --suite SUITE    the kernel (default bookworm-backports)
#   --append ARGS    added to the kernel's command line
#   --memory SIZE    (default 3G)    --cpus N (default 2)
#
# Exit status: SCRIPT's; 124 after the time-out; 125 when the VM ended before SCRIPT did (a panic, no 9p).
# QEMU emulates (TCG), so that /dev/kvm is not needed. It is killed on every way out of this script, SIGKILL
# included. The VM's / is the host's, read-only under an overlay in memory, so what is installed here runs there.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=common.sh
source "$here/common.sh"

work='' log='' timeout=300 bar='' suite=$vm_suite append='' memory=3G cpus=2
while [[ ${1:-} == --* ]]; do
    [[ $# -ge 2 ]] || fail "$1 needs a value"
    case $1 in
    --work) work=$2 ;;
    --log) log=$2 ;;
    --timeout) timeout=$2 ;;
    --bar) bar=$2 ;;
    --suite) suite=$2 ;;
    --append) append=$2 ;;
    --memory) memory=$2 ;;
    --cpus) cpus=$2 ;;
    *) fail "unknown option $1" ;;
    esac
    shift 2
done
script=$(realpath -e "${1:?usage: run.sh [options] SCRIPT [ARG...]}")
shift

qemu='' own_work=''
end() {
    trap - EXIT
    if [[ -n $qemu ]]; then
        kill -KILL "$qemu" 2>/dev/null || true
        wait "$qemu" 2>/dev/null || true
    fi
    [[ -z $own_work ]] || rm -rf "$own_work"
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

if [[ -z $work ]]; then
    own_work=$(mktemp -d)
    work=$own_work
fi
work=$(realpath -e "$work")
kernel=$("$here/kernel.sh" "$suite" image)
kver=$(<"$kernel/kver")
initramfs=$work/initramfs
"$here/initramfs.sh" "$kernel" "$initramfs"

rm -f "$work/status"
cp "$here/guest/init.sh" "$work/init.sh"
{
    printf 'modules=%q\nhelpers=%q\nscript=%q\n' "$kernel/image/lib/modules/$kver" "$here/guest" "$script"
    printf 'arguments=('
    printf '%q ' "$@"
    printf ')\n'
} >"$work/job"

devices=()
if [[ -n $bar ]]; then
    bar=$(realpath -e "$bar")
    devices+=(-object "memory-backend-file,id=bar,share=on,mem-path=$bar,size=$(stat -c %s "$bar")"
        -device ivshmem-plain,memdev=bar)
fi
[[ -z $log ]] || exec 3>"$log"
[[ -n $log ]] || exec 3>&1

# A killed run.sh takes QEMU with it (pdeathsig), and QEMU ends with the guest (-no-reboot, panic=-1).
setpriv --pdeathsig KILL qemu-system-x86_64 \
    -machine q35 -accel tcg,thread=multi,tb-size=512 -cpu max -smp "$cpus" -m "$memory" \
    -nodefaults -no-user-config -display none -serial stdio -no-reboot \
    -kernel "$kernel/image/boot/vmlinuz-$kver" -initrd "$initramfs" \
    -append "console=ttyS0 quiet panic=-1 rcupdate.rcu_cpu_stall_suppress=1 mitigations=off $append" \
    -fsdev "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap" \
    -device virtio-9p-pci,fsdev=host,mount_tag=host \
    -fsdev "local,id=work,path=$work,security_model=none,multidevs=remap" \
    -device virtio-9p-pci,fsdev=work,mount_tag=work \
    -device virtio-rng-pci "${devices[@]}" </dev/null >&3 2>&1 9>&- &
qemu=$!

deadline=$((SECONDS + timeout))
while kill -0 "$qemu" 2>/dev/null; do
    if ((SECONDS >= deadline)); then
        say "the VM is killed: it has run for $timeout s"
        exit 124
    fi
    sleep 0.2
done
wait "$qemu" || say "QEMU ended with status $?"
qemu=''
if [[ ! -s $work/status ]]; then
    say "the VM ended before $(basename "$script") did${log:+; its console is in $log}"
    exit 125
fi
exit "$(<"$work/status")"
