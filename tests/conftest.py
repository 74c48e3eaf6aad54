"""What holds for every test: it leaves the environment and the working folder as it found them. And
checkpoints of many layouts.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import logging
import os
import random
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings

# A failed comparison there shows both sides, as in a test file.
pytest.register_assert_rewrite("tests.train.monitors.sinks")

from tests import lanes, launched, ops_ahead, warm_ranks  # noqa: E402

# A busy machine is no finding: how long an example takes depends on what else runs. What a build
# machine says depends on the commit alone; elsewhere every run tries other examples, and one that
# fails can be had again.
settings.register_profile(
    "dsf-trainer", deadline=None, print_blob=True, derandomize=bool(os.environ.get("CI"))
)
settings.load_profile("dsf-trainer")

# A signal that the caller ignores, as a script's command with `&` does, would be ignored by
# every process of every test.
for _number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(
            _number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL
        )

# In what tests start through commands as well.
os.environ[launched.NO_COMPILE] = "1"

# What tests train is not noted among what their user has trained.
os.environ["XDG_STATE_HOME"] = str(Path(tempfile.gettempdir(), f"dsf-tests-state-{os.getuid()}"))

# Set for good by importing deepspeed and torch, and by torch's inductor.
_SET_BY_IMPORTS = {
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="try what is otherwise tried in part; minutes more",
    )
    parser.addoption(
        "--processor-times",
        metavar="FILE",
        type=Path,
        help="write the processor seconds of each test, with those of its processes, into FILE",
    )


_exit_codes: list[int] = []


class _LogsToStderr(logging.StreamHandler[Any]):
    """Fails the test that logs what cannot be formatted."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if not self.stream.closed:
            raise


def pytest_configure(config: pytest.Config) -> None:
    """Set how long runs are, before their cases are listed. Switch the garbage collector off while
    tests are collected: nothing of what they import is garbage.
    """
    launched.exhaustive = bool(config.getoption("--exhaustive"))
    warm_ranks.is_fast_part = lanes.leaves_slow_out(config)
    times = config.getoption("--processor-times")
    if times is not None:
        times.write_bytes(b"")
    gc.disable()
    # pytest's own plugin for logs is left out (pyproject.toml): six times a test it looks through
    # all loggers of torch and the others. What libraries log stands in what is captured of stderr;
    # unittest's assertLogs does what caplog does.
    logging.getLogger().addHandler(_LogsToStderr())
    atexit.register(_end_at_once)  # early, and so after all other handlers
    # Late, torch asks for a solver of this name; the folder of a test's run is none.
    if importlib.util.find_spec("z3") is None:
        sys.modules["z3"] = None  # type: ignore[assignment]
    # DeepSpeed's autotuner imports it, for a second.
    sys.modules.setdefault("mlflow", None)  # type: ignore[arg-type]


