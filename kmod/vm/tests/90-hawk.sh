# about: all of HAWK: packed KV pulled over RDMA by unchanged Mooncake into the windows of all eight banks
# limit: 600
# judge: .venv/bin/python -m tests.kmod.bar "$WORK/hawk/job" "$BAR"
source "$HAWK_VM_LIB"
repository=$(cd "$kmod/.." && pwd)
python=$repository/.venv/bin/python
folder=/vm/hawk
cd "$repository" || exit 1
[[ -x $python ]] || { echo "not ok there is no $python: make setup makes it"; exit 1; }
export PYTHONDONTWRITEBYTECODE=1 MC_LOG_LEVEL=ERROR

soft_roce && load_stand_ins && load_peer_core || exit 1
mkdir "$folder"
timeout 580 "$python" -m tests.kmod.prefill_side "$folder" &
prefill=$!
timeout 580 "$python" -m tests.kmod.decode_side "$folder" &
decode=$!

# Decode first finds out what happens without the module.
until [[ -e $folder/refused ]]; do
    kill -0 "$decode" || { echo "not ok decode ended before it was refused"; exit 1; }
    sleep 0.2
done
load_client || exit 1
touch "$folder/loaded"

wait "$decode"
status=$?
equal "the decode side's exit status" 0 "$status"
((status == 0)) || kill "$prefill"
wait "$prefill"
equal "the prefill side's exit status" 0 $?
