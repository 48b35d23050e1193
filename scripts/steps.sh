# shellcheck shell=bash
# Sourced by the setup scripts: messages, and steps that are skipped while their inputs are what they were.
# The sourcing script sets `stamps`, the folder that remembers the steps done.

say() { printf '==> %s\n' "$*"; }
fail() { printf '%s: %s\n' "$(basename "$0" .sh)" "$*" >&2; exit 1; }

# step NAME "TEXT" "INPUT FILES" COMMAND...: runs COMMAND unless the inputs' hash is that of its last success.
step() {
    local name=$1 text=$2 inputs=$3 now
    shift 3
    # shellcheck disable=SC2086  # a list of files
    now=$( { cat $inputs; printf '%s\n' "$*"; } | sha256sum | cut -d' ' -f1)
    if [[ -f $stamps/$name && $(<"$stamps/$name") == "$now" ]]; then
        return
    fi
    say "$text"
    rm -f "$stamps/$name"
    "$@"
    printf '%s' "$now" >"$stamps/$name"
}
