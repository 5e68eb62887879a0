# SPDX-License-Identifier: Apache-2.0
"""What users suffer from elsewhere, and the tests that hold it here: each of them exists.

The numbers are those of the project's list of needs.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

NEEDS = {
    "1 nothing was quantized, silently": (
        "core/test_nothing_silent.py::test_models_in_which_others_quantize_nothing",
        "core/test_pipeline.py::test_strict_makes_nothing_quantized_an_error",
    ),
    "2 int8 that never reaches an int8 kernel": (
        "core/test_reporting.py::test_what_was_not_lowered_is_named",
        "core/test_benchmarking.py::test_slower_than_float_is_said_with_the_name_and_the_factor",
        "composed/test_rules.py",
    ),
    "3 batch norms folded where that changes the model": (
        "core/test_rewrites.py::test_obstacles_are_reported_and_nothing_is_folded",
        "core/test_rewrites.py::test_a_fold_changes_rounding_alone",
    ),
    "4 the quantized model is bigger": (
        "core/test_conversion_nodes.py::test_the_converted_model_is_smaller",
        "core/test_conversion_nodes.py::test_names_come_from_module_paths",
    ),
    "5 masks, infinities, NaN and observers that saw nothing": (
        "core/test_screening.py::test_hidden_positions_keep_the_weight_zero",
        "core/test_screening.py::test_nan_names_tensor_module_and_owner",
        "core/test_conversion_forms.py::test_a_conversion_that_fails_leaves_the_prepared_model_as_it_was",
    ),
    "6 other answers on another processor": (
        "x86_inductor/operators/test_products.py::test_the_largest_possible_sums_are_exact",
        "x86_inductor/onednn/test_exactness.py::test_everything_again_without_vnni",
    ),
    "7 compositions that depend on order and drop hooks": (
        "core/test_composition_order.py::test_rules_divided_among_members",
        "core/test_annotation_conflicts.py::test_a_changed_annotation_is_an_error_that_names_both",
        "core/test_composition.py::test_every_hook_of_every_member_is_called",
    ),
    "8 capability queries that are decorative": (
        "composed/test_capabilities.py::test_every_claim_is_in_a_row",
        "composed/test_capabilities.py::test_the_answer_for_a_node_is_what_prepare_does",
        "contracts/test_xnnpack.py",
    ),
    "9 one layer in float, and every backend with selectors of its own": (
        "composed/test_selectors.py::test_the_more_specific_level_wins",
        "core/test_selectors.py::test_a_name_that_is_not_there_is_an_error_with_near_names",
        "core/test_selection.py::test_a_selector_can_leave_one_role_in_float",
    ),
    "10 shared specifications that crash": (
        "core/test_sharing.py::test_errors_name_both_owners",
        "core/test_fuzzed_annotations.py::test_any_annotations_are_followed_or_refused",
    ),
    "11 data movement between unequal scales": (
        "core/test_operators.py::test_it_commutes_with_quantization",
        "core/test_operators.py::test_alike_specifications_on_both_sides_are_one_scale",
    ),
    "12 static, dynamic, weight-only and groups in one model": (
        "core/test_conversion_forms.py::test_one_model_has_all_schemes_side_by_side",
        "core/test_conversion_forms.py::test_calibration_changes_no_bit_where_none_is_needed",
    ),
    "13 operators that have to be taken apart": (
        "core/test_rewrites.py::test_most_of_a_transformer_block_is_annotated",
        "core/test_rewrites.py::test_without_a_claimant_operators_stay_as_exported",
    ),
    "14 control flow and nested graphs": (
        "core/test_nested.py::test_all_products_inside_become_integers",
        "core/test_nested.py::test_a_branch_that_never_ran_is_named",
        "core/test_nested.py::test_one_tensor_under_names_in_and_out_of_bodies_has_one_scale",
    ),
    "15 embeddings that dequantize the whole table": (
        "embedding/test_embedding.py::test_the_cost_does_not_grow_with_the_table",
        "embedding/test_embedding.py::test_indices_are_never_annotated_nor_changed",
    ),
    "16 tied tables stored twice": (
        "core/test_tying.py::test_a_shared_parameter_is_stored_once",
        "core/test_tying.py::test_where_no_scheme_suits_every_objection_is_named",
    ),
    "17 half precision and integers": (
        "core/test_zoo.py::test_the_program_is_left_alone_and_no_operator_or_type_changes",
        "core/test_conversion_nodes.py::test_every_original_operator_keeps_its_type",
    ),
    "24 time on big graphs: benchmarks/prepare_convert.py, for no test depends on time": (
        "core/test_exported.py",
    ),
    "25 metadata that torch changes": (
        "interop/test_engine_parity.py::test_plans_need_no_meta_but_values",
        "interop/test_interop.py",
        "interop/test_members_that_ask.py",
        "ecosystem/test_pairs.py",
    ),
    "26 the caller's model is changed": (
        "core/test_zoo.py::test_the_program_is_left_alone_and_no_operator_or_type_changes",
        "core/test_hidden_writes.py::test_calibration_fills_no_buffer_of_the_caller",
    ),
    "27 dynamic shapes and signatures are lost": (
        "core/test_zoo.py::test_dynamic_dimensions_stay_dynamic",
        "core/test_signature.py::test_a_linear_function_of_a_dimension_stays_tied_to_it",
    ),
    "28 what is saved does not load": (
        "core/test_artefact.py::test_a_fresh_process",
        "core/test_artefact.py::test_nothing_is_unpickled",
        "composed/test_artefact.py::test_a_missing_plugin_is_named_when_its_kernels_are_wanted",
    ),
    "31 which layer hurts, and what to leave in float": (
        "composed/test_tuning.py::test_planted_channel_is_ranked_first_and_restored",
        "composed/test_sensitivity.py::test_costs_are_those_of_conversions_of_one_operator",
        "core/diagnosis/test_tuning.py::test_nothing_can_be_taken_back",
    ),
    "34 writing a backend takes weeks": (
        "test_authoring.py::test_suite_passes_unedited",
        "test_authoring.py::test_a_wrong_kernel_fails",
        "core/test_scaffolding.py::test_is_small",
        "test_docs.py::test_tutorial_ends_in_the_example",
    ),
    "35 one broken plugin, and nothing works or nothing is said": (
        "core/test_plugins.py::test_a_fault_is_told_with_its_source_and_harms_nobody_else",
        "core/test_offers.py::test_a_malformed_line_of_one_package_hides_nothing_of_another",
        "core/test_checking.py::test_each_has_its_row",
        "core/test_cli.py::test_listing_imports_little",
        "test_packaging.py::test_check_names_each_with_its_reason",
    ),
    "36 many warnings, few facts": (
        "core/test_announcing.py::test_one_line_for_each_stage",
        "core/test_announcing.py::test_nothing_quantized_names_operators_and_counts_the_rest",
        "composed/test_report_counts.py",
    ),
}


@pytest.mark.parametrize("need", NEEDS)
def test_the_tests_of_a_need_exist(need: str) -> None:
    for name in NEEDS[need]:
        path, _, function = name.partition("::")
        tree = ast.parse((TESTS / path).read_text("utf-8"))
        found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert not function or function in found, name
