"""Ranks as threads with one store: they stop after the same step, whoever was asked, and nobody
waits for ever.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Store

from framework.engine import stop_agreement
from framework.engine.stop_agreement import StopAgreement
from framework.errors import PeerLostError
from framework.system.stopping import GO_ON, TIME_IS_UP, Action, Decision, StopRequest
from tests.until import until

pytestmark = pytest.mark.timing

LOOK_SECONDS, LONG = 0.02, 30.0
EVALUATE = Decision(Action.EVALUATE)
SAVE = Decision(Action.SAVE)
SIGTERM = Decision(Action.STOP, "SIGTERM")


class Rank:
    """Trains by sleeping. Ranks may be some steps apart, as those are that only queue work for
    their device.
    """

    def __init__(
        self,
        number: int,
        store: Store,
        *,
        ranks: int,
        steps: int,
        step_seconds: float,
        patience: float = LONG,
        due: Callable[[], Decision] = lambda: GO_ON,
    ) -> None:
        self.request = StopRequest()
        self.request.training_begins()
        self.agreement = StopAgreement(
            self.request,
            store=store,
            rank=number,
            world_size=ranks,
            step=0,
            due=due,
            look_seconds=LOOK_SECONDS,
            wait_seconds=patience,
        )
        self.step, self._steps, self._step_seconds = 0, steps, step_seconds
        self.decision = GO_ON
        self.error: Exception | None = None
        self.by_clock: list[tuple[int, Decision]] = []
        self.thread = threading.Thread(target=self._train, daemon=True)

    def _train(self) -> None:
        try:
            self.agreement.start()
            while self.step < self._steps:
                self.decision = self.agreement.decision_after(self.step)
                if self.decision.action is Action.STOP:
                    break
                if self.decision != GO_ON:
                    self.by_clock.append((self.step, self.decision))
                time.sleep(self._step_seconds * random.uniform(0.5, 1.5))
                self.step += 1
            self.agreement.leave()
        except PeerLostError as error:
            self.error = error
        finally:
            self.agreement.close()


def job(
    *, ranks: int = 3, steps: int = 100_000, step_seconds: float = 0.002, **more: Any
) -> list[Rank]:
    store = PrefixStore("job", HashStore())
    return [
        Rank(n, store, ranks=ranks, steps=steps, step_seconds=step_seconds, **more)
        for n in range(ranks)
    ]


def join(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.thread.join(60)
        assert not rank.thread.is_alive()


@pytest.mark.parametrize("asked", [(0,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("step_seconds", [0.0005, 0.05])
def test_all_stop_after_the_same_step(asked: tuple[int, ...], step_seconds: float) -> None:
    ranks = job(step_seconds=step_seconds)
    for rank in ranks:
        rank.thread.start()
    until(lambda: all(rank.step > 5 for rank in ranks), seconds=LONG)
    for number in asked:
        ranks[number].request.receive(signal.SIGUSR1)
    join(ranks)
    assert {rank.decision for rank in ranks} == {Decision(Action.STOP, "SIGUSR1")}
    assert len({rank.step for rank in ranks}) == 1
    assert 0 < ranks[0].step < 100_000


def test_a_request_before_the_first_step_stops_there() -> None:
    ranks = job(steps=100_000)
    ranks[1].request.receive(signal.SIGTERM)
    for rank in ranks:
        rank.thread.start()
    join(ranks)
    assert {rank.decision for rank in ranks} == {SIGTERM}
    assert len({rank.step for rank in ranks}) == 1


def test_without_a_request_all_train_to_the_end() -> None:
    ranks = job(steps=50)
    for rank in ranks:
        rank.thread.start()
    join(ranks)
    assert [(rank.step, rank.decision) for rank in ranks] == [(50, GO_ON)] * 3


@pytest.mark.parametrize("step_seconds", [0.0005, 0.02])
def test_what_the_clock_asks_for_is_done_by_all_after_the_same_steps(step_seconds: float) -> None:
    wanted = [EVALUATE, SAVE, EVALUATE, EVALUATE, SAVE]
    coming = iter(wanted)
    ranks = job(step_seconds=step_seconds, due=lambda: next(coming, TIME_IS_UP))
    for rank in ranks[1:]:
        rank.agreement._due_by_clock = lambda: GO_ON
    for rank in ranks:
        rank.thread.start()
    join(ranks)
    assert {rank.decision for rank in ranks} == {TIME_IS_UP}
    assert [decision for _, decision in ranks[0].by_clock] == wanted
    assert all((rank.by_clock, rank.step) == (ranks[0].by_clock, ranks[0].step) for rank in ranks)
    assert ranks[0].by_clock == sorted(ranks[0].by_clock, key=lambda pair: pair[0])


def test_a_request_ends_a_run_whose_clock_asks_all_the_time() -> None:
    ranks = job(due=lambda: EVALUATE)  # of every rank, at once
    for rank in ranks:
        rank.thread.start()
    until(lambda: ranks[0].by_clock, seconds=LONG)
    ranks[2].request.receive(signal.SIGTERM)
    join(ranks)
    assert len({(rank.step, rank.decision, len(rank.by_clock)) for rank in ranks}) == 1
    assert ranks[0].decision == SIGTERM
    assert ranks[0].by_clock


@pytest.mark.slow
def test_a_clock_at_any_instant_around_the_end_leaves_no_rank_waiting() -> None:
    for seed in range(25):
        draw = random.Random(seed)
        ranks = job(steps=40, due=lambda draw=draw: EVALUATE if draw.random() < 0.7 else GO_ON)
        for rank in ranks:
            rank.thread.start()
        join(ranks)
        assert all(rank.error is None and rank.by_clock == ranks[0].by_clock for rank in ranks)


@pytest.mark.slow
def test_requests_at_any_instant_around_the_end_leave_no_rank_waiting() -> None:
    draw = random.Random(3)
    for _ in range(25):
        ranks = job(steps=40)
        for rank in ranks:
            rank.thread.start()
        time.sleep(draw.uniform(0.05, 0.12))
        ranks[draw.randrange(3)].request.receive(signal.SIGTERM)
        join(ranks)
        assert len({(rank.step, rank.decision) for rank in ranks}) == 1, (
            "some stopped and some finished"
        )
        assert all(rank.error is None for rank in ranks)


def test_a_rank_that_is_gone_is_reported_by_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(stop_agreement.os, "_exit", ended.append)
    first, second, _ = ranks = job(patience=0.6)
    for rank in ranks[:2]:  # the third never comes
        rank.thread.start()
    second.request.receive(signal.SIGTERM)
    join([first, second])
    if second.agreement._giving_up is not None:
        second.agreement._giving_up.join(LONG)  # later it would end these tests
    for rank in (first, second):
        assert isinstance(rank.error, PeerLostError)
        assert rank.error.exit_code == 76
        assert "[peer-lost]" in str(rank.error)
    assert ended in ([], [76]), (
        "the one that was asked may be in a collective: then its thread ends the process"
    )


def test_one_that_was_asked_and_waits_in_a_collective_ends(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(stop_agreement.os, "_exit", ended.append)
    rank = job(patience=0.3)[0]
    rank.agreement.start()
    rank.request.receive(signal.SIGTERM)
    until(lambda: ended, seconds=LONG)
    rank.agreement.close()
    assert ended == [76]
    assert capfd.readouterr().err.count("[peer-lost]") == 1


class FailsOnce:
    """A store of which the first call of one method, on a key with a word in it, fails."""

    def __init__(self, store: Store, method: str, word: str) -> None:
        self._store = store
        self._method = method
        self._word = word
        self.has_failed = False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name != self._method or self.has_failed:
            return method

        def failing(key: str, *values: Any) -> Any:
            if self._word not in key or self.has_failed:
                return method(key, *values)
            self.has_failed = True
            raise RuntimeError("Connection reset by peer")

        return failing


@pytest.mark.parametrize(
    ("method", "word"), [("set", "asked"), ("set", "next/"), ("add", "posted"), ("set", "decided")]
)
def test_a_post_that_fails_is_made_again(method: str, word: str) -> None:
    store = PrefixStore("job", HashStore())
    stores = [FailsOnce(store, method, word) for _ in range(2)]
    ranks = [
        Rank(number, stores[number], ranks=2, steps=10_000, step_seconds=0.002)  # type: ignore[arg-type]
        for number in range(2)
    ]
    for rank in ranks:
        rank.thread.start()
    ranks[0].request.receive(signal.SIGTERM)
    join(ranks)
    assert any(store.has_failed for store in stores)
    assert {rank.decision for rank in ranks} == {SIGTERM}
    assert len({rank.step for rank in ranks}) == 1


def test_a_store_that_is_gone_does_not_disturb_until_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(stop_agreement.os, "_exit", ended.append)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    rank = Rank(1, client, ranks=2, steps=300, step_seconds=0.002, patience=0.3)
    rank.thread.start()
    time.sleep(0.1)
    del server
    join([rank])
    assert (rank.step, rank.decision, ended) == (300, GO_ON, [])


@pytest.mark.parametrize("num_ranks", [2, 512, 4096, 16_384])
def test_many_ranks_agree_before_the_patience_of_any_ends(num_ranks: int) -> None:
    """Simulated: looks at random phases, one thread at rank 0 that answers 20,000 questions a
    second.

    The rank that is asked says so at its next look; each rank posts at its own next look; all hear
    of the decision as soon as it is there. What a rank waits is what the store needs to tell all of
    them.
    """
    agreement = StopAgreement(
        StopRequest(),
        store=HashStore(),
        rank=0,
        world_size=num_ranks,
        step=0,
        look_seconds=0.25,
        wait_seconds=12.0,
    )
    look, patience = agreement._look_seconds, agreement._wait_seconds
    answers = 3 * num_ranks / 20_000.0  # a step, a count and a decision of every rank
    for seed in range(20):
        phases = np.random.default_rng(seed).uniform(0.0, look, num_ranks)
        said = phases[0]
        posted = said + (phases - said) % look
        decided = float(posted.max()) + answers
        assert decided < patience, "the rank that was asked gives up"
    assert patience < 30.0, "Kubernetes ends a pod"
