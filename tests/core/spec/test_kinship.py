# SPDX-License-Identifier: Apache-2.0
"""Classes are registered once the other package is there, wholly, and not before."""

from __future__ import annotations

import sys
from abc import ABC
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from qompose import ComposableQuantizer, QuantizationSpec
from qompose.observers import MinMaxObserver
from qompose.spec import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    SharedQuantizationSpec,
    quantization_spec,
)
from qompose.spec.quantization_spec import register_virtual_subclasses, virtual_subclass_of

from tests.core.toy import LINEAR, NullQuantizer, export, toy

NAME = "a_package_that_tests_of_kinship_make_up"


@pytest.fixture
def other() -> Iterator[ModuleType]:
    """A module that is being imported: it is known, and has no classes yet."""
    sys.modules[NAME] = module = ModuleType(NAME)
    yield module
    del sys.modules[NAME]
    for key in [key for key in quantization_spec._unregistered if key[0] == NAME]:
        del quantization_spec._unregistered[key]


@pytest.fixture
def ours() -> type:
    return virtual_subclass_of(NAME, "Base")(type("Ours", (), {}))


def base() -> type:
    """An abstract base class of the other package."""
    return type("Base", (ABC,), {})


def test_nothing_happens_before_the_other_is_imported(ours: type) -> None:
    register_virtual_subclasses()
    assert (NAME, "Base") in quantization_spec._unregistered
    assert NAME not in sys.modules
    del quantization_spec._unregistered[NAME, "Base"]


def test_a_module_may_be_half_imported_and_come_to_its_class_later(
    ours: type, other: ModuleType
) -> None:
    register_virtual_subclasses()
    other.Base = base()  # type: ignore[attr-defined]
    assert not isinstance(ours(), other.Base)
    register_virtual_subclasses()
    assert isinstance(ours(), other.Base)
    assert isinstance(type("Derived", (ours,), {})(), other.Base)
    assert not isinstance(object(), other.Base)


def test_it_is_done_once(ours: type, other: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    other.Base = base()  # type: ignore[attr-defined]
    register_virtual_subclasses()
    monkeypatch.setattr(other.Base, "register", None)
    register_virtual_subclasses()
    assert (NAME, "Base") not in quantization_spec._unregistered


MOMENTS: dict[str, Callable[[], object]] = {
    "a specification": lambda: QuantizationSpec(torch.int8, MinMaxObserver),
    "a fixed one": lambda: FixedQParamsQuantizationSpec(torch.int8, 1.0, 0),
    "a shared one": lambda: SharedQuantizationSpec(None),  # type: ignore[arg-type]
    "a derived one": lambda: DerivedQuantizationSpec([], print, torch.int8),  # type: ignore[arg-type]
    "an annotation": QuantizationAnnotation,
    "an observer": MinMaxObserver,
    "a quantizer": NullQuantizer,
    "a quantizer of rules": toy,
    "a composition": lambda: ComposableQuantizer([QUANTIZER]),
    "a program that is transformed": lambda: QUANTIZER.transform_for_annotation(PROGRAM),
}
QUANTIZER = toy(LINEAR)
PROGRAM = export(torch.nn.Linear(2, 2), torch.randn(1, 2)).module()


@pytest.mark.parametrize("make", MOMENTS.values(), ids=MOMENTS)
def test_what_is_made_makes_them_kin(
    make: Callable[[], object], ours: type, other: ModuleType
) -> None:
    other.Base = base()  # type: ignore[attr-defined]
    assert not issubclass(ours, other.Base)
    make()
    assert issubclass(ours, other.Base)


def test_a_class_that_is_not_abstract_is_left_alone(ours: type, other: ModuleType) -> None:
    other.Base = type("Base", (), {})  # type: ignore[attr-defined]
    register_virtual_subclasses()
    assert not isinstance(ours(), other.Base)
