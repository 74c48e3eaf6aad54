"""The tables of DeepSpeed's words hold everything that the sections of a run config have."""

from __future__ import annotations

from framework.config.base import members_of
from framework.config.deepspeed_words import SCHEDULES, TYPED
from framework.config.optimizer import DeepSpeedSchedule
from framework.config.run_config import RunConfig
from framework.config.zero import NEEDED_STAGE, OFFLOADS, STAGE3_KEYS, Zero


def test_every_field_of_deepspeeds_schedules_has_its_name() -> None:
    kinds = members_of(RunConfig.model_fields["scheduler"].annotation)
    assert set(SCHEDULES) == {
        section for section in kinds.values() if issubclass(section, DeepSpeedSchedule)
    }
    for section, (name, names) in SCHEDULES.items():
        assert {"kind", *names} == set(section.model_fields), name
        assert {TYPED[f"scheduler.params.{theirs}"] for theirs in names.values()} == {
            f"scheduler.{ours}" for ours in names
        }


def test_every_device_of_an_offload_has_its_keys_and_its_stage() -> None:
    for name, devices in OFFLOADS.items():
        members = members_of(Zero.model_fields[name].annotation)
        assert dict(devices) == {
            device: section for device, section in members.items() if device != "none"
        }
        assert NEEDED_STAGE[name].keys() == devices.keys()


def test_keys_of_stage_3_name_it() -> None:
    """The word in their sentence is what a reader of the schema sees."""
    fields = Zero.model_json_schema()["properties"]
    assert set(STAGE3_KEYS) == {
        name for name, field in fields.items() if field["description"].startswith("Stage 3:")
    }
