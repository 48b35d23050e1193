# about: hawk doctor on a machine that has all of it: the driver, its windows, soft-RoCE, and the module or not
# limit: 240
source "$HAWK_VM_LIB"
repository=$(cd "$kmod/.." && pwd)
cd "$repository" || exit 1
[[ -x .venv/bin/hawk ]] || { echo "not ok there is no .venv/bin/hawk: make setup makes it"; exit 1; }
export PYTHONDONTWRITEBYTECODE=1

# The shipped deployment, with the line that makes reads end in windows.
sed 's/# \(landing: {path: direct\)/\1/' configs/gpu-tenstorrent.yaml >/tmp/direct.yaml

# verdict NAME: of the last look.
look() { timeout 110 .venv/bin/hawk doctor --side decode --config /tmp/direct.yaml --no-self-test --json >/tmp/looked; }
verdict() {
    .venv/bin/python -S -c 'import json, sys
print(*[check["status"] for check in json.load(open("/tmp/looked"))["checks"] if check["name"] == sys.argv[1]])' "$1"
}

soft_roce && load_stand_ins && load_peer_core || exit 1
look
equal "without the module it says that peer memory is missing" fail "$(verdict "peer memory")"
load_client || exit 1
look
for name in "peer memory" "NPU driver" "NPU chips" "bank windows" "BAR sizes" "RDMA devices" "RDMA ports" verbs; do
    equal "verdict on $name" pass "$(verdict "$name")"
done
cp /tmp/looked /vm/doctor.json
