# shellcheck shell=bash
# suite.sh FILE...: runs test files in the VM, one after another. Each has a time limit of its own, and what the
# kernel said meanwhile is judged with it.
#
# A test file is a bash script that prints "ok NAME" or "not ok NAME: why" for each thing it checks, and starts with
#
#   # about: one line
#   # limit: seconds
#   # smoke: yes           for the part that `make test` runs
#   # judge: command       run on the host afterwards, with $WORK (this folder) and $BAR (the file behind the BAR)
#
# /vm/results has one line for each file and one for each check that failed; /vm/NAME.log is all that a file printed.
# Exit status: 0 when every file passed.
# shellcheck source=lib.sh
source "$HAWK_VM_LIB"

# What the kernel says when something is wrong. Building and signing out of tree taints it, which is expected.
wrong='BUG[: ]|WARNING: |Oops|general protection|blocked for more than|KFENCE|corruption|refcount_t|use-after-free'
wrong+='|UBSAN|page allocation failure|Call Trace|Bad page|Redzone|Poison overwritten|Freelist|Objects remaining'
wrong+='|scheduling while atomic|sleeping function|invalid opcode|stack segment|Kernel panic|leak'

# A stopped host makes the guest's clock jump: only much longer waits than a test's are a hang.
echo 60 >/proc/sys/kernel/hung_task_timeout_secs
echo 60 >/proc/sys/kernel/watchdog_thresh

# run_limited SECONDS LOG COMMAND...: prints the exit status, or `late`, or `stuck` for what hangs in the kernel: that is
# left behind, so that the files after it still run. (timeout would wait for it.)
run_limited() {
    local limit=$1 log=$2 pid result='' end
    shift 2
    setsid "$@" >"$log" 2>&1 &
    pid=$!
    end=$((SECONDS + limit))
    while kill -0 "$pid" 2>/dev/null; do
        if ((SECONDS >= end + 10)); then
            echo stuck
            return
        elif ((SECONDS >= end)); then
            result=late
            kill -KILL -- "-$pid" 2>/dev/null
        fi
        sleep 0.1
    done
    wait "$pid"
    echo "${result:-$?}"
    kill -KILL -- "-$pid" 2>/dev/null # what it left running in the background
}

field() { sed -n "s/^# $2: *//p" "$1" | head -n 1; }

: >/vm/results
for file in "$@"; do
    name=$(basename "$file" .sh)
    log=/vm/$name.log
    limit=$(field "$file" limit)
    echo "hawk suite: begin $name" >/dev/kmsg
    start=$SECONDS
    status=$(run_limited "${limit:-60}" "$log" bash -u "$file")
    reasons=()
    case $status in
    0) ;;
    late) reasons+=("ran past its limit of ${limit:-60} s") ;;
    stuck) reasons+=("ran past its limit of ${limit:-60} s, and cannot be killed") ;;
    *) reasons+=("ended with status $status") ;;
    esac
    checks=$(grep -c '^ok ' "$log")
    ((checks > 0)) || reasons+=("checked nothing")
    while read -r line; do
        reasons+=("$line")
    done < <(grep '^not ok ' "$log" | head -n 20)
    unloaded=$(unload_modules 2>&1) || reasons+=("left behind: $unloaded")
    dmesg | sed -n "/hawk suite: begin $name\$/,\$p" >"/vm/$name.dmesg"
    [[ -s /vm/$name.dmesg ]] || reasons+=("the kernel's log has overflowed")
    while read -r line; do
        reasons+=("kernel: $line")
    done < <(grep -aE "$wrong" "/vm/$name.dmesg" | head -n 10)
    if ((${#reasons[@]})); then
        echo "not ok $name ($((SECONDS - start)) s, $checks checks passed)"
        printf '    %s\n' "${reasons[@]}"
    else
        echo "ok $name ($((SECONDS - start)) s, $checks checks): $(field "$file" about)"
    fi | tee -a /vm/results
done
! grep -q '^not ok' /vm/results
