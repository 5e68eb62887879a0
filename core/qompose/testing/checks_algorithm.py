# SPDX-License-Identifier: Apache-2.0
"""The checks of an algorithm: what it says, that it repeats, what it leaves alone, what it loses at most."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule

from qompose import convert_pt2e, prepare_pt2e, report, statistics
from qompose.algorithms import Algorithm
from qompose.algorithms.interface import UNREPORTED
from qompose.errors import MemberError, StatisticsError, UserError
from qompose.lowering.lower_regions import TORCH_TARGET
from qompose.testing.algorithm_suite import AlgorithmSuite, Place
from qompose.testing.checks_backend import through_a_file
from qompose.testing.checks_kernel import matches_reference
from qompose.testing.checks_rule import annotates
from qompose.testing.fixtures import Blocked, ContractError, NotApplicable, expecting, sqnr
from qompose.testing.trial import Inputs, Trial, calibrate_with, copies, outputs, quantizer_for

BATCHES = 12
"""Of calibration data: enough examples for what is judged on halves that are held back."""
_MOST_OTHER = 1e-4
"""The part of the integers that may differ where data comes in another order or in parts."""


def says_what_it_did(suite: AlgorithmSuite, place: Place) -> None:
    """The report has a line of it for the product: what it did, or why it did nothing."""
    trial = suite.trial(place)
    suite.suites[place.backend].require(annotates, trial)
    found = report(_converted(suite, trial))
    said = (str(line) for line in (*found.rewrites, *found.notes))
    lines = [line for line in said if not line.endswith(UNREPORTED)]
    if not any(suite.algorithm.word in line for line in lines):
        raise ContractError(
            _about(suite, trial),
            expected="a line of the report that starts with its name",
            found="; ".join(lines) or "no line",
            remedy=(
                "change weights through `change_products`: return what was done, or raise "
                "NotChanged with a reason"
            ),
        )


def repeats(suite: AlgorithmSuite, place: Place) -> None:
    """The same data gives the same bits, and torch's random state stays as it was."""
    trial, before = suite.trial(place), torch.random.get_rng_state()
    first = _converted(suite, trial)
    if not torch.equal(before, torch.random.get_rng_state()):
        raise ContractError(
            _about(suite, trial),
            expected="torch's random state is unchanged",
            found="it changed",
            remedy="draw from a separate torch.Generator with a fixed seed",
        )
    prepared = _calibrated(trial, _data(trial))
    again = [convert_pt2e(prepared), convert_pt2e(prepared)]
    for name, model in zip(("prepared again", "converted again"), again, strict=True):
        changed = [key for key in first.state_dict() if not _equal(first, model, key)]
        if changed:
            raise ContractError(
                _about(suite, trial),
                expected=f"the same parameters when the model is {name}",
                found=f"different values in {', '.join(changed)}",
                remedy=(
                    "do not keep state between layers or conversions, and change only what "
                    "`found` holds"
                ),
            )


def leaves_the_program_alone(suite: AlgorithmSuite, place: Place) -> None:
    """The program of the user, and what was observed, stay as they were."""
    trial = suite.trial(place)
    program = trial.built.program
    before = {name: value.clone() for name, value in program.state_dict.items()}
    prepared = _calibrated(trial, _data(trial))
    seen = copy.deepcopy(prepared.state_dict())
    _convert(suite, trial, prepared)
    changed = [n for n, value in before.items() if not torch.equal(value, program.state_dict[n])]
    after = prepared.state_dict()
    changed += [
        n for n, x in seen.items() if isinstance(x, Tensor) and not torch.equal(x, after[n])
    ]
    if changed:
        raise ContractError(
            _about(suite, trial),
            expected="the program and its observers are unchanged",
            found=f"different values in {', '.join(changed)}",
            remedy="do not write to tensors from `found`; return new ones",
        )


