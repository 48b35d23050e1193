# about: the driver's dma-buf export: into the software HCA, and as far as soft-RoCE goes with it
# limit: 120
source "$HAWK_VM_LIB"
soft_roce && load_stand_ins && load_peer_core || exit 1
program dmabuf --bar /vm/bar --timeout 100
