"""Forms that libraries have, and that every form says what to write instead."""

from __future__ import annotations

import ast

import pytest

from headrace.diagnosis import forms
from headrace.diagnosis.forms import FORMS, Expression, form_of

PACKAGES = "/usr/lib/python3/site-packages"


def test_every_form_has_advice_and_every_table_names_a_form() -> None:
    for form in FORMS.values():
        assert form.title
        assert form.advice.endswith(".")
    for table in (forms._FUNCTIONS, forms._CALLS, forms._OPERATIONS):
        assert set(table.values()) <= set(FORMS)


@pytest.mark.parametrize(
    ("functions", "libraries", "form"),
    [
        ([("_tensor", "item"), ("grad_scaler", "_maybe_opt_step")], [], "grad scaler"),
        ([("clip_grad", "_clip_grads_with_norm_")], [], "clip_grad_norm_"),
        ([("transformer", "_detect_is_causal_mask")], [], "causal mask"),
        ([("pruning", "apply"), ("module", "_call_impl")], [], "inside PyTorch"),
        ([], [("lightning/pytorch/callbacks/progress/tqdm.py", "f")], "progress bar"),
        (
            [],
            [
                ("lightning/fabric/utilities/apply_func.py", "to_item"),
                ("lightning/pytorch/trainer/connectors/logger_connector/result.py", "metrics"),
            ],
            "progress bar",
        ),
        ([], [("transformers/trainer.py", "_maybe_log_save_evaluate")], "progress bar"),
        ([("_tensor", "__repr__")], [("tqdm/std.py", "set_postfix")], "progress bar"),
        ([], [("transformers/trainer.py", "training_step")], "item"),
        ([], [("timm/utils/metrics.py", "update")], "item"),
        ([], [("torchmetrics/aggregation.py", "_cast_and_nan_check_input")], "metric"),
        ([], [("torchmetrics/metric.py", "compute")], "item"),
    ],
)
def test_forms_of_libraries(
    functions: list[tuple[str, str]], libraries: list[tuple[str, str]], form: str
) -> None:
    found = [(f"{PACKAGES}/{file}", function) for file, function in libraries]
    assert form_of("aten::_local_scalar_dense", functions, None, found).name == form


def test_a_function_of_pytorch_is_named() -> None:
    functions = [("_tensor", "item"), ("lr_scheduler", "step"), ("module", "_call_impl")]
    form = form_of("aten::_local_scalar_dense", functions, None)
    assert (form.name, form.title) == ("inside PyTorch", "step() in PyTorch's lr_scheduler.py")
    assert form_of("", [("module", "_apply")], None).title == "_apply() in PyTorch's module.py"


def test_copies_of_accelerate_have_its_own_options() -> None:
    node = ast.parse("tensor.to(device)", mode="eval").body
    inside = [(f"{PACKAGES}/accelerate/utils/operations.py", "send_to_device")]
    for operation, library, form in (
        ("copy from pageable memory", inside, "accelerate copy"),
        ("blocking copy", inside, "accelerate copy"),
        ("blocking copy", [], "pinned copy"),
        ("copy from pageable memory", [], "to"),
    ):
        assert form_of(operation, [], Expression(node, None), library).name == form


def test_a_copy_into_host_memory_reads_from_the_device() -> None:
    node = ast.parse("host.copy_(x)", mode="eval").body
    for on_device, operation, form in (
        (False, "", "cpu"),
        (True, "", "pageable copy"),
        (None, "", "pageable copy"),
        (False, "copy from pageable memory", "pageable copy"),
        (None, "copy to pageable memory", "cpu"),
    ):
        assert form_of(operation, [], Expression(node, None, on_device)).name == form


def test_a_test_in_a_comprehension() -> None:
    """While it is tested, Python 3.11 gives the comprehension's place, Python 3.12 the test's."""
    for code, form in (
        ("[1 for _ in y if t.isnan()]", "finite check"),
        ("{k for k in y if k}", "branch"),
    ):
        whole = ast.parse(code, mode="eval").body
        assert isinstance(whole, ast.ListComp | ast.SetComp)
        (generator,) = whole.generators
        (test,) = generator.ifs
        assert Expression(whole, None).form() == form
        assert Expression(test, generator).form() == form