def pytest_collection_finish() -> None:
    """Let tests import mlflow. Collect garbage again, among what tests make."""
    if sys.modules["mlflow"] is None:
        del sys.modules["mlflow"]
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keep the exit code for `_end_at_once`."""
    _exit_codes.append(int(session.exitstatus))


def _end_at_once() -> None:
    """End the process without tearing down ten thousand cases, which takes seconds."""
    if _exit_codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_codes[-1])


def _processor_seconds() -> float:
    times = os.times()
    own = times.user + times.system
    children = times.children_user + times.children_system
    return own + children + warm_ranks.processor_seconds()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note the processor time of each test for `--processor-times`. Lanes write into one file, a
    line at a time.
    """
    begin = _processor_seconds()
    result = yield
    times = item.config.getoption("--processor-times")
    if times is not None:
        with times.open("a", encoding="utf-8") as file:
            file.write(f"{_processor_seconds() - begin:.2f}\t{item.nodeid}\n")
    return result


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Limit the time of what follows a failure: its fixtures' ends, and the second try of a test.
    pytest-timeout stops its clock there, for a debugger.
    """
    if isinstance(node, pytest.Item) and not node.config.option.usepdb:
        settings = SimpleNamespace(
            timeout=float(node.config.getini("timeout")),
            method="signal",
            func_only=False,
            disable_debugger_detection=False,
        )
        node.ihook.pytest_timeout_set_timer(item=node, settings=settings)


@pytest.fixture(scope="session")
def exhaustive(pytestconfig: pytest.Config) -> bool:
    """Whether everything is tried, and not a fixed part of it."""
    return bool(pytestconfig.getoption("--exhaustive"))


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the whole suite in lanes."""
    lanes.choose(config)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files of slow tests alone where none is chosen: what they import takes seconds."""
    if lanes.leaves_slow_out(config) and collection_path.suffix == ".py":
        text = collection_path.read_text(encoding="utf-8")
        if re.search(r"^pytestmark = (\[\s*)?pytest\.mark\.slow\b", text, re.MULTILINE):
            return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run fast tests first: what they find is known in minutes. Rerun once, visibly, what depends
    on the timing of processes. Leave out what `--exhaustive` asks for.
    """
    if not config.getoption("--exhaustive"):
        left_out = {item for item in items if item.get_closest_marker("exhaustive")}
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=[*left_out])
    lanes.sort(items)
    for item in items:
        if item.get_closest_marker("timing"):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(scope="session", autouse=True)
def _compiled_ahead(request: pytest.FixtureRequest) -> Iterator[None]:
    """While fast tests run, the ops that the tests of DeepSpeed's own answers load are compiled."""
    is_needed = lanes.is_first() and any(
        item.path.name == "test_against_deepspeed.py" for item in request.session.items
    )
    process = ops_ahead.start() if is_needed else None
    yield
    if process is not None:
        process.terminate()
        process.wait()


@pytest.fixture(scope="session", autouse=True)
def _session_ranks_end() -> Iterator[None]:
    yield
    warm_ranks.end_session_ranks()


@pytest.fixture(scope="session")
def warm() -> warm_ranks.WarmRanks:
    """Ranks in two seconds instead of ten, for every test that does not kill the process they are
    forked from.
    """
    return warm_ranks.session_ranks()


@pytest.fixture(autouse=True)
def _draws_the_same_numbers() -> None:
    """Seed the global generators: which tests share a process differs from run to run."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        if torch.cuda.is_initialized():
            torch.manual_seed(0)
        else:
            # What torch.manual_seed notes for devices that nothing has used costs a millisecond.
            torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _leaves_the_process_as_it_was() -> Iterator[None]:
    folder, before = os.getcwd(), dict(os.environ)
    yield
    after = dict(os.environ)
    stays = os.getcwd() == folder
    if stays and after == before:
        return
    changed = sorted(
        name
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name)
        and not name.startswith("PYTEST_")
        and name not in _SET_BY_IMPORTS
    )
    os.chdir(folder)
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    assert not changed, f"the test leaks environment variables: {', '.join(changed)}"
    assert stays, "the test leaves another working folder behind"


@pytest.fixture(scope="session")
def plain_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on three ranks, trained once for all tests that read their checkpoints."""
    from tests.engine.saved_runs import PLAIN, train  # here, because it imports torch

    make = partial(train, PLAIN, num_ranks=3)
    return lanes.made_once("plain-runs", make, tmp_path_factory)


@pytest.fixture(scope="session")
def piped_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two stages, each on two ranks."""
    from tests.engine.saved_runs import PIPED, train

    make = partial(train, PIPED, pipe=2, num_ranks=4)
    return lanes.made_once("piped-runs", make, tmp_path_factory)


@pytest.fixture(scope="session")
def divided_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two tensor ranks times two data-parallel ones."""
    from tests.engine.saved_runs import DIVIDED, train

    make = partial(train, DIVIDED, tensor=2, num_ranks=4)
    return lanes.made_once("divided-runs", make, tmp_path_factory)
