"""The log of saves: lines that many processes append, whatever was cut short before."""

import json
import subprocess
import sys
from pathlib import Path

from backstay.events import EVENTS_NAME, SaveEvent, append_event, read_events, table

APPENDER = """
import sys
from pathlib import Path
from backstay.events import SaveEvent, append_event
sys.stdin.readline()
for step in range(200):
    event = SaveEvent(step=step, attempt=sys.argv[2], outcome="committed", cause="x" * 500)
    append_event(Path(sys.argv[1]), event)
"""


def saved(step: int = 1, **fields: object) -> SaveEvent:
    return SaveEvent(step=step, attempt="0000000a-0001", outcome="committed", **fields)  # type: ignore[arg-type]


def test_what_was_appended_is_read_in_order(tmp_path: Path) -> None:
    failed = SaveEvent(
        step=2, attempt="b", outcome="failed", kind="ENOSPC", rank=3, cause="voll:\n„disk“"
    )
    events = [saved(blocked_s=0.1 + 0.2, num_bytes=1 << 60, unchanged=True), failed]
    for event in events:
        append_event(tmp_path, event)
    assert read_events(tmp_path) == events


def test_each_event_is_one_line(tmp_path: Path) -> None:
    append_event(tmp_path, saved(1, cause="two\nlines"))
    append_event(tmp_path, saved(2))
    lines = (tmp_path / EVENTS_NAME).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_a_root_without_a_log_has_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []


def test_a_line_cut_short_is_passed_over(tmp_path: Path) -> None:
    append_event(tmp_path, saved(1))
    append_event(tmp_path, saved(2))
    log = tmp_path / EVENTS_NAME
    log.write_bytes(log.read_bytes()[:-40])
    assert [event.step for event in read_events(tmp_path)] == [1]


def test_an_event_after_a_line_cut_short_is_not_lost(tmp_path: Path) -> None:
    append_event(tmp_path, saved(1))
    log = tmp_path / EVENTS_NAME
    log.write_bytes(log.read_bytes()[:-40])
    append_event(tmp_path, saved(2))
    assert [event.step for event in read_events(tmp_path)] == [2]


def test_lines_that_hold_no_event_are_passed_over(tmp_path: Path) -> None:
    append_event(tmp_path, saved(1))
    with (tmp_path / EVENTS_NAME).open("a") as log:
        log.write('\n7\nnull\n[]\n{}\n{"step": 3}\n\0\0\0\n')
    append_event(tmp_path, saved(2))
    assert [event.step for event in read_events(tmp_path)] == [1, 2]


def test_bytes_that_are_no_text_are_passed_over(tmp_path: Path) -> None:
    append_event(tmp_path, saved(1))
    with (tmp_path / EVENTS_NAME).open("ab") as log:
        log.write(b"\xff\xfe\n")
    assert [event.step for event in read_events(tmp_path)] == [1]


def test_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    line = {"step": 5, "attempt": "a", "outcome": "committed", "num_gpus": 8}
    (tmp_path / EVENTS_NAME).write_text(json.dumps(line) + "\n")
    assert read_events(tmp_path) == [SaveEvent(step=5, attempt="a", outcome="committed")]


def test_several_processes_at_once_lose_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", APPENDER, str(tmp_path)]
    appenders = [
        subprocess.Popen([*command, name], stdin=subprocess.PIPE, text=True) for name in "abcd"
    ]
    for each in appenders:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.close()
    assert [each.wait(60) for each in appenders] == [0] * 4
    events = read_events(tmp_path)
    for name in "abcd":
        assert [event.step for event in events if event.attempt == name] == [*range(200)]


def test_the_table_has_one_row_per_event_between_head_and_sum() -> None:
    events = [saved(step) for step in (10, 20)]
    head, *rows, total = table([*events, SaveEvent(step=30, attempt="c", outcome="failed")]).split(
        "\n"
    )
    assert head.split()[:2] == ["step", "outcome"]
    assert [row.split()[:2] for row in rows] == [
        ["10", "committed"],
        ["20", "committed"],
        ["30", "failed"],
    ]
    assert total.startswith("3 saves")


def test_the_table_adds_up_the_time_that_training_lost() -> None:
    text = table([saved(1, blocked_s=0.25), saved(2, blocked_s=0.5, drained_s=2.0, written_s=9.0)])
    assert "training time lost to them: 2.750 s, 2.000 s of it waiting for the save before" in text


def test_the_table_is_silent_about_waiting_where_nobody_waited() -> None:
    assert table([saved(1, blocked_s=0.25)]).endswith("training time lost to them: 0.250 s")
