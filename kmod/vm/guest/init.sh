# shellcheck shell=bash
# First process of the VM after the initramfs; run.sh puts it, and the job, into the work folder.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
# shellcheck source=/dev/null  # modules, helpers, script, arguments
source /vm/job

mount -t tmpfs tmpfs /run
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t debugfs debugfs /sys/kernel/debug 2>/dev/null
mount -t tracefs tracefs /sys/kernel/tracing 2>/dev/null
ln -sfn /proc/self/fd /dev/fd
kernel=$(uname -r)
mkdir -p "/lib/modules/$kernel"
mount --bind "$modules" "/lib/modules/$kernel"
ip link set lo up
ulimit -l unlimited
ulimit -c 0

# $helpers/lib.sh holds what test scripts share.
export HAWK_VM_LIB=$helpers/lib.sh
setsid bash "$script" "${arguments[@]}" </dev/null
status=$?
printf '%s\n' "$status" >/vm/status
sync
echo o >/proc/sysrq-trigger
# What is left of the first process must not end before the power is off: that would be a panic.
while :; do sleep 60; done
