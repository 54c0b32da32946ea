#!/usr/bin/env bash
# The image's entry: `worker` waits for jobs over ssh, anything else is the command to run.
set -euo pipefail
SECRET=${SSH_SECRET:-/run/secrets/ssh} # id_ed25519 and id_ed25519.pub, mounted by whoever starts the container
FOLDER=/tmp/ssh

fail() {
    echo "error: $*" >&2
    exit 2
}

warn() {
    echo "warning: $1" >&2
}

# An arbitrary uid, as OpenShift gives, has no name, and ssh wants one.
name_user() {
    if ! whoami >/dev/null 2>&1 && [[ -w /etc/passwd ]]; then
        echo "user:x:$(id -u):0::$HOME:/bin/bash" >>/etc/passwd
    fi
}

# Copies, since a mounted secret has whatever owner and mode its platform gives it, and ssh is strict about both.
take_keys() {
    local key=$SECRET/id_ed25519
    if [[ ! -e $key && -e $SECRET/id_rsa ]]; then key=$SECRET/id_rsa; fi # the MPI operator's name, whatever its kind
    [[ -r $key && -r $key.pub ]] ||
        fail "no id_ed25519 and id_ed25519.pub in $SECRET that uid $(id -u) can read: mount an ssh key pair there" \
            "that this user may read, or set SSH_SECRET to its folder."
    whoami >/dev/null 2>&1 ||
        fail "uid $(id -u) has no name and /etc/passwd cannot be written: run as uid 10001, or with a writable root."
    umask 077
    mkdir -p "$FOLDER"
    install -m 600 "$key" "$FOLDER/key"
    install -m 600 "$key.pub" "$FOLDER/authorized_keys"
    # Host keys are new at each start, so the hosts of a job cannot know them beforehand.
    printf '%s\n' "Host *" "Port 2222" "IdentityFile $FOLDER/key" "StrictHostKeyChecking no" \
        "UserKnownHostsFile /dev/null" "LogLevel ERROR" >"$FOLDER/config"
}

check_gpu() {
    [[ ${IMAGE_CUDA:-off} != off ]] || return 0
    local driver
    driver=$(nvidia-smi 2>/dev/null | grep -oE 'CUDA Version: [0-9]+\.[0-9]+' | grep -oE '[0-9.]+$') ||
        {
            warn "no GPU is visible and the CPU is used: start the container with 'docker run --gpus all'."
            return 0
        }
    # A driver runs programs of its own CUDA major version, and of older ones.
    ((${driver%.*} >= ${IMAGE_CUDA%.*})) ||
        fail "the driver supports CUDA $driver but this image is for CUDA $IMAGE_CUDA: update the driver of the host," \
            "or build the image for CUDA ${driver%.*}."
}

check_limits() {
    local kilobytes memlock
    kilobytes=$(df --output=size /dev/shm | tail -n 1)
    ((kilobytes >= 1000000)) ||
        warn "/dev/shm has $((kilobytes / 1000)) MB, too little for data.workers: start with --shm-size=8g or --ipc=host."
    memlock=$(ulimit -l)
    if [[ -d /dev/infiniband && $memlock != unlimited ]]; then
        warn "memlock is limited to $memlock kB and RDMA needs more: start with --ulimit memlock=-1."
    fi
}

[[ -w /tmp ]] || fail "/tmp cannot be written: with a read-only root mount one with --tmpfs /tmp."
name_user
check_gpu
check_limits
if [[ ${1:-} == worker ]]; then
    take_keys
    if (exec 3<>/dev/tcp/127.0.0.1/2222) 2>/dev/null; then
        fail "port 2222 is in use: another worker runs in this network; stop it, or give this one a network of its own."
    fi
    rm -f "$FOLDER/host_key"
    ssh-keygen -q -t ed25519 -N '' -f "$FOLDER/host_key"
    touch "$FOLDER/worker"
    exec /usr/sbin/sshd -D -e -f /opt/docker/sshd_config
fi
if [[ -e $SECRET ]]; then
    take_keys
    export OMPI_MCA_plm_rsh_args="-F $FOLDER/config"
fi
exec "$@"
