#!/usr/bin/env bash
# The image's entry: `worker` waits for jobs over ssh, anything else is the command to run.
set -euo pipefail
SECRET=${SSH_SECRET:-/run/secrets/ssh} # id_ed25519, mounted by whoever starts the container
FOLDER=/tmp/ssh

fail() {
    echo "error: $*" >&2
    exit 2
}

warn() {
    echo "warning: $1" >&2
}

# /tmp may be that of a host: a folder of someone else there is refused.
make_folder() {
    [[ -d $FOLDER ]] || mkdir -m 700 "$FOLDER"
    [[ -O $FOLDER && ! -L $FOLDER ]] || fail "$FOLDER belongs to someone else: remove it, or give the container a /tmp of its own."
}

# An arbitrary uid, as OpenShift gives, has no name, and ssh and mpirun want one. The library gives it the image's, to
# this container's programs alone: with a passwd that can be written anyone could become root.
name_user() {
    if whoami >/dev/null 2>&1; then return 0; fi
    make_folder
    sed "s/^trainer:x:[0-9]*:/trainer:x:$(id -u):/" /etc/passwd >"$FOLDER/passwd"
    export LD_PRELOAD=libnss_wrapper.so NSS_WRAPPER_PASSWD=$FOLDER/passwd NSS_WRAPPER_GROUP=/etc/group
    whoami >/dev/null 2>&1 || fail "uid $(id -u) has no name: install libnss-wrapper in the image, or run as uid 10001."
}

# Copies, since a mounted secret has whatever owner and mode its platform gives it, and ssh is strict about both.
take_keys() {
    local key=$SECRET/id_ed25519
    if [[ ! -e $key && -e $SECRET/id_rsa ]]; then key=$SECRET/id_rsa; fi # the MPI operator's name, whatever its kind
    [[ -r $key ]] ||
        fail "no id_ed25519 in $SECRET that uid $(id -u) can read: mount an ssh key there that belongs to this user" \
            "(chown, or docker run --user with the key's owner and group 0), or set SSH_SECRET to its folder."
    make_folder
    install -m 600 "$key" "$FOLDER/key"
    (umask 077 && ssh-keygen -y -P '' -f "$FOLDER/key" >"$FOLDER/authorized_keys" 2>/dev/null) ||
        fail "$key is no private ssh key without a passphrase: make one with ssh-keygen -t ed25519 -N ''."
    # All hosts of a job have this key, and show it as their own: so each knows the others.
    echo "* $(cut -d ' ' -f 1,2 "$FOLDER/authorized_keys")" >"$FOLDER/known_hosts"
    printf '%s\n' "Host *" "Port 2222" "IdentityFile $FOLDER/key" "StrictHostKeyChecking yes" \
        "UserKnownHostsFile $FOLDER/known_hosts" "GlobalKnownHostsFile /dev/null" "LogLevel ERROR" >"$FOLDER/config"
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
    touch "$FOLDER/worker"
    sessions="PATH=$PATH VIRTUAL_ENV=${VIRTUAL_ENV:-}"
    [[ -z ${LD_PRELOAD:-} ]] ||
        sessions+=" LD_PRELOAD=$LD_PRELOAD NSS_WRAPPER_PASSWD=$NSS_WRAPPER_PASSWD NSS_WRAPPER_GROUP=$NSS_WRAPPER_GROUP"
    exec /usr/sbin/sshd -D -e -f /opt/docker/sshd_config -o "SetEnv=$sessions"
fi
if [[ -e $SECRET ]]; then
    take_keys
    export OMPI_MCA_plm_rsh_args="-F $FOLDER/config"
fi
exec "$@"
