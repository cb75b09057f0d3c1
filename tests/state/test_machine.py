"""The real ledger on a real database against a model of it, driven by Hypothesis into whatever states it can think of.

The model is a few sets in memory that follow the rules as the design states them. Workers and orchestrators come, sleep
past their leases and come back as zombies; batches are cancelled, expire, and are sent back; the clock jumps. After every
step the database must say what the model says, and the invariants must hold.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from state import batches, jobs, shards
from state.database import Database, upgrade
from state.leasing import LONGEST_DELAY_S, LONGEST_LEASE_S
from state.records import (
    TERMINAL,
    Batch,
    BatchNotCancellable,
    BatchStatus,
    Counts,
    Fault,
    JobKind,
    JobLease,
    LeaseLost,
    Segment,
    ShardLease,
    StopReason,
    Tally,
    WorkState,
    may_move,
)
from tests.conftest import DATABASES
from tests.state.making import GRACE, MODEL, NOW, PROJECT, TTL, create, cut, result, segment

T = TypeVar("T")
STOP_GRACE = 20.0
WORKERS = ("worker-1", "worker-2", "worker-3")
STARTED = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@dataclass
class Work:
    """A shard or a job, as the model sees it."""

    state: WorkState = WorkState.READY
    epoch: int = 0
    holder: str = ""
    until: float = 0.0
    not_before: float = 0.0

    def claimable(self, now: float, grace: float) -> bool:
        if self.state is WorkState.READY:
            return self.not_before <= now or self.not_before > now + LONGEST_DELAY_S
        return self.state is WorkState.LEASED and (self.until < now - grace or self.until > now + LONGEST_LEASE_S)

    def take(self, holder: str, now: float) -> None:
        self.state, self.holder, self.until = WorkState.LEASED, holder, now + TTL
        self.epoch += 1

    def held_under(self, epoch: int) -> bool:
        return self.state is WorkState.LEASED and self.epoch == epoch


@dataclass
class Shard(Work):
    requests: int = 0
    segments: list[Segment] = field(default_factory=list)
    answered: set[int] = field(default_factory=set)
    failed: int = 0


@dataclass
class Known:
    """A batch, as the model sees it."""

    id: str
    status: BatchStatus = BatchStatus.VALIDATING
    stop_reason: StopReason | None = None
    stopped_at: float = 0.0
    reopened: bool = False
    shards: list[Shard] = field(default_factory=list)
    plan: Work = field(default_factory=Work)
    finish: Work | None = None
    seen: Batch | None = None
    final_counts: Counts | None = None

    @property
    def workable(self) -> bool:
        back = self.status is BatchStatus.FINALIZING and self.reopened and self.stop_reason is None
        return self.status is BatchStatus.IN_PROGRESS or back

    @property
    def open(self) -> list[Shard]:
        return [shard for shard in self.shards if shard.state is not WorkState.CLOSED]

    @property
    def stopping(self) -> bool:
        cancelling = self.status is BatchStatus.CANCELLING and (bool(self.open) or not self.shards)
        expiring = self.status is BatchStatus.FINALIZING and self.stop_reason is not None and bool(self.open)
        return cancelling or expiring

    @property
    def counts(self) -> Counts:
        answered = sum(len(shard.answered) for shard in self.shards)
        failed = sum(shard.failed for shard in self.shards)
        return Counts(sum(shard.requests for shard in self.shards), answered - failed, failed)

    def closed_one(self) -> None:
        """The last one out makes the finish job, or makes it ready again."""
        if self.open:
            return
        if self.status is BatchStatus.IN_PROGRESS:
            self.status = BatchStatus.FINALIZING
        if self.finish is None:
            self.finish = Work()
        else:
            assert self.finish.state is WorkState.CLOSED
            self.finish.state, self.finish.not_before = WorkState.READY, 0.0

    def holes(self) -> list[int]:
        return [i for i, shard in enumerate(self.shards) if len(shard.answered) < shard.requests]


class Ledger(RuleBasedStateMachine):
    """The rules. `kind` is the kind of database."""

    kind: ClassVar[str]
    template: ClassVar[Path | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp())
        self.now = NOW
        self.steps = 0
        self.known: list[Known] = []
        self.leases: list[ShardLease] = []  # every one ever given: the old ones are zombies'
        self.job_leases: list[JobLease] = []

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    @initialize(sizes=SIZES)
    def open(self, sizes: list[int]) -> None:
        self.db = Database.open(self.run(self.fresh()))
        self.make_running(sizes)

    async def fresh(self) -> str:
        """The URL of an empty database. A migrated file is made once and copied."""
        assert self.kind == "sqlite"
        if Ledger.template is None:
            made = Path(tempfile.mkdtemp()) / "template.db"
            await upgrade(f"sqlite:///{made}")
            Ledger.template = made
        return f"sqlite:///{shutil.copy(Ledger.template, self.folder / 'overnight.db')}"

    def teardown(self) -> None:
        if hasattr(self, "db"):
            self.run(self.db.close())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
        shutil.rmtree(self.folder)

    def find(self, batch_id: str) -> Known:
        return next(known for known in self.known if known.id == batch_id)

    def now_and_then(self) -> bool:
        """Keeps some rules rare, as little else would ever happen else."""
        return self.steps % 4 == 0

    def unfinished(self) -> bool:
        return self.now_and_then() and any(known.status not in TERMINAL for known in self.known)

    def open_jobs(self) -> dict[tuple[str, JobKind], Work]:
        found = {(known.id, JobKind.PLAN): known.plan for known in self.known}
        found |= {(known.id, JobKind.FINISH): known.finish for known in self.known if known.finish}
        return {key: work for key, work in found.items() if work.state is not WorkState.CLOSED}

    def free_shards(self) -> list[tuple[Known, int]]:
        return [
            (known, number)
            for known in self.known
            if known.workable
            for number, shard in enumerate(known.shards)
            if shard.claimable(self.now, GRACE)
        ]

    def live(self) -> list[int]:
        """Which of the leases are still good."""
        return [
            at
            for at, lease in enumerate(self.leases)
            if self.find(lease.batch_id).shards[lease.number].held_under(lease.epoch)
        ]

    # Time

    @rule(seconds=st.sampled_from([1.0, TTL / 2, TTL + 1, TTL + GRACE + 1, 700.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(seconds=st.sampled_from([-86_400.0, -100.0, 100.0, 86_400.0]))
    def the_clock_jumps(self, seconds: float) -> None:
        """Invariant 8."""
        self.now += seconds

    # Batches

    @precondition(lambda self: self.now_and_then() and len(self.known) < 2)
    @rule()
    def create(self) -> None:
        batch = self.run(create(self.db, now=self.now))
        self.known.append(Known(batch.id))

    @precondition(lambda self: len(self.known) < 2 and not self.open_jobs())
    @rule(sizes=SIZES)
    def make_running(self, sizes: list[int]) -> None:
        """As the three steps would one by one; but most of what matters comes after them."""
        self.create()
        self.take_job()
        self.end_job(self.job_leases[-1], sizes, "key")

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(self.known))
        cancel = batches.cancel(self.db, project_id=PROJECT, batch_id=known.id, now=self.now)
        if known.status in TERMINAL and known.status is not BatchStatus.CANCELLED:
            with pytest.raises(BatchNotCancellable):
                self.run(cancel)
            return
        self.run(cancel)
        if known.status not in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
            known.status = BatchStatus.CANCELLING
            if known.stop_reason is None:
                known.stop_reason, known.stopped_at = StopReason.CANCELLED, self.now

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(self.known))
        happened = self.run(batches.expire(self.db, batch_id=known.id, now=self.now))
        back = known.status is BatchStatus.FINALIZING and known.workable and bool(known.open)
        assert happened == (known.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS) or back)
        if not happened:
            return
        known.stop_reason, known.stopped_at = StopReason.EXPIRED, self.now
        if known.status is BatchStatus.VALIDATING:
            known.status = BatchStatus.EXPIRED
            self.close_plan(known)
        else:
            known.status = BatchStatus.FINALIZING

    @precondition(lambda self: any(known.stopping for known in self.known))
    @rule(data=st.data())
    def close_stopped(self, data: st.DataObject) -> None:
        """Invariant 7: what may be closed is closed, and nothing else."""
        known = data.draw(st.sampled_from([known for known in self.known if known.stopping]))
        step = batches.close_stopped(self.db, batch_id=known.id, now=self.now, stop_grace=STOP_GRACE)
        if not known.shards:
            assert self.run(step)
            known.status = BatchStatus.CANCELLED
            self.close_plan(known)
            return
        overdue = known.stopped_at + STOP_GRACE <= self.now
        free = [shard for shard in known.open if overdue or shard.state is WorkState.READY or shard.until < self.now]
        assert self.run(step) == bool(free)
        for shard in free:
            shard.state, shard.epoch = WorkState.CLOSED, shard.epoch + 1
        if free:
            known.closed_one()

    def close_plan(self, known: Known) -> None:
        if known.plan.state is not WorkState.CLOSED:
            known.plan.state, known.plan.epoch = WorkState.CLOSED, known.plan.epoch + 1

    # Jobs

    @precondition(lambda self: self.open_jobs())
    @rule()
    def take_job(self) -> None:
        job = self.run(jobs.claim(self.db, holder="orchestrator", now=self.now, ttl=TTL))
        open_jobs = self.open_jobs()
        free = {key for key, work in open_jobs.items() if work.claimable(self.now, 0.0)}
        assert (job is not None) == bool(free)
        if job is not None:
            assert (job.batch_id, job.kind) in free
            work = open_jobs[job.batch_id, job.kind]
            work.take("orchestrator", self.now)
            assert job.epoch == work.epoch
            self.job_leases.append(job)

    @precondition(lambda self: self.now_and_then() and any(job.kind is JobKind.PLAN for job in self.job_leases))
    @rule(data=st.data(), sizes=st.one_of(st.none(), SIZES), key=st.sampled_from("ab"))
    def end_plan(self, data: st.DataObject, sizes: list[int] | None, key: str) -> None:
        """By whoever ever held it; `sizes` None refuses the batch."""
        plans = [job for job in self.job_leases if job.kind is JobKind.PLAN]
        self.end_job(data.draw(st.sampled_from(plans)), sizes, key)

    def end_job(self, job: JobLease, sizes: list[int] | None, key: str) -> None:
        known = self.find(job.batch_id)
        end = (
            batches.refused(self.db, job=job, faults=[Fault("empty_file", "nothing")], now=self.now)
            if sizes is None
            else batches.planned(
                self.db,
                job=job,
                model_root=MODEL,
                shards=cut(job.batch_id, sizes),
                index_key=f"{job.id}/{job.epoch}/{key}",
                total=sum(sizes),
                now=self.now,
            )
        )
        if not known.plan.held_under(job.epoch):
            if known.plan.epoch == job.epoch:
                self.run(end)  # it was us who closed it: the answer is repeated, and nothing done twice
                return
            with pytest.raises(LeaseLost):
                self.run(end)
            return
        known.plan.state = WorkState.CLOSED
        validating = known.status is BatchStatus.VALIDATING
        assert self.run(end) == validating
        if validating and sizes is None:
            known.status = BatchStatus.FAILED
        elif validating and sizes is not None:
            known.status = BatchStatus.IN_PROGRESS
            known.shards = [Shard(requests=size) for size in sizes]

    @precondition(lambda self: any(job.kind is JobKind.FINISH for job in self.job_leases))
    @rule(data=st.data())
    def end_finish(self, data: st.DataObject) -> None:
        """By whoever ever held it."""
        self.end_one(data.draw(st.sampled_from([job for job in self.job_leases if job.kind is JobKind.FINISH])))

    @precondition(lambda self: any(work.state is WorkState.LEASED for work in self.open_jobs().values()))
    @rule()
    def take_job_over(self) -> None:
        """Every orchestrator sleeps past its lease, and another comes."""
        self.now += TTL + 1
        self.take_job()

    @precondition(lambda self: any(kind is JobKind.FINISH for _, kind in self.open_jobs()))
    @rule()
    def finish_up(self) -> None:
        before = len(self.job_leases)
        self.take_job()
        for job in self.job_leases[before:]:
            if job.kind is JobKind.FINISH:
                self.end_one(job)

    def end_one(self, job: JobLease) -> None:
        """Finishes, or sends back what has holes (invariant 1)."""
        known = self.find(job.batch_id)
        assert known.finish is not None
        mine = known.finish.held_under(job.epoch)
        holes = known.holes()
        if holes and known.stop_reason is None and known.status not in TERMINAL:
            self.send_back(known, job, holes, mine)
            return
        finish = batches.finished(self.db, job=job, output=result(job, "output"), error=None, now=self.now)
        if not mine:
            if known.status in TERMINAL and known.finish.epoch == job.epoch:
                assert self.run(finish) == known.seen
                return
            with pytest.raises(LeaseLost):
                self.run(finish)
            return
        assert not known.open
        known.final_counts = known.counts
        known.finish.state = WorkState.CLOSED
        done = self.run(finish)
        assert done is not None
        known.status = {
            BatchStatus.CANCELLING: BatchStatus.CANCELLED,
            BatchStatus.FINALIZING: BatchStatus.EXPIRED
            if known.stop_reason is StopReason.EXPIRED
            else BatchStatus.COMPLETED,
        }[known.status]

    def send_back(self, known: Known, job: JobLease, holes: list[int], mine: bool) -> None:
        reopen = shards.reopen(self.db, batch_id=known.id, numbers=holes, now=self.now, job=job)
        if not mine:
            with pytest.raises(LeaseLost):
                self.run(reopen)
            return
        assert self.run(reopen)
        assert known.finish is not None
        known.finish.state, known.reopened = WorkState.CLOSED, True
        for number in holes:
            known.shards[number].state, known.shards[number].not_before = WorkState.READY, 0.0

    # Shards

    @precondition(lambda self: self.live())
    @rule(worker=st.sampled_from(WORKERS))
    def take_over(self, worker: str) -> None:
        """Every owner sleeps past its lease, and somebody comes."""
        self.now += TTL + GRACE + 1
        self.claim(worker)

    @precondition(lambda self: any(known.workable and known.open for known in self.known))
    @rule(worker=st.sampled_from(WORKERS))
    def claim(self, worker: str) -> None:
        free = self.free_shards()
        lease = self.run(shards.claim(self.db, worker_id=worker, models=[MODEL], now=self.now, ttl=TTL, grace=GRACE))
        if not free:
            assert lease is None
            return
        assert lease is not None
        known, number = free[0]
        shard = known.shards[number]
        shard.take(worker, self.now)
        assert (lease.batch_id, lease.number, lease.epoch) == (known.id, number, shard.epoch)
        assert self.run(shards.segments(self.db, batch_id=known.id, number=number)) == shard.segments
        assert lease.next_seq == len(shard.segments)
        self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), close=st.booleans())
    def append_by_anybody(self, data: st.DataObject, close: bool) -> None:
        """By whoever ever held a lease: the zombies are refused (invariant 4)."""
        at = data.draw(st.integers(0, len(self.leases) - 1))
        self.append(at, data.draw(st.sets(st.integers(0, 3), min_size=1)), data.draw(st.integers(0, 4)), close)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), places=st.sets(st.integers(0, 3), min_size=1), failed=st.integers(0, 2), close=st.booleans())
    def append_by_an_owner(self, data: st.DataObject, places: set[int], failed: int, close: bool) -> None:
        self.append(data.draw(st.sampled_from(self.live())), places, failed, close)

    @precondition(lambda self: self.live() or self.free_shards())
    @rule(worker=st.sampled_from(WORKERS), failed=st.integers(0, 2))
    def run_out(self, worker: str, failed: int) -> None:
        """A worker answers all that is left of a shard, and closes it."""
        if self.free_shards():
            self.claim(worker)
        self.append(self.live()[-1], {0, 1, 2, 3}, failed, close=True)

    def append(self, at: int, wanted: set[int], failed: int, close: bool) -> None:
        lease = self.leases[at]
        shard = self.find(lease.batch_id).shards[lease.number]
        mine = shard.held_under(lease.epoch)
        places = (wanted & set(range(shard.requests))) - (shard.answered if mine else set())
        failed = min(failed, len(places))
        made = segment(lease, *places)
        tally = Tally(completed=len(places) - failed, failed=failed)
        send = shards.append(self.db, lease=lease, segment=made, tally=tally, close=close, now=self.now)
        if not mine:
            with pytest.raises(LeaseLost):
                self.run(send)
            return
        self.leases[at] = self.run(send)
        shard.segments.append(made)
        shard.answered |= places
        shard.failed += failed
        if close:
            shard.state = WorkState.CLOSED
            self.find(lease.batch_id).closed_one()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        """Perhaps too early: then finishing finds a hole."""
        lease = data.draw(st.sampled_from(self.leases))
        known = self.find(lease.batch_id)
        shard = known.shards[lease.number]
        if shard.state is WorkState.CLOSED and shard.epoch == lease.epoch:
            self.run(shards.close(self.db, lease=lease, now=self.now))  # our own close again: no more than once
        elif shard.held_under(lease.epoch):
            self.run(shards.close(self.db, lease=lease, now=self.now))
            shard.state = WorkState.CLOSED
            known.closed_one()
        else:
            with pytest.raises(LeaseLost):
                self.run(shards.close(self.db, lease=lease, now=self.now))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), delay=st.sampled_from([0.0, 10.0]))
    def release(self, data: st.DataObject, delay: float) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        shard = self.find(lease.batch_id).shards[lease.number]
        give_back = shards.release(self.db, lease=lease, now=self.now, not_before=self.now + delay)
        if shard.held_under(lease.epoch):
            self.run(give_back)
            shard.state, shard.not_before = WorkState.READY, self.now + delay
        elif shard.state is WorkState.READY and shard.epoch == lease.epoch:
            self.run(give_back)
        else:
            with pytest.raises(LeaseLost):
                self.run(give_back)

    @precondition(lambda self: self.live())
    @rule(worker=st.sampled_from(WORKERS))
    def renew(self, worker: str) -> None:
        """However late (ledger rule 6)."""
        mine = {(x.batch_id, x.number): x.epoch for x in self.leases if x.worker_id == worker}
        asked = [(batch_id, number, epoch) for (batch_id, number), epoch in mine.items()]
        renewal = self.run(shards.renew(self.db, worker_id=worker, leases=asked, now=self.now, ttl=TTL))
        held = {
            (batch_id, number)
            for batch_id, number, epoch in asked
            if self.find(batch_id).shards[number].held_under(epoch)
        }
        assert renewal.held == held
        assert renewal.lost == set(mine) - held
        assert renewal.stopped == {place for place in held if not self.find(place[0]).workable}
        for batch_id, number in held:
            self.find(batch_id).shards[number].until = self.now + TTL

    @precondition(lambda self: self.live())
    @rule(worker=st.sampled_from(WORKERS))
    def a_worker_dies(self, worker: str) -> None:
        self.run(shards.expire_leases(self.db, holder=worker))
        for known in self.known:
            for shard in known.shards:
                if shard.state is WorkState.LEASED and shard.holder == worker:
                    shard.until = 0.0

    # What must always hold

    @invariant()
    def the_database_says_what_the_model_says(self) -> None:
        self.steps += 1
        if not hasattr(self, "db"):
            return
        page = self.run(batches.page(self.db, project_id=PROJECT, limit=10, after=None))
        seen = {batch.id: batch for batch in page.items}
        assert set(seen) == {known.id for known in self.known}
        for known in self.known:
            self.check(known, seen[known.id])
            known.seen = seen[known.id]

    def check(self, known: Known, seen: Batch) -> None:
        assert seen.status is known.status
        assert seen.stop_reason is known.stop_reason
        assert seen.counts == (known.final_counts or known.counts)
        assert seen.counts.completed + seen.counts.failed <= seen.counts.total  # invariant 5
        if known.seen is not None:
            self.check_step(known.seen, seen)
        if known.shards:
            self.check_work(known)

    def check_step(self, before: Batch, now: Batch) -> None:
        assert before.status is now.status or may_move(before.status, now.status)  # invariant 6
        for name in STARTED:
            assert getattr(before, name) in (None, getattr(now, name))
        if before.counts.total:
            assert before.counts.completed <= now.counts.completed  # invariant 5
            assert before.counts.failed <= now.counts.failed
        if before.status in TERMINAL:
            assert replace(before, deadline=0.0) == replace(now, deadline=0.0)

    def check_work(self, known: Known) -> None:
        infos = self.run(shards.shard_list(self.db, batch_id=known.id))
        assert [(info.state, info.epoch) for info in infos] == [(s.state, s.epoch) for s in known.shards]
        segments = self.run(shards.all_segments(self.db, batch_id=known.id))
        assert segments == [made for shard in known.shards for made in shard.segments]  # invariant 3
        for shard in known.shards:
            epochs = [made.epoch for made in shard.segments]
            assert epochs == sorted(epochs)  # invariant 4
            assert sum(made.lines for made in shard.segments) == len(shard.answered), "a line was answered twice"
        if known.status is BatchStatus.COMPLETED:
            assert known.holes() == []  # invariant 1
        open_finish = known.finish is not None and known.finish.state is not WorkState.CLOSED
        assert open_finish == (not known.open and known.status not in TERMINAL), "exactly one finish job, at the end"


def _test_case(kind: str) -> type:
    machine = type(f"LedgerOn{kind.title()}", (Ledger,), {"kind": kind})
    case: type = machine.TestCase
    case.settings = settings(  # type: ignore[attr-defined]
        max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return case


for _kind in DATABASES:
    globals()[f"TestLedgerOn{_kind.title()}"] = _test_case(_kind)