def takes_data_in_parts(suite: AlgorithmSuite, place: Place) -> None:
    """Other orders of the data, and merged statistics of its parts, give the same integers.

    One integer in ten thousand may differ, since sums of floats depend on their order.
    """
    trial = suite.trial(place)
    wanted, data = _converted(suite, trial), _data(trial)
    if type(suite.algorithm).learns is Algorithm.learns:
        others = {
            "split into parts": _merged(trial, data),
            "reversed": _calibrated(trial, data[::-1]),
        }
    else:  # it needs all data at once
        others = {"reversed": _calibrated(trial, data[::-1])}
    for name, prepared in others.items():
        found = _convert(suite, trial, prepared)
        other = _most_other(wanted, found)
        if other > _MOST_OTHER:
            raise ContractError(
                _about(suite, trial),
                expected=f"the same integers when the data is {name}",
                found=f"{other:.2%} of them differ",
                remedy="use only the statistics in `found`; they merge exactly",
            )


def loses_little(suite: AlgorithmSuite, place: Place) -> None:
    """On data alike that was not seen, outputs are at most `most_lost` dB worse than without it."""
    trial, plain = suite.trial(place), suite.trial(place, asked=False)
    models = _converted(suite, plain), _converted(suite, trial)
    batches = trial.batches("evaluation", BATCHES)
    before, after = (_ratio(trial, model, batches) for model in models)
    if not after >= before - suite.most_lost:
        raise ContractError(
            _about(suite, trial),
            expected=(
                f"at least {before - suite.most_lost:.1f} dB, at most {suite.most_lost:g} dB "
                "below rounding to nearest (most_lost)"
            ),
            found=f"{after:.1f} dB",
            remedy="evaluate a change on held-out data, and raise NotChanged if it does not help",
        )


def takes_odd_data(suite: AlgorithmSuite, place: Place) -> None:
    """One batch, zeros, a dead channel, huge values: finite outputs, or an error that says why."""
    trial = suite.trial(place)
    for kind, data in _odd(trial).items():
        prepared = _prepared(trial)
        try:
            if data:
                calibrate_with(prepared, data)
        except MemberError as error:
            raise ContractError(
                f"{_about(suite, trial)}, calibrated with {kind}",
                expected="the algorithm learns, or raises a qompose error with a reason",
                found=str(error),
                remedy="check the data of the block, and raise NotChanged with a reason",
            ) from error
        except UserError:
            continue
        with expecting(
            f"{_about(suite, trial)}, calibrated with {kind}",
            "it converts, or raises a qompose error with a reason",
            "check the statistics, and raise NotChanged with a reason",
        ):
            found = _convert_or_refuse(prepared)
        usual = trial.batches("evaluation", 1)[0]
        if found is not None and not all(bool(x.isfinite().all()) for x in outputs(found, usual)):
            raise ContractError(
                f"{_about(suite, trial)}, calibrated with {kind}",
                expected="finite outputs on ordinary data",
                found="NaN or infinity",
                remedy="check that errors and factors are finite, and raise NotChanged otherwise",
            )


def reaches_kernels(suite: AlgorithmSuite, place: Place) -> None:
    """What it decided is what the kernels of this process compute with."""
    backend, trial = suite.suites[place.backend], suite.trial(place)
    if TORCH_TARGET.name not in trial.terms.rule.kernels or not backend.in_process:
        raise NotApplicable("the rule has no kernel for this process")
    try:
        backend.require(matches_reference, suite.trial(place, asked=False), TORCH_TARGET.name)
    except Blocked as reason:
        raise NotApplicable(f"{reason} (also without the algorithm)") from reason
    backend.judge(matches_reference, trial, TORCH_TARGET.name)


def is_saved(suite: AlgorithmSuite, place: Place) -> None:
    """A converted model is the same once it is saved and loaded."""
    trial = suite.trial(place)
    model, batch = _converted(suite, trial), trial.batches("evaluation", 1)[0]
    loaded = through_a_file(model, _about(suite, trial), "check what is stored in the record")
    pairs = zip(outputs(model, batch), outputs(loaded, batch), strict=True)
    if not all(torch.equal(one, other) for one, other in pairs):
        raise ContractError(
            _about(suite, trial),
            expected="the same outputs after qompose.save and qompose.load",
            found="others",
            remedy="change weights only through `set_integers` and the parameters in `found`",
        )


