"""Functions called after a package is imported."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from adapters.clients.libraries import when_imported


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a package that has not been imported, and return its name."""
    name = f"package_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    return name


def test_the_function_is_called_once_after_the_import(package: str) -> None:
    values: list[int] = []
    before = [*sys.meta_path]
    when_imported(package, lambda module: values.append(module.value))
    assert importlib.util.find_spec(package), "to look for it is not to import it"
    assert values == []
    importlib.reload(importlib.import_module(package))
    assert (values, sys.meta_path) == ([1], before)


def test_several_functions_can_wait_for_the_same_package(package: str) -> None:
    done: list[str] = []
    for who in ("first", "second"):
        when_imported(package, lambda _, who=who: done.append(who))
    importlib.import_module(package)
    assert sorted(done) == ["first", "second"]


def test_the_function_is_called_at_once_if_the_package_is_imported() -> None:
    done: list[str] = []
    when_imported("sys", lambda _: done.append("sys"))
    assert done == ["sys"]


def test_importing_a_missing_package_still_raises(package: str) -> None:
    when_imported("no_such_package", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        importlib.import_module("no_such_package")
