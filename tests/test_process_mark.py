"""The order of test files, in which `make` hands them to its workers."""

from pathlib import Path

from process_mark import pytest_collection_modifyitems

MAKEFILE = Path(__file__).parents[1] / "Makefile"


class Item:
    """A collected test with its marks and their arguments."""

    def __init__(self, path: str, name: str, **marks: tuple[float, ...]) -> None:
        self.path, self.name, self.marks = Path(path), name, marks

    def add_marker(self, name: str) -> None:
        self.marks[name] = ()

    def get_closest_marker(self, name: str):
        return type("Mark", (), {"args": self.marks[name]}) if name in self.marks else None


def test_files_whose_tests_take_long_come_first_and_stay_whole() -> None:
    items = [
        Item("tests/test_a.py", "a1"),
        Item("tests/test_b.py", "b1"),
        Item("tests/test_b.py", "b2", process=()),
        Item("tests/system/test_c.py", "c1"),
        Item("tests/test_d.py", "d1"),
        Item("tests/test_e.py", "e1", process=(), time_limit=(700.0,)),
        Item("tests/test_e.py", "e2"),
        Item("tests/test_f.py", "f1", time_limit=(900.0,)),
    ]
    pytest_collection_modifyitems(items)  # pyright: ignore[reportArgumentType]
    assert [item.name for item in items] == ["f1", "e1", "e2", "b1", "b2", "c1", "a1", "d1"]
    assert "process" in next(item for item in items if item.name == "c1").marks


def test_the_order_is_kept_where_files_are_handed_out() -> None:
    """Else xdist puts files with few tests last, and whole runs are such files."""
    text = MAKEFILE.read_text().replace("\\\n", " ")
    spread = [line for line in text.splitlines() if "--numprocesses" in line]
    assert len(spread) >= 3 and all("--no-loadscope-reorder" in line for line in spread)