def equals_its_copy(suite: AlgorithmSuite) -> None:
    """A copy is equal: configurations ask for the same algorithm if the objects are equal."""
    algorithm, copied = suite.algorithm, copy.deepcopy(suite.algorithm)
    if copied != algorithm and not isinstance(suite.source, str):
        raise ContractError(
            suite.subject,
            expected="a copy equals the original",
            found=f"{copied!r} != {algorithm!r}",
            remedy="make the class a frozen dataclass with its options as fields",
        )


def _about(suite: AlgorithmSuite, trial: Trial) -> str:
    return f"{suite.subject} for {trial}"


def _data(trial: Trial) -> list[Inputs]:
    return trial.batches("calibration", BATCHES)


def _prepared(trial: Trial) -> GraphModule:
    """Return the program with observers that saw nothing."""
    return prepare_pt2e(trial.built.program, quantizer_for(trial.terms, trial.model))


def _calibrated(trial: Trial, data: Sequence[Inputs]) -> GraphModule:
    return calibrate_with(_prepared(trial), data)


def _merged(trial: Trial, data: Sequence[Inputs]) -> GraphModule:
    """Return the program with what two calibrations saw, of half of the data each."""
    parts = [statistics(_calibrated(trial, part)) for part in (data[1::2], data[::2])]
    try:
        return parts[0].merged(parts[1]).apply(_prepared(trial))
    except StatisticsError as reason:
        raise NotApplicable(
            f"statistics of the configuration cannot be merged: {reason}"
        ) from reason


def _convert(suite: AlgorithmSuite, trial: Trial, prepared: GraphModule) -> GraphModule:
    remedy = "raise NotChanged with a reason if it cannot be applied"
    with expecting(_about(suite, trial), "convert_pt2e returns a Q/DQ model", remedy):
        return convert_pt2e(prepared)


def _converted(suite: AlgorithmSuite, trial: Trial) -> GraphModule:
    """Return the Q/DQ model of all data, made once."""
    made: GraphModule = trial.keep(
        "converted with sufficient data",
        lambda: _convert(suite, trial, _calibrated(trial, _data(trial))),
    )
    return made


def _convert_or_refuse(prepared: GraphModule) -> GraphModule | None:
    """Return the Q/DQ model, None where qompose says why there is none."""
    try:
        return convert_pt2e(prepared)
    except MemberError:
        raise  # an error of the algorithm's own
    except UserError:
        return None


def _equal(one: GraphModule, other: GraphModule, key: str) -> bool:
    found = other.state_dict().get(key)
    return found is not None and torch.equal(one.state_dict()[key], found)


def _most_other(one: GraphModule, other: GraphModule) -> float:
    """Return the largest part of the integers of a parameter that differs; 1 where parameters do."""
    before, after = one.state_dict(), other.state_dict()
    if before.keys() != after.keys():
        return 1.0
    integers = [n for n, x in before.items() if not x.is_floating_point() and x.numel()]
    parts = [float((before[name] != after[name]).float().mean()) for name in integers]
    return max(parts, default=0.0)


def _ratio(trial: Trial, model: GraphModule, batches: Sequence[Inputs]) -> float:
    """Return the signal to noise ratio of all batches together, in dB."""
    pairs = [(outputs(trial.model, batch), outputs(model, batch)) for batch in batches]
    wanted, found = (
        torch.cat([x.flatten() for pair in pairs for x in pair[side]]) for side in (0, 1)
    )
    return sqnr(wanted, found)


def _odd(trial: Trial) -> dict[str, list[Inputs]]:
    usual = _data(trial)

    def each(change: str) -> list[Inputs]:
        return [tuple(_changed(x, change) for x in copies(batch)) for batch in usual]

    return {
        "one batch": usual[:1],
        "the same batch repeated": usual[:1] * BATCHES,
        "zeros": each("zeros"),
        "a dead channel": each("dead"),
        "values of 1e30": each("huge"),
        "no data": [],
    }


def _changed(x: Tensor, change: str) -> Tensor:
    """Return a tensor of floats with another kind of values, in place; others as they are."""
    if not x.is_floating_point():
        return x
    if change == "zeros":
        return x.zero_()
    if change == "dead":
        x[..., :1] = 0.0
        return x
    x.view(-1)[0] = 1e30
    return x
