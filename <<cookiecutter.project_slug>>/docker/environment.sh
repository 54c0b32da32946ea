# shellcheck shell=sh
# For login shells, which do not see the image's ENV; sessions of sshd get it from the entry point.
export PATH="/opt/venv/bin:$PATH" VIRTUAL_ENV=/opt/venv
