#!/usr/bin/env bash
# Trains with several processes (ranks) on this machine:
#   launch/local.sh [-n RANKS] [overrides of the configuration...]
# RANKS is the number of GPUs by default, or 2 without a GPU; launch/local.sh --help lists all options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -z ${VIRTUAL_ENV:-} && -d .venv ]]; then PATH=$PWD/.venv/bin:$PATH; fi
exec python -m <<cookiecutter.package_name>>.launch "$@"
