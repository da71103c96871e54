#!/usr/bin/env bash
# Runs a program where there seems to be an NPU: in a namespace of its own with the files in /sys and /dev that XRT looks for, with
# XRT and its C library over the system's, and with the double of the driver (npusim) preloaded. Needs no right but to make
# namespaces. The files of the system stay as they are.
set -euo pipefail

usage() {
    cat <<'EOT'
usage: npu-kernels/npusim/run.sh [--sim LIBRARY] [--xrt DIR] [--node-mode MODE | --no-node] PROGRAM [ARGS..]

  --sim LIBRARY     libnpusim.so [${CARGO_TARGET_DIR:-target}/debug/libnpusim.so]
  --xrt DIR         what npu-kernels/xdna/install-xrt.sh printed [${XDG_CACHE_HOME:-$HOME/.cache}/npu-prefill-xrt]
  --node-mode MODE  permissions of /dev/accel/accel0 [666]; 000 is a user outside of the group render
  --no-node         no node at all

Variables of the double (NPUSIM_FAULT and others) are described in npu-kernels/npusim/src/lib.rs. With NPUSIM_SHADOW=1, XRT is told
to flush caches through the driver. PROGRAM runs as a user that is not root. Status: PROGRAM's, or 125 when the namespace could not
be made.
EOT
}

fail() { printf 'npusim: %s\n' "$*" >&2; exit 125; }

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
sim=${CARGO_TARGET_DIR:-$here/../../target}/debug/libnpusim.so
xrt=${XDG_CACHE_HOME:-${HOME:-~}/.cache}/npu-prefill-xrt
mode=666
while [ $# -gt 0 ]; do
    case "$1" in
        --sim | --xrt | --node-mode)
            [ $# -ge 2 ] || fail "$1 needs a value"
            case "$1" in
                --sim) sim=$2 ;;
                --xrt) xrt=$2 ;;
                --node-mode) mode=$2 ;;
            esac
            shift 2
            ;;
        --no-node) mode=none; shift ;;
        -h | --help) usage; exit 0 ;;
        -*) usage >&2; fail "no option $1" ;;
        *) break ;;
    esac
done
[ $# -ge 1 ] || { usage >&2; exit 125; }
sim=$(realpath -e -- "$sim" 2>/dev/null) || fail "the double is not there: cargo build -p npusim, or name it with --sim"
libs=/usr/lib/x86_64-linux-gnu
[ -e "$xrt$libs/libxrt_coreutil.so.2" ] || fail "no XRT in $xrt: run npu-kernels/xdna/install-xrt.sh, or name it with --xrt"
command -v unshare >/dev/null || fail "unshare is missing: install util-linux"

inside='
set -e
sim=$1 xrt=$2 mode=$3 libs=$4
shift 4
# XRT and the C library that it needs, over the system'"'"'s own. Programs built for an older one run with a newer one.
mount -t overlay overlay -o "lowerdir=$xrt$libs:$libs" "$libs"
# A device on the PCI bus, as the driver would show it.
mount -t tmpfs none /sys/bus/pci
mount -t tmpfs none /sys/devices/platform
device=/sys/devices/platform/npusim/0000:c5:00.1
mkdir -p "$device/accel/accel0" /sys/bus/pci/drivers/amdxdna /sys/bus/pci/devices
ln -s "$device" /sys/bus/pci/drivers/amdxdna/0000:c5:00.1
ln -s "$device" /sys/bus/pci/devices/0000:c5:00.1
echo 0 >"$device/device_type"
echo RyzenAI-npu5 >"$device/vbnv"
echo 0x1022 >"$device/vendor"
echo 0x17f0 >"$device/device"
echo 0x11 >"$device/revision"
# Its node: a file that the double answers for. Everything else in /dev is there as before.
dev=/sys/devices/platform/dev
mkdir "$dev"
for entry in /dev/*; do
    name=${entry##*/}
    [ "$name" != accel ] || continue
    if [ -L "$entry" ]; then
        cp -P "$entry" "$dev/$name"
    elif [ -d "$entry" ]; then
        mkdir "$dev/$name"
        mount --rbind "$entry" "$dev/$name" 2>/dev/null || true
    else
        : >"$dev/$name"
        mount --bind "$entry" "$dev/$name" 2>/dev/null || rm -f "$dev/$name"
    fi
done
if [ "$mode" != none ]; then
    mkdir "$dev/accel"
    : >"$dev/accel/accel0"
    chmod "$mode" "$dev/accel/accel0"
fi
mount --rbind "$dev" /dev
if [ -n "${NPUSIM_SHADOW:-}" ]; then
    printf "[Debug]\nforce_driver_sync=true\n" >/sys/bus/pci/xrt.ini
    export XRT_INI_PATH=/sys/bus/pci/xrt.ini
fi
export LD_PRELOAD="$sim${LD_PRELOAD:+:$LD_PRELOAD}"
# Not as root: XRT ignores its own variables then, and permissions would not count.
exec unshare --user --map-user=1000 --map-group=1000 "$@"
'
unshare --user --map-root-user --mount true 2>/dev/null || fail "this system gives no namespaces (unshare --user --mount)"
exec unshare --user --map-root-user --mount bash -c "$inside" npusim "$sim" "$xrt" "$mode" "$libs" "$@"
