# about: 500 rounds each of munmap, exit and fork against registrations that begin, run and end
# limit: 420
source "$HAWK_VM_LIB"
soft_roce && load_stand_ins && load_peer_core && load_client || exit 1
program races --iterations 500 --timeout 400
nothing_left
