"""A script for torchrun together with the command that starts it, as one file for the shell."""

_SHELL = """#!/usr/bin/env bash
# Trains under a sharding plan with torchrun: bash THIS_FILE --steps 100. Written by recshard_lab.
{about}set -euo pipefail
script=$(mktemp -d)/train.py
trap 'rm -rf "$(dirname "$script")"' EXIT
cat >"$script" <<'END_OF_RECSHARD_SCRIPT'
{script}
END_OF_RECSHARD_SCRIPT
{command} "$script" "$@"
"""
_NODES = "# On every node, with the first one's name and a free port: RENDEZVOUS=host:29400 bash THIS_FILE\n"


def shell_of(script: str, world_size: int, local_world_size: int) -> str:
    """The text of a shell file that runs a script, as `ShardingPlan.to_script` writes it, on so many ranks.

    Args:
        script: the text of the Python file.
        world_size: ranks W.
        local_world_size: ranks of one node; where there are several nodes, the file is started on each.

    >>> "torchrun --nproc-per-node 2" in shell_of("pass", 2, 2)
    True
    """
    nodes = world_size // local_world_size
    command, about = f"torchrun --nproc-per-node {local_world_size}", ""
    if nodes > 1:
        about = _NODES
        command += f' --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint "${{RENDEZVOUS:?host:port of one node}}"'
    return _SHELL.format(about=about, script=script.rstrip("\n"), command=command)
