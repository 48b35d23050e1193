# about: munmap, mremap, mprotect, fork, exec, exit, FREE_TLB, unloading and removal with a live registration
# limit: 180
source "$HAWK_VM_LIB"
soft_roce && load_stand_ins && load_peer_core && load_client || exit 1
program lifetime --bar /vm/bar --timeout 160
nothing_left
