"""A report on a step: one file, that runs nothing, loads nothing, and shows what was found."""

import html
import re
import shutil
from html.parser import HTMLParser

import pytest
import runs
from panels import EVIL, SPIKE, plain, spiked

from workbench import open_run
from workbench.errors import ReplayError, RunError
from workbench.run import Run
from workbench.step_report import POLICY, report_html, write_report
from workbench.trainer.corpus import Corpus


@pytest.fixture
def run(tmp_path):
    return Run(shutil.copytree(spiked(), tmp_path / "spiked"))


class Page(HTMLParser):
    """What a browser would see of a page: every tag with its attributes."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open = [], []
        self.feed(text)
        assert self.open == [], self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img", "br", "hr", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def refuse_what_is_live(text):
    for tag, attributes in Page(text).tags:
        assert tag not in ("script", "iframe", "object", "embed", "link", "form", "base", "button", "a"), tag
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name not in ("href", "xlink:href", "srcset", "action"), (tag, name)
            assert name != "src" or value.startswith("data:image/png;base64,"), value
            assert "url(" not in (value or "") and "javascript:" not in (value or "")


def test_what_was_found_is_in_it(run):
    trace, table, verdict = run.replay(SPIKE), run.whatif(SPIKE, "lr=0.5x"), run.autopsy(SPIKE)
    before = runs.digest(run.path)
    text = report_html(run, SPIKE)
    assert runs.digest(run.path) == before
    refuse_what_is_live(text)
    policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="(.*?)">', text)
    assert html.unescape(policy[1]) == POLICY and policy.start() < text.index("<style>")
    said = plain(text)
    assert trace.sentence() in said and verdict.reason in said and "lr=0.5x" in said
    assert all(f"✓ {name}: exact" in said for name, _, _ in trace.badges())
    assert f"{table['loss'].iloc[0]:#.4g}" in said
    assert all(f"{100 * share:.1f} %" in said for share in trace.rows["share"])
    assert all(one.sentence in said for one in verdict.evidence)
    assert 'alt="Loss, gradient norm' in text and 'aria-label="Norms of each layer at step 18' in text
    assert "everything known to move a bit is the same" in said and "left its usual range, by the " in said


def test_nothing_was_found_yet(run):
    text = report_html(run, SPIKE)
    refuse_what_is_live(text)
    said = plain(text)
    assert "Not replayed" in said and f"workbench replay {run.path} --step 18" in said
    assert "Not examined" in said and "corpus.txt" in said and "left its usual range, by the " in said


def test_a_run_that_can_not_be_replayed_is_reported(run):
    shutil.rmtree(run.path / "checkpoints")
    runs.edit_json(run.path / "run.json", lambda m: m["data"][0].update(path="/nowhere/lost.txt"))
    said = plain(report_html(Run(run.path), SPIKE))
    assert "it can't be: no checkpoint" in said and "lost.txt" in said and "is missing" in said


def test_a_log_is_said_to_be_only_a_log(tmp_path):
    (tmp_path / "log.csv").write_text("step,loss\n" + "".join(f"{step},{2 - step / 100}\n" for step in range(1, 9)))
    said = plain(report_html(open_run(tmp_path / "log.csv"), 5))
    assert "Not examined: this is only a log." in said and "Not shown: this is only a log" in said
    assert "workbench autopsy" not in said and "a loop of your own" not in said
    assert "a log does not say what computed it" in said and "item" not in said.split("Environment")[1]


def test_text_from_outside_is_escaped(tmp_path, run):
    path = run.path.rename(tmp_path / '<img src=x onerror="alert(1)">')
    corpus = path / "<b>.txt"
    corpus.write_text("<script>" * 4000)
    entry = Corpus.open(corpus).describe() | {"path": corpus.name}

    def spoil(manifest):
        manifest["data"][0] = entry
        manifest["layers"] = [f"{EVIL}{layer}" for layer in manifest["layers"]]
        manifest["owned"] = {f"{EVIL}{layer}": paths for layer, paths in manifest["owned"].items()}
        manifest["optimizer"]["class"] = EVIL
        manifest["segments"][0]["environment"]["device"] = EVIL

    runs.edit_json(path / "run.json", spoil)
    content = (path / "telemetry.jsonl").read_text()
    (path / "telemetry.jsonl").write_text(re.sub(r'"batch_hash":"\w+",', "", content))
    text = report_html(Run(path), 4)
    refuse_what_is_live(text)
    assert "&lt;script&gt;" in text and "<script" not in text and "<b>.txt" not in text and "&lt;b&gt;.txt" in text


def test_what_is_no_step_is_refused(run):
    with pytest.raises(ReplayError, match="step 99 is not in the telemetry"):
        report_html(run, 99)


def test_the_file(run, tmp_path):
    out = tmp_path / "report.html"
    assert write_report(run, SPIKE, out) == out and out.read_text() == report_html(run, SPIKE)
    write_report(run, 3, out)  # a report may be replaced
    assert "<title>Step 3 of spiked</title>" in out.read_text()
    for there in (tmp_path / "mine.html", tmp_path / "folder"):
        if there.suffix:
            there.write_text("<!DOCTYPE html>mine")
        else:
            there.mkdir()
        with pytest.raises(RunError, match="is there already and is no report"):
            write_report(run, SPIKE, there)
    assert (tmp_path / "mine.html").read_text() == "<!DOCTYPE html>mine"


def test_the_command(run, tmp_path):
    out = tmp_path / "report.html"
    said = runs.here("report", run.path, "--step", SPIKE, "--out", out)
    assert said.code == 0 and str(out) in said.out and "look before you share it" in said.out
    assert "Step 18 of spiked" in out.read_text()
    assert "99" in runs.here("report", run.path, "--step", 99, "--out", out).sentence
    assert "run.json" in runs.here("report", tmp_path, "--step", 1, "--out", out).sentence
    assert "missing" in runs.here("report", run.path, "--step", 1, "--out", tmp_path / "missing" / "x.html").sentence
