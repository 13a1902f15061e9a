"""DPO for users who disagree: a task is a user, with a hidden taste over the same 28 pairs of answers.

A user weighs three properties of a dish by normal numbers. 8 of the pairs are a support set, 8 others a query
set. From this folder (about 5 minutes on a CPU): python dpo.py

Measured on 100 users who are no training task: accuracy of a joint model, and of a meta-trained one as it is
and after 5 inner steps. The claim: the 95 % interval of "adapted - joint" over these users is above 0.
"""

from dataclasses import replace
from itertools import combinations, product

import numpy as np

import fmmeta
from fmmeta.config.learners import PREFERENCE
from fmmeta.learners.preference import PreferenceLearner

K, STEPS = 8, 60
WORDS = (("sweet", "sour"), ("hot", "cold"), ("soft", "hard"))
SIGNS = np.array([*product((1, -1), repeat=3)])  # [8, 3]: of each dish
DISHES = [" ".join(words[int(sign < 0)] for words, sign in zip(WORDS, signs, strict=True)) for signs in SIGNS]
PAIRS = [*combinations(range(8), 2)]


class Dishes(PreferenceLearner):
    beta = 1.0  # 0.1, the default, keeps a model that writes well close to its reference


dishes = replace(PREFERENCE, learner=Dishes)


def draw(user):
    """The support and query pairs of a user, whose number is the seed."""
    rng = np.random.default_rng(user)
    value = SIGNS @ rng.normal(size=3)
    chosen = [sorted(pair, key=lambda dish: -value[dish]) for pair in rng.permutation(PAIRS)[: 2 * K]]
    rows = [{"prompt": "eat", "chosen": DISHES[good], "rejected": DISHES[bad]} for good, bad in chosen]
    return rows[:K], rows[K:]


users = fmmeta.Tasks(draw, train=10_000, valid=20, test=100)
SETTINGS = {"task_type": "dpo:dishes", "dataset": ["dpo:users"]}
RUN = {"lora_r": 8, "lora_target_modules": ["all-linear"], "inner_optimizer": "adamw", "inner_lr": 0.01}
RUN |= {"outer_steps": STEPS, "eval_episodes": 5, "test_episodes": 5, "num_workers": "0", "outer_lr": 0.003}


def accuracies(algorithm, methods, episodes=100):
    """Of each user [users], by method."""
    config = fmmeta.Config(algorithm=algorithm, output_dir=f"runs/{algorithm}", **SETTINGS, **RUN)
    fmmeta.MetaTrainer(config).train()
    found = fmmeta.evaluate(f"runs/{algorithm}/model", method=methods, episodes=episodes, **SETTINGS)
    return [np.array([score["accuracy"] for score in cell["scores"]]) for cell in found["cells"]]


if __name__ == "__main__":
    (joint,) = accuracies("joint", ["zero_shot"])
    before, adapted = accuracies("fomaml", ["zero_shot", "finetune"])
    for name, one in (("joint", joint), ("before", before), ("adapted", adapted), ("gain", adapted - joint)):
        print(f"{name:8} {100 * one.mean():5.1f} +- {196 * one.std(ddof=1) / len(one) ** 0.5:.1f} %")
