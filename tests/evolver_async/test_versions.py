"""Digest of the source, by which the hosts of a run are compared."""

from pathlib import Path

import pytest

from evolver_async.process import package_versions


def test_a_link_to_nothing_as_an_editor_leaves_it_is_no_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "a_package"
    package.mkdir()
    (package / "__init__.py").write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(package_versions, "OURS", ("a_package",))
    before = package_versions._digest()
    (package / ".#one.py").symlink_to("someone@host.1234:1")
    assert package_versions._digest() == before
    (package / "two.py").write_text("")
    assert package_versions._digest() != before
