# SPDX-License-Identifier: Apache-2.0
"""Lower: each claimed region of a converted model is replaced by its owner's kernel for a target."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch.fx import GraphModule, Node

from qompose.backend import Backend, Finished, Target
from qompose.claims import Claim
from qompose.counting import KERNELS_TAG
from qompose.errors import ConfigError, TargetError, blaming, near_names
from qompose.graph import owner_of, remove_dead, tag, tag_of, without_readers
from qompose.nested import graphs_in, nodes_in
from qompose.plan import Record
from qompose.plugins import obstacle
from qompose.region import Region
from qompose.rules import Kernel, NotLowerable

TORCH_TARGET = Target("torch", lambda module, signature: Finished(module))
"""The process itself: its last step is nothing."""


def find_target(name: str, record: Record) -> Target:
    """Return the target that the owners of a model's claims share.

    Raises:
        TargetError: an owner has no kernels for it, or cannot run here; nobody brings the runtime, or
            it is missing here.
        MemberError: a backend or a target fails when it is asked whether it can run here.
    """
    known = {TORCH_TARGET.name: TORCH_TARGET}
    for backend in record.backends.values():
        known.update({target.name: target for target in backend.targets})
    owners = {claim.owner for claim in record.plan.claims}
    tables = [backend for owner, backend in record.backends.items() if owner in owners]
    if name not in {*known}.union(*map(_targets, tables)):
        close = near_names(str(name), known)
        raise TargetError(
            f"No member of this composition knows a target {name!r}{close}. Known: {_list({*known})}. "
            "A runtime of another backend takes part where that backend is a member."
        )
    lacking = [
        f"{owner} has kernels for {_list(_targets(record.backends.get(owner)))}"
        f"{'' if owner in record.backends else ' (it annotates only: run the converted model)'}"
        for owner in sorted(owners)
        if name not in _targets(record.backends.get(owner))
    ]
    if name not in known or lacking:
        lacks = "; ".join(lacking) or f"no member brings the runtime {name!r}"
        raise TargetError(
            f"This composition cannot be lowered to {name!r}: {lacks}. "
            f"Targets that all members share: {_list(_shared(record, owners, known))}."
        )
    problem = obstacle(known[name], f"target {name!r} of {_bringer(known[name], record)}")
    if problem:
        raise TargetError(f"The target {name!r} cannot be used here: {problem}")
    for owner in sorted(owners):
        problem = obstacle(record.backends[owner], f"backend {owner!r}")
        if problem:
            raise TargetError(f"The kernels of {owner!r} cannot be used here: {problem}")
    return known[name]


def _bringer(target: Target, record: Record) -> str:
    return next((b.name for b in record.backends.values() if target in b.targets), "qompose")


def _targets(backend: Backend | None) -> set[str]:
    if backend is None:
        return set()
    return {target for rule in backend.rules for target in rule.kernels}


def _shared(record: Record, owners: set[str], known: Mapping[str, Target]) -> set[str]:
    sets = [_targets(record.backends.get(owner)) for owner in owners]
    return set(known).intersection(*sets)


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def replace_regions(
    model: GraphModule, record: Record, target: str
) -> tuple[dict[int, str], dict[int, str], dict[int, str]]:
    """Replace the regions of all claims, in place, as far as there are kernels.

    Returns:
        by claim: the kernels in place; the reasons where there is none; and the kernels that the
        target's last step is expected to supply.
    """
    regions = _regions(model)
    kept = {node for part in graphs_in(model) for node in without_readers(part)}
    done: dict[int, str] = {}
    fallbacks: dict[int, str] = {}
    left: dict[int, str] = {}
    for number, claim in enumerate(record.plan.claims):
        if number in record.dropped:
            continue
        rule = record.backends[claim.owner].rule(claim.rule)
        kernel = rule.kernels.get(target) if rule else None
        if kernel is None:
            fallbacks[number] = f"rule {claim.rule} has no kernel for {target}"
            continue
        try:
            if _replace(number, claim, regions[number], kernel):
                done[number] = kernel.name
                _remove([node for node in regions[number] if node not in kept])
            else:
                left[number] = kernel.name
        except NotLowerable as reason:
            fallbacks[number] = str(reason)
    for part in graphs_in(model):
        remove_dead(part.graph, kept)
    return done, fallbacks, left


def _replace(number: int, claim: Claim, nodes: Sequence[Node], kernel: Kernel) -> bool:
    """Put a kernel in the place of a region; return False where it leaves that to the target.

    The node that stands for the region then says so, beside those it stood for before.
    """
    if kernel.emit is None:
        return False
    region = Region(owner_of(nodes[0]), claim, nodes, float_output=kernel.float_output)
    who = f"kernel {kernel.name!r} of {claim.owner}, rule {claim.rule}, at {claim.anchor}"
    with blaming(who, NotLowerable):
        emitted = kernel.emit(region)
    if emitted is None:
        return False
    if not isinstance(emitted, Node) or emitted.graph is not nodes[0].graph:
        raise ConfigError(f"{who}, gave {emitted!r}, and not a node that it inserted")
    gone = [] if region.output is None else list(region.output_node.users)
    before = [n for node in (emitted, *gone) for n in tag_of(node, KERNELS_TAG) or ()]
    region.replace(emitted)
    tag(emitted, **{KERNELS_TAG: [*before, number]})
    return True


def _remove(region: Sequence[Node]) -> None:
    """Remove a region that a kernel replaced, last operator first: in-place ones write to its own values."""
    for node in reversed(region):
        if not node.users:
            node.graph.erase_node(node)


def _regions(model: GraphModule) -> dict[int, list[Node]]:
    regions: dict[int, list[Node]] = defaultdict(list)
    for node in nodes_in(model):
        claim = tag_of(node, "claim")
        if claim is not None:
            regions[claim].append(node)
    return regions


def settle(
    finished: Finished,
    done: Mapping[int, str],
    fallbacks: Mapping[int, str],
    left: Mapping[int, str],
) -> tuple[dict[int, str], dict[int, str]]:
    """Combine what kernels replaced with what the target's last step says of the rest."""
    kernels = {**done, **{n: k for n, k in finished.kernels.items() if n not in done}}
    reasons = {
        number: finished.fallbacks.get(number, f"the target took no {name}")
        for number, name in left.items()
        if number not in kernels
    }
    remaining = {n: r for n, r in {**fallbacks, **reasons}.items() if n not in kernels}
    return kernels, remaining
