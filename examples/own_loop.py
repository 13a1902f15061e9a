"""FOMAML, or exact MAML, as a loop over steps and tasks instead of an algorithm of fmmeta.

deepspeed --num_gpus 4 examples/own_loop.py --deepspeed ds_configs/zero2.json --group_size 2
deepspeed --num_gpus 4 examples/own_loop.py --group_size 2 --pipeline_stages 2 --algorithm maml

The flags are those of `fmmeta train`; --algorithm maml lets the inner steps keep the trajectory that the
exact gradient goes back over. theta is that of `fmmeta train` with these flags, bit for bit. After a stop
signal the same command resumes.
"""

import sys

import fmmeta
from fmmeta.cli import exit_code, parse
from fmmeta.config.algorithms import find


def main(config: fmmeta.Config):
    order = find(config.algorithm).order
    with fmmeta.prepare(config=config) as meta:
        for step in meta.steps():  # resumes, agrees on stops, saves
            for task in step.tasks():  # this group's share
                with task:  # the worker holds theta before and after
                    for _ in range(config.inner_steps):
                        task.step(task.support, lr=config.inner_lr)
                    task.backward(task.query, order=order)
            step.update()  # reduction over groups, clipping, outer optimizer
        return meta.finish()  # exports and evaluates the model


if __name__ == "__main__":
    with exit_code():
        main(parse([word for word in sys.argv[1:] if not word.startswith("--local_rank=")]))
