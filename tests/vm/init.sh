#!/bin/busybox sh
# The first and only process of the machine that run.sh starts: makes the usual file systems, runs /vm/command with its
# output on the second serial line, says its status on the first, and switches the machine off.
bb=/bin/busybox
# What was brought along is not replaced, and found first.
$bb --install -s /bin 2>/dev/null
export PATH=/usr/local/bin:/usr/bin:/bin

mount -t proc -o nosuid,nodev,noexec proc /proc
mount -t sysfs -o nosuid,nodev,noexec sysfs /sys
mount -t devtmpfs -o nosuid dev /dev
mkdir -p /dev/shm /dev/pts
mount -t tmpfs -o nosuid,nodev tmpfs /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs -o nosuid,nodev,mode=755 tmpfs /run
# For tests that ask what the kernel was told.
mount -t tracefs -o nosuid,nodev,noexec tracefs /sys/kernel/tracing
# A test's own directory may lie under /tmp, and the program itself too: only what is empty is covered.
[ -n "$(ls -A /tmp)" ] || mount -t tmpfs -o nosuid,nodev tmpfs /tmp
ln -s /proc/self/fd /dev/fd
ln -s fd/0 /dev/stdin
ln -s fd/1 /dev/stdout
ln -s fd/2 /dev/stderr
ip link set lo up

read -r up _ </proc/uptime
echo "VM-UP $up" >/dev/console

# Bytes as they are; and a pipe between, so that the program does not take the line for a terminal.
stty raw -echo -F /dev/ttyS1
{
    sh /vm/command </dev/null 2>&1
    echo $? >/vm/status
} | cat >/dev/ttyS1

echo "VM-EXIT $(cat /vm/status)" >/dev/console
poweroff -f
