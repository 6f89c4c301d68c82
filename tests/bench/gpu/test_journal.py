import pytest

from kvjax.bench.gpu.journal import Journal


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "run.jsonl")


def test_entries_come_back_in_order(journal):
    assert journal.entries() == []
    journal.write("row", x=1.5, says="a\nb")
    journal.write("row", x=2)
    journal.write("check", x=None)
    assert journal.of("row") == [{"kind": "row", "x": 1.5, "says": "a\nb"}, {"kind": "row", "x": 2}]
    assert len(journal.entries()) == 3


def test_a_line_that_is_still_written_is_left_out(journal):
    journal.write("row", x=1)
    with journal.path.open("a") as file:
        file.write('{"kind": "row", "x"')
    assert journal.entries() == [{"kind": "row", "x": 1}]


def test_a_case_that_did_not_end_is_the_lost_one(journal):
    with journal.case("first"):
        pass
    with pytest.raises(ValueError, match="broken"), journal.case("second", kernel="bf16"):
        raise ValueError("broken")
    journal.lose("it died")
    assert journal.of("lost")[-1] == {"kind": "lost", "name": "between cases", "reason": "it died"}
    journal.write("begin", name="third", kernel="bf16")
    journal.lose("it hung")
    assert journal.of("lost")[-1] == {
        "kind": "lost",
        "name": "third",
        "kernel": "bf16",
        "reason": "it hung",
    }
    journal.lose("another died before it began anything")
    assert journal.of("lost")[-1]["name"] == "between cases"
    for name in ("fourth", "fifth"):
        journal.write("begin", name=name)
    journal.lose("it was in two")
    assert journal.of("lost")[-1]["name"] == "fifth"
    assert journal.begun() == {"first", "second", "third", "fourth", "fifth"}
