"""A `conda` that answers what Snakemake asks and makes plain virtual environments: no channels are needed."""

import os
import sys
import sysconfig
from pathlib import Path

CONDA = """#!/bin/sh
case "$1 $2" in
"--version ") echo conda 25.9.0 ;;
"info --json") echo '{{"conda_prefix": "{folder}", "platform": "linux-64"}}' ;;
"config --get") echo '{{"get": {{"channel_priority": "strict"}}}}' ;;
"env create")
    while [ $# -gt 0 ]; do [ "$1" = --prefix ] && prefix=$2; shift; done
    "{python}" -m venv --without-pip "$prefix"
    echo "{packages}" > "$prefix"/lib/python{version}/site-packages/packages.pth ;;
"clean "*) ;;
*) echo "unknown: $*" >&2; exit 1 ;;
esac
"""
ACTIVATE = 'export PATH="$1/bin:$PATH" CONDA_PREFIX="$1"\n'


def stand_in_conda(folder: Path) -> str:
    """Write it into `folder`; returns a PATH that finds it first."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    facts = {"folder": folder, "python": sys.executable, "version": version, "packages": sysconfig.get_path("purelib")}
    (programs / "conda").write_text(CONDA.format(**facts))
    (programs / "conda").chmod(0o755)
    (programs / "activate").write_text(ACTIVATE)
    return os.pathsep.join([str(programs), *os.get_exec_path()])
