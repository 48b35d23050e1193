#!/usr/bin/env bash
# kernel.sh SUITE [image]: downloads the headers (and the image) of SUITE's newest linux-image-amd64 and prints
# the folder they are in. Nothing is installed, and the host's apt keeps its sources and lists.
#
# The folder holds: kver (the release, as uname -r prints it), headers/usr/src/linux-headers-KVER (for make -C),
# and with `image` also image/boot/vmlinuz-KVER and image/lib/modules/KVER.
#
# The mirror is the one that the host's own sources name for Debian 12. A folder that is there is used again;
# remove it to have the suite's newest kernel.
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source=common.sh
source ./common.sh

suite=${1:?usage: kernel.sh SUITE [image]}
with_image=${2:-}
[[ $with_image == '' || $with_image == image ]] || fail "the second argument can only be 'image', not '$with_image'"
require_debian_12

# "URI SIGNED-BY" of the host's first source of Debian 12's main archive.
mirror() {
    # shellcheck disable=SC2016  # apt's own fields, not the shell's
    apt-get indextargets --format '$(RELEASE)|$(COMPONENT)|$(REPO_URI)|$(SIGNED_BY)' 'Created-By: Packages' |
        awk -F '|' '($1 == "bookworm" || $1 == "stable" || $1 == "oldstable") && $2 == "main" && !/security/ {
            print $3, $4; exit }'
}

fetch() {
    local want=$1 into=$2 apt uri signed version
    read -r uri signed < <(mirror) || fail "apt has no source for Debian 12 (bookworm, component main)"
    [[ -f $signed ]] || signed=/usr/share/keyrings/debian-archive-keyring.gpg
    apt=$into/apt
    mkdir -p "$apt/lists/partial" "$apt/archives/partial" "$into/packages"
    printf 'deb [arch=amd64 signed-by=%s] %s %s main\n' "$signed" "$uri" "$suite" >"$apt/sources.list"
    local options=(-qq -o "Dir::Etc::sourcelist=$apt/sources.list" -o Dir::Etc::sourceparts=/dev/null
        -o "Dir::State::Lists=$apt/lists" -o "Dir::Cache=$apt" -o APT::Sandbox::User=root
        -o Acquire::Retries=3 -o APT::Update::Error-Mode=any)
    apt-get "${options[@]}" update || fail "the mirror of this host, $uri, did not give the suite $suite"
    version=$(apt-cache "${options[@]}" depends linux-image-amd64 | sed -n 's/^ *Depends: linux-image-//p' | head -n 1)
    [[ -n $version ]] || fail "the suite $suite of $uri has no linux-image-amd64"
    local names=("linux-headers-$version" "linux-headers-${version%-amd64}-common" "linux-kbuild-${version%-amd64}")
    if [[ $suite == bookworm ]]; then
        names[2]=$(apt-cache "${options[@]}" depends "${names[0]}" | sed -n 's/^ *Depends: \(linux-kbuild-.*\)/\1/p' | head -n 1)
    fi
    [[ $want != image ]] || names+=("linux-image-$version")
    (cd "$into/packages" && apt-get "${options[@]}" download "${names[@]}")
    local package
    for package in "$into"/packages/linux-{headers,kbuild}-*.deb; do
        dpkg -x "$package" "$into/headers"
    done
    # The headers name their other half by its place after an installation.
    sed -i "s#/usr/src/#$folder/headers/usr/src/#g" "$into/headers/usr/src/linux-headers-$version/Makefile"
    if [[ $want == image ]]; then
        dpkg -x "$into"/packages/linux-image-*.deb "$into/image"
        depmod -b "$into/image" "$version"
    fi
    rm -rf "$into/packages" "$apt"
    printf '%s\n' "$version" >"$into/kver"
}

folder=$cache/$suite
mkdir -p "$cache"
exec 9>"$cache/$suite.lock"
flock -w 600 9 || fail "another download of $suite has held $cache/$suite.lock for 10 minutes"
complete() { [[ -s $folder/kver ]] && { [[ -z $with_image ]] || [[ -d $folder/image ]]; }; }
if ! complete; then
    say "downloading the kernel of $suite (headers${with_image:+ and image}) into $folder"
    rm -rf "$folder" "$folder.new"
    trap 'rm -rf "$folder.new"' EXIT
    fetch "$with_image" "$folder.new"
    mv "$folder.new" "$folder"
fi
printf '%s\n' "$folder"
