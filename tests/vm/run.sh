#!/usr/bin/env bash
# Runs one program inside a small virtual machine whose kernel gives real dma-bufs: /dev/udmabuf and /dev/dma_heap/system.
# Machines that build software mostly have neither, and their kernel cannot be changed; this needs no KVM and no network
# once its parts are cached.
#
# It is also a runner for cargo:
#   CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER=$PWD/tests/vm/run.sh cargo test -p kvlayout --test dmabuf
#
# It is not a sandbox, and nothing in it is fast: the processor is emulated.
set -Eeuo pipefail

usage() {
    cat <<'EOF'
usage: tests/vm/run.sh [--with PATH]... [--memory MIB] [--timeout SECONDS] BINARY [ARGS..]

Boots a virtual machine, runs BINARY in it, prints what it prints, and exits with its status.

  --with PATH        bring this file or directory too; all stands inside at the path that it has here
  --memory MIB       memory of the machine [512]
  --timeout SECONDS  limit for booting and running [300]

BINARY and the shared libraries that it and the files of --with need are brought along, and so are bash and the programs that
cargo names in CARGO_BIN_EXE_*, or somebody in CONFORMANCE_PROVIDER. It starts as root in a directory named like the current
one, with what is set of these variables, of RUST_*, PROPTEST_*, NPU_PREFILL_* and CARGO_MANIFEST_DIR, and with
NPU_PREFILL_TEST_DMABUF=1. Nothing that it writes outlives it.

Status: that of BINARY (128 + signal when one ended it), 124 when the time was up, 125 when the machine could not be made or
did not come to an end. A kernel and busybox come from Debian's packages, once, into
${XDG_CACHE_HOME:-$HOME/.cache}/npu-prefill-vm; qemu is installed if it is missing.
EOF
}

say() { printf 'vm: %s\n' "$*" >&2; }
fail() { say "$*"; exit 125; }

# The first release of Debian whose kernel has both devices built in; that of the one before has neither.
suite=trixie
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
home=${HOME:-~}
cache="${XDG_CACHE_HOME:-$home/.cache}/npu-prefill-vm"
parts="$cache/$suite"
memory=512
limit=300
with=()

while [ $# -gt 0 ]; do
    case "$1" in
        --with | --memory | --timeout)
            [ $# -ge 2 ] || fail "$1 needs a value"
            case "$1" in
                --with) with+=("$2") ;;
                --memory) memory=$2 ;;
                --timeout) limit=$2 ;;
            esac
            shift 2
            ;;
        -h | --help) usage; exit 0 ;;
        -*) usage >&2; fail "no option $1" ;;
        *) break ;;
    esac
