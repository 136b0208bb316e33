#!/usr/bin/env bash
# Runs as PID 1 of a node: makes the node's root, starts sshd, and ends when its standard input closes. The kernel then
# ends all processes of the node.
#
#   unshare --net --mount --pid --uts --ipc --fork --kill-child --propagation private node.sh FOLDER NAME HOSTS SHARED
#
# The root is an overlay on this machine's root, so files that the node writes are private. SHARED is the same folder on
# every node. The node may not see a file that is changed outside while it runs.
set -euo pipefail
folder=$1 name=$2 hosts=$3 shared=$4
home=$folder/$name
mkdir -p "$home"
mount -t tmpfs -o size=4g tmpfs "$home"
mkdir "$home"/{upper,work,root}
root=$home/root
mount -t overlay overlay -o "lowerdir=/,upperdir=$home/upper,workdir=$home/work" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o size=2g tmpfs "$root/dev/shm"
mount -t tmpfs tmpfs "$root/run"
mkdir -p "$root/run/sshd" "$root/run/munge" "$root/private" "$root$shared"
mount --bind "$shared" "$root$shared"
hostname "$name"
echo "$name" >"$root/etc/hostname"
cp "$hosts" "$root/etc/hosts"

rm -rf "$root/root/.ssh"
mkdir -m 700 "$root/root/.ssh"
chmod 700 "$root/root"
cp "$folder/key" "$root/root/.ssh/id_ed25519"
cp "$folder/key.pub" "$root/root/.ssh/authorized_keys"
printf 'Host *\n StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n LogLevel ERROR\n' >"$root/root/.ssh/config"
cp "$folder/key" "$root/etc/ssh/node_host_key"
chmod 600 "$root"/root/.ssh/* "$root/etc/ssh/node_host_key"
cat >"$root/etc/ssh/sshd_node" <<-CONF
	Port 22
	HostKey /etc/ssh/node_host_key
	PermitRootLogin yes
	PasswordAuthentication no
	UsePAM no
	MaxStartups 100
	MaxSessions 100
	PidFile /run/node_sshd.pid
	SetEnv OMP_NUM_THREADS=1
	CONF
ip link set lo up
# bash reaps orphaned processes while it waits here.
exec chroot "$root" /bin/bash -c 'cd /; trap : INT TERM; /usr/sbin/sshd -f /etc/ssh/sshd_node; read -r || true'
