# about: ibv_reg_mr fails before the module is loaded and works after; RDMA write and read, seen from the host's side
# limit: 240
# smoke: yes
source "$HAWK_VM_LIB"
soft_roce && load_stand_ins || exit 1
program registration --expect efault --timeout 60
load_peer_core || exit 1
program registration --expect efault --timeout 60
load_client || exit 1
equal "it has registered with the core" registered "$(state peer_memory_core)"
program registration --bar /vm/bar --timeout 200
nothing_left
check "it goes" rmmod hawk_peermem
program registration --expect efault --timeout 60
