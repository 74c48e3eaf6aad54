"""A run described by classes: an editor completes their keys, and a type checker finds a wrong one.

python examples/typed.py
"""

from __future__ import annotations

import framework


def config(max_epochs: int = 2) -> framework.RunConfig:
    """Describe a small network on handwritten digits."""
    return framework.RunConfig(
        run=framework.Run(name="typed"),
        model=framework.LeNet(),
        data=framework.Digits(),
        batch=framework.Batch(global_size=64),
        zero=framework.Zero(stage=1),
        optimizer=framework.AdamW(
            lr=2e-3, groups=[framework.Group(match=".*bias", weight_decay=0.0)]
        ),
        scheduler=framework.Cosine(warmup_steps=10),
        training=framework.Training(max_epochs=max_epochs, log_every=10),
        evaluation=framework.Evaluation(every_epochs=1),
        checkpoint=framework.Checkpoint(keep_best="eval/accuracy"),
        callbacks=[framework.EarlyStopping(metric="eval/loss", patience=2)],
    )


def main() -> None:
    """Train, and print every evaluation."""
    result = framework.fit(config())
    accuracy = result.history["eval/accuracy"]
    for step, value in zip(accuracy.steps, accuracy.values, strict=True):
        print(f"step {step}: accuracy {value:.3f}")
    print(result.best)


if __name__ == "__main__":
    main()
