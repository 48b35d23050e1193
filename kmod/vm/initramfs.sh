#!/usr/bin/env bash
# initramfs.sh KERNEL OUT: writes the VM's initramfs. KERNEL is a folder made by `kernel.sh SUITE image`.
#
# It holds busybox, the four modules that a 9p root needs, and an init that mounts the host's / (tag "host",
# read-only, below an overlay in memory) and the work folder (tag "work", writable, at /vm), and hands over to
# /vm/init.sh.
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source=common.sh
source ./common.sh

kernel=${1:?usage: initramfs.sh KERNEL OUT}
out=$(realpath -m "${2:?usage: initramfs.sh KERNEL OUT}")
kver=$(<"$kernel/kver")
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT

mkdir -p "$tree"/{bin,proc,sys,dev,root,lower,upper,modules}
cp /bin/busybox "$tree/bin/busybox"

# In the order of loading: modprobe's dry run names each module's dependencies first.
for module in virtio_pci 9pnet_virtio 9p overlay; do
    modprobe -d "$kernel/image" -S "$kver" --show-depends "$module" | awk '$1 == "insmod" {print $2}'
done | awk '!seen[$0]++' | while read -r file; do
    name=$(basename "$file")
    name=${name%.xz}
    case $file in
    *.xz) xz -dc "$file" >"$tree/modules/$name" ;;
    *) cp "$file" "$tree/modules/$name" ;;
    esac
    printf '%s\n' "$name" >>"$tree/modules/list"
done

cat >"$tree/init" <<'INIT'
#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc; $b mount -t sysfs sysfs /sys; $b mount -t devtmpfs dev /dev
stop() { echo "initramfs: $1"; echo o >/proc/sysrq-trigger; $b sleep 60; }
while read -r m; do $b insmod /modules/$m || stop "insmod $m failed"; done </modules/list
$b mount -t tmpfs tmpfs /upper; $b mkdir -p /upper/data /upper/work
o=trans=virtio,version=9p2000.L,msize=512000
$b mount -t 9p -o ro,$o,cache=loose host /lower || stop "no 9p root"
$b mount -t overlay -o lowerdir=/lower,upperdir=/upper/data,workdir=/upper/work overlay /root || stop "no overlay"
$b mkdir -p /root/vm /root/proc /root/sys /root/dev
$b mount -t 9p -o $o,cache=none work /root/vm || stop "no work folder"
for m in proc sys dev; do $b mount --move /$m /root/$m; done
exec $b switch_root /root /bin/bash /vm/init.sh
INIT
chmod +x "$tree/init"
(cd "$tree" && find . -print0 | cpio --null -o -H newc --quiet | gzip -1) >"$out.new"
mv "$out.new" "$out"
