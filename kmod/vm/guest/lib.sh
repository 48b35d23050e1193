# shellcheck shell=bash
# Sourced by scripts that run in the VM.

# The modules and programs that `make modules test-modules test-programs` built on the host.
kmod=$(cd "$(dirname "$HAWK_VM_LIB")/../.." && pwd)
built=$kmod/build/$(uname -r)
programs=$kmod/build/programs

# soft_roce: an RDMA device over the loopback interface, named rxe0. Its usable GID is number 1 (127.0.0.1).
soft_roce() {
    modprobe rdma_rxe && modprobe ib_uverbs || return 1
    rdma link show rxe0/1 >/dev/null 2>&1 || rdma link add rxe0 type rxe netdev lo
}

# In the order of loading. Each fails, with what the kernel said, when the module does not load.
stand_ins="hawk_npu_bus tenstorrent"
load() {
    insmod "$@" || {
        echo "not ok insmod $*"
        dmesg | tail -n 5
        return 1
    }
}

# load_stand_ins: the NPU (/dev/tenstorrent/0) whose BAR is the host's file /vm/bar.
load_stand_ins() {
    local module
    for module in $stand_ins; do
        [[ -d /sys/module/$module ]] || load "$built/test/npu/$module.ko" || return 1
    done
}

# load_peer_core [PARAMETER=VALUE...]: the stand-in peer-memory core. Needs soft_roce before it.
load_peer_core() { load "$built/test/peer_core/hawk_peer_core.ko" "$@"; }

# load_client [PARAMETER=VALUE...]: hawk_peermem, which finds the core when it is loaded.
load_client() {
    load "$built/test/hawk_peermem/hawk_peermem.ko" "$@" || return 1
    at_first=$(allocations hawk_peermem)
}

# unload_modules: all of these, last first; fails where one is still in use.
unload_modules() {
    local module
    for module in hawk_peermem hawk_peer_core tenstorrent hawk_npu_bus; do
        [[ ! -d /sys/module/$module ]] || rmmod "$module" || return 1
    done
}

# program NAME [OPTION...]: one of test/programs, whose lines are checks; its death is a failed one.
program() {
    local status=0
    "$programs/$1" "${@:2}" || status=$?
    ((status <= 1)) || echo "not ok program $*: expected status 0 or 1, got $status"
}

# nothing_left: no registration, and no memory for one, since load_client.
nothing_left() {
    local now
    now=$(allocations hawk_peermem)
    equal "regions that are left" 0 "$(state regions)"
    equal "bytes that are left" 0 "$(state bytes)"
    if ((now > at_first)); then
        echo "not ok memory for regions that is left: expected $at_first objects, as after loading, got $now"
        grep -h -B 3 -A 12 '\[hawk_peermem\]' /sys/kernel/debug/slab/*/alloc_traces | sed 's/^/    /'
    else
        echo "ok memory for regions that is left"
    fi
}

# state NAME: one of hawk_peermem's counters.
state() { cat "/sys/module/hawk_peermem/state/$1"; }

# allocations MODULE: objects in the slabs whose allocation has MODULE's code on its stack (needs slub_debug=U).
# Some are there from the start: sysfs files, and what other modules' init code, whose place it took, once allocated.
allocations() {
    cat /sys/kernel/debug/slab/*/alloc_traces 2>/dev/null | awk -v module="[$1]" '
        /^ *[0-9]+ .* age=/ { count = $1; counted = 0 }
        index($0, module) && !counted { sum += count; counted = 1 }
        END { print sum + 0 }'
}

# check NAME COMMAND...: prints "ok NAME" when the command succeeds; else "not ok NAME", and goes on.
check() {
    local name=$1 status=0
    shift
    "$@" || status=$?
    if ((status)); then
        echo "not ok $name: expected status 0 of '$*', got $status"
    else
        echo "ok $name"
    fi
    return 0
}

# equal NAME EXPECTED GOT
equal() {
    if [[ $2 == "$3" ]]; then
        echo "ok $1"
    else
        echo "not ok $1: expected '$2', got '$3'"
    fi
}
