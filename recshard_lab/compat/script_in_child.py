"""What multiprocessing imports as ``__mp_main__`` in a process that a script of `script_run` spawns: the script."""

from recshard_lab.compat.script_run import run_script_in_child

if __name__ == "__mp_main__":
    run_script_in_child(globals())
