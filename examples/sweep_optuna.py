"""Sweep over learning rate and width with Optuna: trials that fall behind are stopped early.

    python examples/sweep_optuna.py [number of trials]

The study is a file: started again, it goes on. Each trial has a run folder under runs/sweep, with
its report; `dsf report runs/sweep/*` draws them over each other. Needs `pip install
optuna`.
"""

import sys

import optuna

import framework

CONFIG = {
    "data": {"kind": "digits", "image_size": 8},
    "batch": {"global_size": 64},
    "training": {"max_epochs": 6, "log_every": 22},
    "evaluation": {"every_epochs": 1},
    "checkpoint": {"at_end": False},
    "monitors": {"tensorboard": False, "progress": "off"},
}


class Report:
    """Tells Optuna the loss of every evaluation, and stops where Optuna says so."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial, self.is_pruned = trial, False

    def on_evaluation(self, state: framework.State) -> None:
        self.trial.report(state.metrics["eval/loss"], state.step)
        if self.trial.should_prune():
            self.is_pruned = True
            state.stop("Optuna prunes this trial")


def objective(trial: optuna.Trial) -> float:
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    width = trial.suggest_categorical("width", [16, 64, 256])
    report = Report(trial)
    run = {"name": f"trial{trial.number}", "output_dir": "runs/sweep"}
    model = {"kind": "mlp", "image_size": 8, "hidden_sizes": [width]}
    config = CONFIG | {"run": run, "model": model, "optimizer": {"kind": "adamw", "lr": lr}}
    result = framework.fit(config, callbacks=[report])
    if report.is_pruned:
        raise optuna.TrialPruned
    return result.metrics["eval/loss"]


if __name__ == "__main__":
    pruner = optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=22)
    sampler = optuna.samplers.TPESampler(seed=0)
    where = {"storage": "sqlite:///sweep.db", "study_name": "digits", "load_if_exists": True}
    study = optuna.create_study(pruner=pruner, sampler=sampler, **where)
    study.optimize(objective, n_trials=int(sys.argv[1]) if len(sys.argv) > 1 else 10)
    print(f"best: {study.best_params}, eval/loss {study.best_value:.4f}")
