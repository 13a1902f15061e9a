"""A callback that prints validation scores and stops a run that no longer improves.

    python examples/callbacks.py

Hooks run on every rank; `run.ranks.first` is true on the one that prints. fmmeta.Callback lists all hooks.
"""

import fmmeta


class StopEarly(fmmeta.Callback):
    """Ends a run after `patience` validations without a lower loss; the model is exported as usual."""

    def __init__(self, patience: int = 3) -> None:
        self.patience, self.best, self.bad = patience, float("inf"), 0

    def on_evaluate(self, run, metrics) -> None:
        loss, improved = metrics["valid_loss"], metrics["valid_loss"] < self.best
        self.best, self.bad = min(loss, self.best), 0 if improved else self.bad + 1
        if run.ranks.first:
            print(f"outer step {run.state.outer_step}: loss {loss:.3f}{' (best)' if improved else ''}")
        if self.bad >= self.patience:
            run.ends_early = True  # all ranks have the same metrics, and so decide alike


def main(patience: int = 3, **settings):
    config = fmmeta.Config(**{"outer_steps": 100, "eval_steps": 5, "eval_episodes": 20, **settings})
    return fmmeta.MetaTrainer(config, callbacks=[StopEarly(patience)]).train()


if __name__ == "__main__":
    result = main()
    print(f"stopped after {result.outer_steps} outer steps; model in {result.output_dir / 'model'}")
