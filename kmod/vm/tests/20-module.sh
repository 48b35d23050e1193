# about: the module as it is installed: loads on a kernel without a peer-memory core, says so, and goes again
# limit: 120
# smoke: yes
source "$HAWK_VM_LIB"
kver=$(uname -r)

# What `make install DESTDIR=...` put together on the host, and of the kernel's modules only what it needs: depmod reads
# them all, which takes an emulator minutes.
tree=/tmp/tree
mkdir -p "$tree/lib/modules/$kver" || exit 1
cp -a "/vm/installed/lib/modules/$kver/updates" "$tree/lib/modules/$kver/" && cp -a /vm/installed/usr/lib/. /usr/lib/ || exit 1
modprobe --show-depends ib_core | sed -n 's/^insmod \(\S*\).*/\1/p' | xargs cp -t "$tree/lib/modules/$kver/" || exit 1
check "depmod" depmod -b "$tree" "$kver"
version=$(sed -n 's/^#define HAWK_PEERMEM_VERSION\s*"\(.*\)"/\1/p' "$kmod/hawk_peermem/peermem.h")
equal "modinfo's version is the source's" "$version" "$(modinfo -b "$tree" -F version hawk_peermem)"
equal "modinfo's license" "GPL" "$(modinfo -b "$tree" -F license hawk_peermem)"
equal "modprobe loads the RDMA core first" "ib_core hawk_peermem" \
    "$(modprobe -d "$tree" --show-depends hawk_peermem | sed -n 's/.*\/\(ib_core\|hawk_peermem\)\.ko.*/\1/p' | paste -sd ' ')"

check "it loads without a peer-memory core" modprobe -d "$tree" hawk_peermem
equal "it knows that there is none" absent "$(state peer_memory_core)"
equal "it says what to use instead, once" 1 "$(dmesg | grep -c 'hawk_peermem: .*dma-buf')"
for counter in regions bytes acquired invalidated not_ours refused map_failures; do
    equal "counter $counter" 0 "$(state $counter)"
done
equal "the driver that it serves" tenstorrent "$(cat /sys/module/hawk_peermem/parameters/owner)"
check "it goes again" rmmod hawk_peermem

# By hand, since no udev runs here: the rule's one action, on the device that it matches.
load_stand_ins || exit 1
equal "the rule's subsystem is the driver's" tenstorrent "$(basename "$(readlink -f /sys/class/tenstorrent/*/subsystem | head -n 1)")"
equal "the rule names the subsystem" 1 "$(grep -c 'SUBSYSTEM=="tenstorrent"' /usr/lib/udev/rules.d/60-hawk-peermem.rules)"