done
[ $# -ge 1 ] || { usage >&2; exit 125; }
[[ $memory =~ ^[1-9][0-9]*$ ]] || fail "--memory $memory: MiB, a number"
[[ $limit =~ ^[1-9][0-9]*$ ]] || fail "--timeout $limit: seconds, a number"
binary=$(realpath -e -- "$1" 2>/dev/null) || fail "$1: no such file"
if [ ! -f "$binary" ] || [ ! -x "$binary" ]; then fail "$binary: not a program"; fi
shift

work=$(mktemp -d)
new=
machine=
ran=
cleanup() {
    local code=$?
    [ -z "$machine" ] || kill "$machine" 2>/dev/null || true
    rm -rf "$work" ${new:+"$new"}
    # Some command failed on the way: its number must not be taken for the program's.
    if [ -z "$ran" ] && [ "$code" -lt 124 ]; then fail "the machine could not be made (line $line)"; fi
}
line='?'
trap 'line=$LINENO' ERR
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# Parts.

# A private view of the one suite, beside whatever the system's own lists say: the machine's release must not decide which
# kernel is tested. Where Debian's archive is reached, and how, is still what the system has set.
private_apt() {
    local command=$1
    shift
    "$command" -qq -o Dir::Etc::SourceList="$apt/sources.list" -o Dir::Etc::SourceParts=/dev/null \
        -o Dir::State::Lists="$apt/lists" -o Dir::Cache="$apt/cache" -o Dir::State::Status=/dev/null \
        -o Acquire::Languages=none -o Acquire::Retries=3 -o APT::Architecture=amd64 -o APT::Sandbox::User= "$@"
}

archive() {
    apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | sort -u | head -n 1
}

system_update() {
    [ -z "${updated:-}" ] || return 0
    [ "$(id -u)" = 0 ] || fail "apt's lists are empty: run apt-get update"
    apt-get -qq -o Acquire::Retries=3 update
    updated=1
}

fetch_parts() {
    local apt uri keys kernel deb config
    command -v apt-get dpkg-deb >/dev/null || fail "no apt here: put vmlinuz, busybox (static) and version into $parts"
    new=$(mktemp -d "$cache/.new.XXXXXX")
    apt=$work/apt
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/debs"
    uri=$(archive)
    [ -n "$uri" ] || { system_update; uri=$(archive); }
    [ -n "$uri" ] || fail "apt knows no archive of Debian: put vmlinuz, busybox (static) and version into $parts"
    for keys in /usr/share/keyrings/debian-archive-keyring.{pgp,gpg}; do [ ! -e "$keys" ] || break; done
    # Of the lists only that of the packages, not what other programs have hooked into updates.
    echo "deb [signed-by=$keys targets=Packages] $uri $suite main" >"$apt/sources.list"
    private_apt apt-get update
    # The cloud kernel is the small one: no drivers of real hardware, and the same dma-buf code.
    kernel=$(private_apt apt-cache depends linux-image-cloud-amd64 | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)$/\1/p')
    [ -n "$kernel" ] || fail "linux-image-cloud-amd64 of $suite depends on no kernel"
    say "fetching $kernel and busybox-static from Debian $suite"
    (cd "$apt/debs" && private_apt apt-get download "$kernel" busybox-static)
    for deb in "$apt"/debs/*.deb; do dpkg-deb -x "$deb" "$apt/unpacked"; done
    config=$(echo "$apt"/unpacked/boot/config-*)
    for option in UDMABUF DMABUF_HEAPS DMABUF_HEAPS_SYSTEM MEMFD_CREATE KPROBE_EVENTS DEVTMPFS SERIAL_8250_CONSOLE; do
        grep -qx "CONFIG_$option=y" "$config" || fail "$kernel has not CONFIG_$option=y: $(grep "$option\b" "$config" || echo absent)"
    done
    cp "$apt"/unpacked/boot/vmlinuz-* "$new/vmlinuz"
    cp "$(find "$apt/unpacked" -type f -path '*bin/busybox')" "$new/busybox"
    for deb in "$apt"/debs/*.deb; do dpkg-deb -W --showformat '${Package} ${Version}\n' "$deb"; done >"$new/version"
    mv -T "$new" "$parts"
    new=
}

install_qemu() {
    [ "$(id -u)" = 0 ] || fail "qemu-system-x86_64 is missing: install qemu-system-x86"
    say "installing qemu-system-x86"
    local install=(apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=120 qemu-system-x86)
    export DEBIAN_FRONTEND=noninteractive
    "${install[@]}" >"$work/install.log" 2>&1 || {
        system_update
        "${install[@]}" >"$work/install.log" 2>&1 || { cat "$work/install.log" >&2; fail "qemu-system-x86 cannot be installed"; }
    }
}

mkdir -p "$cache"
exec {lock}>"$cache/lock"
flock "$lock"
command -v qemu-system-x86_64 >/dev/null || install_qemu
# Under the lock nobody else fetches, so what has that name was left behind.
rm -rf "$cache"/.new.*
[ -s "$parts/version" ] || { rm -rf "$parts"; fetch_parts; }
exec {lock}>&-

# The initial file system, which is all that the machine ever has.

root=$work/root
mkdir -p "$root"/{bin,dev,proc,sys,tmp,run,vm,etc,root} "$root$PWD"
cp "$parts/busybox" "$root/bin/busybox"
install -m 755 "$here/init.sh" "$root/init"

# Copies a file to the path that it has here, with the shared libraries and the loader that it names.
bring() {
    local file=$1 needed
    [ ! -e "$root$file" ] || return 0
    mkdir -p "$root$(dirname "$file")"
    cp -L "$file" "$root$file"
    # Only programs and libraries: ldd asks the loader to run what it is given.
    [ "$(head -c 4 "$file" | tr -d '\0')" = $'\x7fELF' ] || return 0
    # All of it will be in the machine's memory, and most of a program is what only debuggers read.
    ! command -v strip >/dev/null || strip --strip-debug "$root$file" 2>/dev/null || true
    # Says "not a dynamic executable" of static ones, with a status of its own.
    needed=$(ldd "$file" 2>/dev/null) || return 0
    ! grep -q 'not found' <<<"$needed" || fail "$file: $(grep -m 1 'not found' <<<"$needed")"
    while read -r library; do
        bring "$library"
    done < <(sed -nE 's/^[^/]*(\/[^ ]+) \(0x[0-9a-f]+\)$/\1/p' <<<"$needed")
}

bring "$binary"
# Scripts of tests are bash's.
bring "$(command -v bash)"
[ -e "$root/bin/bash" ] || ln -s "$(command -v bash)" "$root/bin/bash"
# What the tests start. The names may hold what the shell does not take in a variable's.
while IFS='=' read -r -d '' name value; do
    case "$name" in CARGO_BIN_EXE_* | CONFORMANCE_PROVIDER) with+=("$value") ;; esac
done < <(env -0)
for path in ${with[@]+"${with[@]}"}; do
    path=$(realpath -e -s -- "$path" 2>/dev/null) || fail "--with $path: no such file"
    while IFS= read -r -d '' file; do
        bring "$file"
    done < <(find -L "$path" -type f -print0)
done
# Where the loader looks for libraries outside of its default places.
[ ! -e /etc/ld.so.cache ] || cp -L /etc/ld.so.cache "$root/etc/ld.so.cache"
printf 'root:x:0:0:root:/root:/bin/sh\n' >"$root/etc/passwd"
printf 'root:x:0:\n' >"$root/etc/group"

# Bash's own quoting may use forms that a plain shell does not know.
quoted() { printf "'%s'" "${1//\'/\'\\\'\'}"; }
{
    while IFS='=' read -r -d '' name value; do
        case "$name" in
            RUST_* | PROPTEST_* | NPU_PREFILL_* | CARGO_MANIFEST_DIR | CONFORMANCE_PROVIDER) printf 'export %s=%s\n' "$name" "$(quoted "$value")" ;;
        esac
    done < <(env -0)
    printf 'export NPU_PREFILL_TEST_DMABUF=1 HOME=/root TMPDIR=/tmp\n'
    printf 'cd %s\n' "$(quoted "$PWD")"
    printf 'exec'
    for word in "$binary" "$@"; do printf ' %s' "$(quoted "$word")"; done
    printf '\n'
} >"$root/vm/command"

(cd "$root" && find . -print | "$parts/busybox" cpio -o -H newc -R 0:0 2>/dev/null) >"$work/initramfs"
rm -rf "$root"

# The machine: the kernel talks on the first serial line, the program on the second, so neither gets into the other's.

qemu=(
    # Both processors by one thread: with one each, one boot of about sixty ended in a panic in the middle of code that the
    # kernel was patching, which a real processor does not do. The tests take the same time.
    qemu-system-x86_64 -accel tcg,thread=single -M pc -cpu max -smp 2 -m "$memory"
    -no-user-config -nodefaults -no-reboot -display none
    -kernel "$parts/vmlinuz" -initrd "$work/initramfs"
    # panic=-1: at once, and -no-reboot makes an end of that. A udmabuf is 64 MiB at most unless told otherwise.
    -append "console=ttyS0 quiet panic=-1 nokaslr mitigations=off udmabuf.size_limit_mb=$memory"
    -serial "file:$work/kernel.log" -chardev "stdio,id=program,signal=off" -serial chardev:program
)
boot() {
    : >"$work/kernel.log"
    # Through a pipe of ours: qemu makes its standard output non-blocking, for all who share it.
    exec {output}> >(exec cat)
    printer=$!
    start=$(date +%s%N)
    timeout --kill-after=5 "$limit" "${qemu[@]}" </dev/null >&"$output" 2>"$work/qemu.log" {output}>&- &
    machine=$!
    exec {output}>&-
    status=0
    wait "$machine" || status=$?
    machine=
    wait "$printer" || true
    milliseconds=$((($(date +%s%N) - start) / 1000000))
    exit_code=$(sed -nE 's/.*VM-EXIT ([0-9]+).*/\1/p' "$work/kernel.log" | tail -n 1)
    up=$(sed -nE 's/.*VM-UP ([0-9.]+).*/\1/p' "$work/kernel.log" | tail -n 1)
}

boot
# Dead before the program began: nothing has been tried yet, so it can be once more.
if [ -z "$up" ] && [ "$status" -ne 124 ]; then
    tr -d '\r' <"$work/kernel.log" | tail -n 60 >&2
    say "the machine did not come up; booting it once more"
    boot
fi
# A warning of the kernel, and all of a death that was not the program's.
if [ -z "$exit_code" ] || grep -qE 'BUG:|WARNING:|Oops|Out of memory' "$work/kernel.log"; then
    { cat "$work/qemu.log"; tr -d '\r' <"$work/kernel.log" | tail -n 60; } >&2
fi
if [ -z "$exit_code" ]; then
    [ "$status" -ne 124 ] || { say "time is up: $limit s${up:+; booted after $up s of its own}"; exit 124; }
    fail "the machine came to no end of its own (qemu: $status)"
fi
say "$(sed -nE 's/^linux-image-([^ ]+).*/\1/p' "$parts/version"), up after $up s, gone after $((milliseconds / 1000)).$((milliseconds % 1000 / 100)) s; exit $exit_code"
ran=yes
exit "$exit_code"
