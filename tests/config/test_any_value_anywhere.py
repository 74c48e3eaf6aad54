"""Any value at any place of a config: a run, or problems in whole sentences."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_lint.text.document import Document
from framework.config.load import config_from_values, load_known
from framework.config.run_config import RunConfig
from framework.config.schema import schema_text
from framework.errors import ConfigError
from framework.plan.cluster import Cluster
from framework.plan.known_sections import errors_of_known
from framework.plan.plan import make_plan

pytestmark = pytest.mark.slow

SCHEMA = json.loads(schema_text())
KEYS = sorted({key for section in SCHEMA["$defs"].values() for key in section["properties"]})
TAGS = sorted(
    {
        field["const"]
        for section in SCHEMA["$defs"].values()
        for field in section["properties"].values()
        if "const" in field
    }
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(TAGS)
    | st.just("a.b:c")
)
VALUES = st.recursive(
    SCALARS,
    lambda values: (
        st.lists(values, max_size=3) | st.dictionaries(st.sampled_from(KEYS), values, max_size=4)
    ),
)
CONFIGS = st.dictionaries(
    st.sampled_from(list(RunConfig.model_fields)) | st.text(max_size=3), VALUES, max_size=4
)
JARGON = re.compile(
    r"pydantic|Input should|String should|validat|NoneType|\bdict\b|\bstr\b|\bint\b|\{\w*\}(?!\w)|Traceback"
)


@settings(max_examples=300)
@given(CONFIGS)
def test_problems_are_whole_sentences(values: dict[str, Any]) -> None:
    problems = []
    try:
        config = config_from_values(values)
        with suppress(ConfigError):
            make_plan(config, Cluster(devices_per_host=2))
    except ConfigError as error:
        config, unknown, source = load_known(Document("run.json", values), ())
        problems = [*error.problems, *errors_of_known(config, unknown, None, source=source)]
    for problem in problems:
        line = str(problem)
        assert line.isprintable()
        assert problem.reason
        assert problem.fix, line
        assert not JARGON.search(f"{problem.reason}; {problem.fix}"), line
