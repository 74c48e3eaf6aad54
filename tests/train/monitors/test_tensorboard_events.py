"""Events are read back with TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from framework.train.monitors.tensorboard_events import TensorBoardEvents
from tests.train.monitors.points import point

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    reader = event_accumulator.EventAccumulator(str(folder))
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(name)]


def test_every_metric_is_a_scalar_over_steps(tmp_path: Path) -> None:
    monitor = TensorBoardEvents(tmp_path / "tensorboard", from_step=0)
    monitor.write(point(10, train_loss=1.5, train_lr=0.25))
    monitor.write(point(20, train_loss=0.5))
    monitor.write(point(20, eval_loss=2.5))
    monitor.close()
    assert scalars(tmp_path / "tensorboard", "train/loss") == [(10, 1.5), (20, 0.5)]
    assert scalars(tmp_path / "tensorboard", "train/lr") == [(10, 0.25)]
    assert scalars(tmp_path / "tensorboard", "eval/loss") == [(20, 2.5)]


def test_a_resumed_run_hides_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    first = TensorBoardEvents(tmp_path, from_step=0)
    for step in (2, 4, 6, 8):
        first.write(point(step, train_loss=step, eval_loss=step))
    first.close()
    second = TensorBoardEvents(tmp_path, from_step=4)
    second.write(point(5, train_loss=50.0))
    second.close()
    third = TensorBoardEvents(tmp_path, from_step=5)
    third.write(point(6, train_loss=60.0))
    third.close()
    assert scalars(tmp_path, "train/loss") == [(2, 2.0), (4, 4.0), (5, 50.0), (6, 60.0)]
    assert scalars(tmp_path, "eval/loss") == [(2, 2.0), (4, 4.0)]


def test_the_config_is_text_and_hyper_parameters_of_a_fresh_run(tmp_path: Path) -> None:
    metadata = pytest.importorskip("tensorboard.plugins.hparams.metadata")
    config = {
        "optimizer": {"lr": 0.1, "betas": [0.9, 0.95]},
        "monitors": {"csv": True},
        "run": {"name": "night"},
    }
    TensorBoardEvents(tmp_path / "fresh", from_step=0, config=config).close()
    TensorBoardEvents(tmp_path / "resumed", from_step=3, config=config).close()
    reader = event_accumulator.EventAccumulator(str(tmp_path / "fresh"))
    reader.Reload()
    content = reader.PluginTagToContent("hparams")[metadata.SESSION_START_INFO_TAG]
    found = metadata.parse_session_start_info_plugin_data(content).hparams
    assert found["optimizer.lr"].number_value == 0.1
    assert found["optimizer.betas"].string_value == "[0.9, 0.95]"
    assert found["monitors.csv"].bool_value is True
    (text,) = reader.Tensors("config/text_summary")
    assert text.tensor_proto.string_val[0].decode().startswith("    optimizer:\n      lr: 0.1\n")
    again = event_accumulator.EventAccumulator(str(tmp_path / "resumed"))
    again.Reload()
    assert again.Tags()["tensors"] == []
