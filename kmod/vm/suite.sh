#!/usr/bin/env bash
# suite.sh [--smoke] [--suite SUITE] [TEST...]: builds the module and its stand-ins, boots one VM and runs the tests
# in it (all files of tests/, or those with "smoke: yes", or those named). Prints a line for each file.
#
# Logs stay in ../build/vm/. Exit status: 0 when every test passed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
# shellcheck source=common.sh
source "$here/common.sh"

smoke='' suite=$vm_suite
while [[ ${1:-} == --* ]]; do
    case $1 in
    --smoke) smoke=1 ;;
    --suite)
        suite=${2:?--suite needs a name}
        shift
        ;;
    *) fail "unknown option $1" ;;
    esac
    shift
done

field() { sed -n "s/^# $2: *//p" "$1" | head -n 1; }

# The test files that the arguments choose, in their order, into `files`.
choose() {
    local file name wanted
    files=()
    for file in "$here"/tests/*.sh; do
        name=$(basename "$file" .sh)
        if (($#)); then
            for wanted in "$@"; do
                [[ $wanted != "$name" && $wanted != "${name#[0-9][0-9]-}" ]] || files+=("$file")
            done
        elif [[ -z $smoke || $(field "$file" smoke) == yes ]]; then
            files+=("$file")
        fi
    done
    ((${#files[@]})) || fail "no such test: $*; there are: $(cd "$here/tests" && echo *.sh)"
}

# What a test left in the BAR and the work folder, judged by a program on the host.
judge() {
    local file name command log
    for file in "${files[@]}"; do
        name=$(basename "$file" .sh)
        command=$(field "$file" judge)
        [[ -n $command ]] || continue
        log=$work/$name.judge
        if (cd "$root" && WORK=$work BAR=$bar timeout 300 bash -c "$command") >"$log" 2>&1; then
            echo "ok $name, judged on the host ($(grep -c '^ok ' "$log") checks)"
        else
            status=1
            echo "not ok $name, judged on the host"
            grep -v '^ok ' "$log" | tail -n 20 | sed 's/^/    /'
        fi
    done
}

choose "$@"
require_debian_12
"$here/packages.sh" --install
kernel=$("$here/kernel.sh" "$suite" image)
kver=$(<"$kernel/kver")

mkdir -p "$here/../build"
exec 8>"$here/../build/lock"
flock -w 1200 8 || fail "another run of the suite has held $here/../build/lock for 20 minutes"

work=$here/../build/vm
rm -rf "$work"
mkdir -p "$work"
work=$(realpath "$work")
bar=$work/bar
# Sparse: the disk holds what the tests write.
truncate -s 64G "$bar"
trap 'rm -f "$bar"' EXIT

say "building for $kver"
log=$work/build.log
if ! make -C "$here/.." modules test-modules test-programs install DESTDIR="$work/installed" \
    KDIR="$kernel/headers/usr/src/linux-headers-$kver" >"$log" 2>&1 8>&-; then
    tail -n 40 "$log" >&2
    fail "the modules could not be built; see $log"
fi

limit=120
for file in "${files[@]}"; do
    limit=$((limit + $(field "$file" limit)))
done
say "booting $kver for ${#files[@]} test files (at most $limit s)"
status=0
"$here/run.sh" --work "$work" --log "$work/console.log" --bar "$bar" --suite "$suite" --timeout "$limit" \
    --append "slub_debug=FZPU page_poison=1" "$here/guest/suite.sh" "${files[@]}" 8>&- || status=$?
cat "$work/results" 2>/dev/null || true
((status != 0)) || judge
case $status in
0) say "all passed in $SECONDS s" ;;
1) say "failed; logs are in $work" ;;
*)
    tail -n 30 "$work/console.log" >&2
    say "the VM did not get through all tests (status $status); logs are in $work"
    ;;
esac
exit "$status"
