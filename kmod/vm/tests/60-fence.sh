# about: a software HCA makes no access after an invalidation has returned
# limit: 120
source "$HAWK_VM_LIB"
soft_roce && load_stand_ins && load_peer_core && load_client || exit 1
program fence --bar /vm/bar --timeout 100
nothing_left
