#!/usr/bin/env bash
# Fetches XRT 2.25, the runtime of AMD's NPUs, from Debian's archive and unpacks it into a directory of its own. Nothing is
# installed: the system's sources, lists and packages stay as they are. For building the C shim and for tests; a machine with an
# NPU has an XRT of its own.
#
# It brings the C and C++ libraries of its release along, since the system's may be older. Programs meet all of that in a mount
# namespace (npu-kernels/npusim/run.sh).
set -euo pipefail

usage() {
    cat <<'EOT'
usage: npu-kernels/xdna/install-xrt.sh [DIR]

Prints the directory that holds usr/include/xrt, usr/lib/x86_64-linux-gnu and usr/bin on stdout; everything else goes to stderr.
DIR is the place to unpack to [${XDG_CACHE_HOME:-$HOME/.cache}/npu-prefill-xrt]. What is there already is not fetched again.
Needs apt, dpkg-deb, flock and the network on the first run.
EOT
}

# Package, version, sha256 of the .deb. XRT and its plugin are exactly these: what the tests say of them is said of these files.
pinned() {
    cat <<'EOT'
libxrt2 1:2.25.0-4~bpo13+1 1d85e8c4f0445392e2a7b03388da95aea3fe89e69d1105a34e656d2f17f442f6
libxrt-npu2 1:2.25.0-4~bpo13+1 2f8310a7265916c0c32e4a7724be449b49406fb8e6dad6ddc12e512d25be1b6c
libxrt-dev 1:2.25.0-4~bpo13+1 8765beec8a8448527b8b842a2a0d8f43f2349e5e8b738194c0909e1b078b5e13
libxrt-utils 1:2.25.0-4~bpo13+1 4292586159be91059897f14b124694b3fd0c36be28a50f0dd101edd420ac4114
libxrt-utils-npu 1:2.25.0-4~bpo13+1 4f6a3a47fe62bb9001ffa327620f47e96b8e187f8e1b7ee677bc43666885b2f4
EOT
}

# What they need. The archive keeps one version of these and replaces it when it is mended, so a newer one is taken as well, on
# the archive's signature.
base() {
    cat <<'EOT'
libc6 2.41-12+deb13u5 b59b0625cd1a791375d40dab23a4d5d3d0641e3d0a773501becdc3725b7f99cf
libgcc-s1 14.2.0-19 3c71917b490d1a17aed43196a2787a256ecf060526cdb20216a74bedc061b150
libstdc++6 14.2.0-19 ab1fa05837aa7a92aae748fd07a18a35f7d18bb4a71c4724fe2bbf0e32089de0
libuuid1 2.41.5-0+deb13u1 c1bf4c4c3ff48c57fabf93307dfb56996b60cfa33927afc4158b5db36fb2721e
libssl3t64 3.5.9-1~deb13u1 ffefb9af363e0e4592251b2533eb06453c8e470f7772e40263c4b2129251a6d5
libboost-filesystem1.83.0 1.83.0-4.2 6b587623a4fd1824613e7ee02ba35b84cd9534b520b7f3d08d15f9ed85f28cf3
libboost-program-options1.83.0 1.83.0-4.2 dc5fa835e9362fd3d285ccb0aeaecada4954b9a2ccf765891af868482edeb6f4
libzstd1 1.5.7+dfsg-1 2f6a2aeacfc925eba8b00ac9139bc4bfccf8cacb09eb93de067074b26948eef9
zlib1g 1:1.3.dfsg+really1.3.1-1+deb13u1 8c27c342230503b73dfde629642c3b352e87b554e06d60cf58772f236a305ceb
EOT
}

say() { printf 'install-xrt: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

case "${1:-}" in
    -h | --help) usage; exit 0 ;;
    -*) usage >&2; fail "no option $1" ;;
esac
[ $# -le 1 ] || { usage >&2; fail "one directory at most"; }
root=${1:-${XDG_CACHE_HOME:-${HOME:-~}/.cache}/npu-prefill-xrt}
[ "$(uname -sm)" = "Linux x86_64" ] || fail "XRT's NPU plugin is for Linux on x86-64, this is $(uname -sm)"
for tool in apt-get apt-cache dpkg-deb flock sha256sum; do
    command -v "$tool" >/dev/null || fail "$tool is missing: unpack XRT 2.25 into $root by other means"
done

mkdir -p "$root"
root=$(cd "$root" && pwd)
exec {lock}>"$root/.lock"
flock "$lock"

want=$(pinned | sha256sum | cut -d' ' -f1)
if [ "$(cat "$root/.pins" 2>/dev/null)" = "$want" ]; then
    echo "$root"
    exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/debs"

# A private view of the two suites, beside whatever the system's own lists say. Where Debian's archive is reached, and how, is
# still what the system has set.
private_apt() {
    local command=$1
    shift
    "$command" -qq -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=/dev/null \
        -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" -o Dir::State::Status=/dev/null \
        -o Acquire::Languages=none -o Acquire::Retries=3 -o APT::Architecture=amd64 -o APT::Sandbox::User= "$@"
}

archive() {
    apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | sort -u | head -n 1
}

uri=$(archive)
if [ -z "$uri" ] && [ "$(id -u)" = 0 ]; then
    apt-get -qq -o Acquire::Retries=3 update >&2
    uri=$(archive)
fi
[ -n "$uri" ] || fail "apt knows no archive of Debian: run apt-get update, or unpack XRT 2.25 into $root by other means"
keys=
for keys in /usr/share/keyrings/debian-archive-keyring.{pgp,gpg}; do [ ! -e "$keys" ] || break; done
for suite in trixie trixie-backports; do
    echo "deb [signed-by=$keys targets=Packages] $uri $suite main"
done >"$work/sources.list"

say "fetching XRT 2.25 from Debian trixie-backports"
private_apt apt-get update >&2

# Downloads and checks one package: name, version, sha256, and whether another version will do.
fetch() {
    local name=$1 version=$2 sum=$3 other=$4 got
    if private_apt apt-get download "$name=$version" >&2 2>"$work/log"; then
        got=$(sha256sum "$name"_*.deb | cut -d' ' -f1)
        [ "$got" = "$sum" ] || fail "$name $version has the sha256 $got, pinned is $sum"
    elif [ "$other" = yes ]; then
        private_apt apt-get download "$name" >&2 || fail "$name cannot be had"
        say "NOTE: $name $version is no longer in the archive: took $(dpkg-deb -f "$name"_*.deb Version)"
    else
        cat "$work/log" >&2
        fail "$name $version cannot be had: change the pins of this script together with what the tests say of that version"
    fi
}

cd "$work/debs"
while read -r name version sum; do fetch "$name" "$version" "$sum" no; done < <(pinned)
while read -r name version sum; do fetch "$name" "$version" "$sum" yes; done < <(base)
cd "$root"
rm -rf "$root/usr" "$root/etc" "$root/.pins" "$root/versions"
for deb in "$work"/debs/*.deb; do dpkg-deb -x "$deb" "$root"; done
for deb in "$work"/debs/*.deb; do dpkg-deb -W --showformat '${Package} ${Version}\n' "$deb"; done >"$root/versions"
echo "$want" >"$root/.pins"
echo "$root"
