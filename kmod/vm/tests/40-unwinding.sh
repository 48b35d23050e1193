# about: a failure at each step unwinds in order and leaks nothing
# limit: 120
source "$HAWK_VM_LIB"
soft_roce && load_stand_ins && load_peer_core && load_client || exit 1
program unwinding --timeout 100
nothing_left
