"""Which changes of the layout make a resumed checkpoint a moved one."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from framework.checkpoint.resumable import describe_resharding, needs_resharding
from tests.checkpoint.small_checkpoints import LAYOUT, full, saved


class TestMoving:
    PIPELINE: ClassVar[dict[str, Any]] = {"bounds": [0, 2, 4], "layers": []}

    @pytest.mark.parametrize(
        ("layout", "sections", "pipeline", "moved"),
        [
            ({}, {}, None, False),
            (
                {"micro_size": 2, "accumulation_steps": 2},
                {"training": {"max_steps": 9}},
                None,
                False,
            ),
            ({"world_size": 4, "data_parallel_size": 4}, {}, None, True),
            ({}, {"zero": {"stage": 2}}, None, True),
            ({}, {"zero": {"stage": 0, "reduce_bucket_size": 1000}}, None, False),
            ({}, {"precision": {"dtype": "autocast"}}, None, True),
            ({"pipe_size": 2, "data_parallel_size": 1}, {}, PIPELINE, True),
            ({"tensor_size": 1, "sequence_size": 1}, {}, None, False),
            ({"tensor_size": 2, "data_parallel_size": 1}, {}, None, True),
            ({"sequence_size": 2, "data_parallel_size": 1}, {}, None, True),
        ],
    )
    def test_a_checkpoint_of_another_layout_has_moved(
        self,
        layout: dict[str, Any],
        sections: dict[str, Any],
        pipeline: dict[str, Any] | None,
        moved: bool,
    ) -> None:
        now = {"layout": LAYOUT | layout, "config": full(**sections), "pipeline": pipeline}
        assert needs_resharding(saved(full()), description=now) is moved

    @pytest.mark.parametrize(
        ("stage", "changed", "stated"),
        [
            (1, {"round_robin_gradients": True}, "zero.round_robin_gradients: false -> true"),
            (
                2,
                {"offload_optimizer": {"device": "cpu"}},
                "zero.offload_optimizer.device: none -> cpu",
            ),
            (3, {"sub_group_size": 5}, "zero.sub_group_size: 1000000000 -> 5"),
            (3, {"offload_param": {"device": "cpu"}}, "zero.offload_param.device: none -> cpu"),
            *(
                (stage, change, "")
                for stage in (0, 1, 2, 3)
                for change in (
                    {
                        "reduce_bucket_size": 7,
                        "allgather_bucket_size": 8,
                        "overlap_comm": True,
                        "contiguous_gradients": False,
                    },
                    {
                        "stage3_prefetch_bucket_size": 9,
                        "stage3_param_persistence_threshold": 3,
                        "reduce_scatter": False,
                    },
                )
            ),
            (0, {"round_robin_gradients": True, "sub_group_size": 5}, ""),
            (1, {"sub_group_size": 5}, ""),
            (3, {"round_robin_gradients": True}, ""),
        ],
    )
    def test_only_what_decides_where_numbers_lie_is_a_move(
        self, stage: int, changed: dict[str, Any], stated: str
    ) -> None:
        before = saved(full(zero={"stage": stage}))
        now = {"layout": LAYOUT, "config": full(zero={"stage": stage} | changed)}
        assert needs_resharding(before, description=now) is bool(stated)
        assert describe_resharding(before, description=now) == stated

    def test_what_is_different_is_reported(self) -> None:
        now = {
            "layout": LAYOUT | {"world_size": 4},
            "config": full(zero={"stage": 2}, precision={"dtype": "bf16"}),
        }
        reported = describe_resharding(saved(full()), description=now)
        assert reported == "ranks: 2 -> 4, precision.dtype: fp32 -> bf16, zero.stage: 0 -> 2"

    def test_so_has_a_pipeline_that_is_cut_elsewhere(self) -> None:
        before = saved(full(), pipeline=self.PIPELINE)
        here = {
            "layout": LAYOUT,
            "config": full(),
            "pipeline": {**self.PIPELINE, "bounds": (0, 2, 4)},
        }
        assert not needs_resharding(before, description=here)
        assert needs_resharding(
            before, description={**here, "pipeline": {**self.PIPELINE, "bounds": (0, 1, 4)}}
        )

    def test_so_has_one_whose_weights_are_split_otherwise(self) -> None:
        layout, config = LAYOUT | {"tensor_size": 2, "data_parallel_size": 1}, full()
        before = saved(config, layout=layout, tensor={"weight": [0, [4]]})
        now = {"layout": layout, "config": config}
        assert not needs_resharding(before, description=now)  # before the model is built
        assert not needs_resharding(before, description={**now, "tensor": {"weight": [0, [4]]}})
        other = {**now, "tensor": {"weight": [0, [2, 2]]}}
        assert needs_resharding(before, description=other)
        assert describe_resharding(before, description=other) == "other parts of weights"
