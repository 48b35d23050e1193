# about: the VM has what every other test builds on: soft-RoCE, and a BAR that the host sees
# limit: 120
# smoke: yes
source "$HAWK_VM_LIB"
check "a soft-RoCE device" soft_roce
equal "its state" "ACTIVE" "$(rdma link show rxe0/1 | sed -n 's/.* state \([A-Z]*\) .*/\1/p')"
equal "its GID 1 is the loopback address" "0000:0000:0000:0000:0000:ffff:7f00:0001" "$(cat /sys/class/infiniband/rxe0/ports/1/gids/1)"
equal "the stock kernel has no peer-memory core" "" "$(grep -w ib_register_peer_memory_client /proc/kallsyms)"
equal "a PCI function with a BAR of 64 GiB" "1" "$(lspci -v -d 1af4:1110 | grep -c 'size=64G')"
