"""The doctor's work, shared out to processes."""

import pytest

from workbench import doctor
from workbench.errors import ReplayError
from workbench.examination import repeats, shards
from workbench.examination.catalogue import CATALOGUE
from workbench.examination.repeats import Job, fresh_experiments, perform


@pytest.mark.parametrize("count", [1, 3, 8, 16])
def test_shards_have_every_setting_and_operation_once(count):
    made = shards.shards("gpu", 4, count)
    assert len(made) == count
    assert sorted(number for one in made for number in one.settings) == list(range(len(shards.SETTINGS)))
    assert sorted(number for one in made for number in one.operations) == list(range(len(CATALOGUE)))


def small_shards():
    return [shards.Shard("cpu", [0], [3], 1), shards.Shard("cpu", [1], [2, 5], 1)]


def test_shards_are_examined_in_processes_and_a_failed_one_once_more(monkeypatch):
    started, real = [], shards._started

    def once_broken(shard, stack):
        started.append(shard)
        child = real(shard, stack)
        if len(started) == 1:
            child.kill()
        return child

    monkeypatch.setattr(shards, "_started", once_broken)
    rows, digests = shards.examine_shards(small_shards(), lambda what: None)
    assert [shard.settings for shard in started] == [[0], [1], [0]]
    assert [(row.name, row.dtype) for row in rows] == [(CATALOGUE[n].name, CATALOGUE[n].dtype) for n in (2, 3, 5)]
    assert {row.distinct for row in rows} == {1}
    subject = fresh_experiments(repeats.small_transformer)
    assert digests == [perform(*subject(shards.SETTINGS[number]), 1) for number in (0, 1)]


def test_a_shard_that_fails_twice_is_an_error(monkeypatch):
    monkeypatch.setattr(shards.sys, "executable", "/bin/false")
    with pytest.raises(ReplayError, match="a process of the examination ended with code 1"):
        shards.examine_shards(small_shards()[:1], lambda what: None)


def test_what_shards_found_counts_as_a_fresh_process(monkeypatch):
    settings = shards.SETTINGS[:2]
    subject = fresh_experiments(repeats.small_transformer)
    before = [perform(*subject(setting), 1) for setting in settings]
    job = Job(device="cpu", settings=settings, steps=1)
    monkeypatch.setattr(doctor, "in_fresh_processes", None)  # not needed: one was asked for, and one is there

    def rows(found):
        effort = doctor._Effort(steps=1, repeats=2, processes=1, seconds=0.0)
        nothing = lambda *said: None  # noqa: E731
        return doctor._examine_steps(subject, settings, effort, job, nothing, nothing, [found]).rows

    assert [(row.repeats, row.processes, row.distinct) for row in rows(before)] == [(2, 1, 1)] * 2
    other = before[1] | {"loss": "0" * 8}
    assert [(row.distinct, row.first) for row in rows([before[0], other])] == [(1, None), (2, "loss")]
