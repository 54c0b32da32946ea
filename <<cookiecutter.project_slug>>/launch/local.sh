#!/usr/bin/env bash
# Trains on this machine with several processes (ranks):
#   launch/local.sh [-n RANKS] [hydra overrides...]
# RANKS is the number of GPUs by default, or 2 without a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    echo "error: $1" >&2
    exit 2
}

ranks=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)
if [[ $ranks -eq 0 ]]; then ranks=2; fi
if [[ ${1:-} == -n ]]; then
    ranks=${2:-}
    [[ $ranks =~ ^[1-9][0-9]*$ ]] ||
        fail "-n is '$ranks', but it must be a number of ranks, for example -n 2."
    shift 2
fi

if [[ -z ${VIRTUAL_ENV:-} && -d .venv ]]; then PATH=$PWD/.venv/bin:$PATH; fi
find_horovod='import importlib.util as u; print(u.find_spec("horovod").submodule_search_locations[0])'
horovod=$(python -c "$find_horovod" 2>/dev/null) ||
    fail "Horovod is not installed for $(command -v python || echo python): run 'nox -s train' once."
train=(python -m <<cookiecutter.package_name>>.train "$@")

# MPI is the faster transport; Gloo needs nothing but Horovod itself.
if grep --quiet libmpi.so "$horovod"/*/mpi_lib*.so && mpirun --version 2>/dev/null | grep --quiet 'Open MPI'; then
    # Binding would put all threads of a rank on one core; a rank that waits must not take a core
    # from one that works; containers forbid the single copy between processes.
    options=(--bind-to none --mca mpi_yield_when_idle 1 --mca btl_vader_single_copy_mechanism none)
    # The terminal that mpirun gives rank 0 has no width; with this one's it shows a progress bar.
    if [[ -t 1 ]]; then COLUMNS=$(tput cols) && export COLUMNS; fi
    if [[ $EUID -eq 0 ]]; then options+=(--allow-run-as-root); fi
    # mpirun gives rank 0 a terminal of its own even if its output goes to a file.
    if [[ ! -t 1 ]]; then export TTY_COMPATIBLE=0; fi
    # mpirun leaves its ranks a second after a SIGTERM, but passes SIGUSR1 on: so they save, then stop.
    mpirun -np "$ranks" --host "localhost:$ranks" "${options[@]}" "${train[@]}" &
    trap 'kill -USR1 $!' TERM
    trap 'kill -INT $!' INT
    code=0
    wait $! || code=$?
    while kill -0 $! 2>/dev/null; do # a signal has interrupted the wait
        code=0
        wait $! || code=$?
    done
    exit "$code"
fi
exec horovodrun --gloo -np "$ranks" --network-interfaces lo "${train[@]}"
