"""Forms that libraries have, and that every form says what to write instead."""

from __future__ import annotations

import ast

import pytest

from headrace.diagnosis.forms import FORMS, Expression, form_of

PACKAGES = "/usr/lib/python3/site-packages"


def test_every_form_has_advice_and_nothing_stands_for_two_forms() -> None:
    for form in FORMS.values():
        assert form.title
        assert form.advice.endswith(".")
    for words in (
        [call for form in FORMS.values() for call in form.calls.split()],
        [one for form in FORMS.values() for one in form.functions.split()],
        [one for form in FORMS.values() for one in form.operations],
    ):
        assert len(set(words)) == len(words)


@pytest.mark.parametrize(
    ("functions", "libraries", "form"),
    [
        ([("_tensor", "item"), ("grad_scaler", "_maybe_opt_step")], [], "grad scaler"),
        ([("grad_scaler", "get_scale")], [], "scale"),
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
    deeper = [(f"{PACKAGES}/transformers/tokenization_utils_base.py", "to"), *inside]
    for operation, library, form in (
        ("copy from pageable memory", inside, "accelerate copy"),
        ("blocking copy", inside, "accelerate copy"),
        ("blocking copy", deeper, "accelerate copy"),
        ("blocking copy", [], "pinned copy"),
        ("copy from pageable memory", [], "to"),
    ):
        assert form_of(operation, [], Expression(node, None), library).name == form


def test_the_code_of_a_library_is_not_the_users_to_change() -> None:
    node = ast.parse("mask.all() and 1", mode="eval").body
    library = [(f"{PACKAGES}/einx.py", "where")]
    for file, advice in (
        (f"{PACKAGES}/transformers/masking_utils.py", "The line is in transformers: look for an"),
        (f"{PACKAGES}/einx.py", "The line is in einx: look for an option of einx that avoids it"),
        ("<string>", FORMS["branch"].advice),
    ):
        form = form_of("aten::is_nonzero", [], Expression(node, None), [(file, "function")])
        assert (form.name, form.title) == ("branch", FORMS["branch"].title)
        assert form.advice.startswith(advice)
    copy = form_of("", [], Expression(ast.parse("x.to(y)", mode="eval").body, None), library)
    assert copy == FORMS["to"]  # pinning is in the user's hands


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


def test_a_value_that_is_tested() -> None:
    for code, form in (("t.isnan()", "finite check"), ("k > 0", "branch"), ("x[i]", "branch")):
        node = ast.parse(code, mode="eval").body
        assert Expression(node, None, is_tested=True).form() == form


def test_a_function_that_compares_inside_is_not_equal() -> None:
    for code, form in (("torch.cov(x)", "other"), ("torch.equal(x, y)", "equal")):
        node = ast.parse(code, mode="eval").body
        assert form_of("aten::equal", [], Expression(node, None)).name == form


@pytest.mark.parametrize(
    ("code", "form"),
    [("array.array('f', [t])", "number"), ("numpy.array([t])", "numpy"), ("array([t])", "other")],
)
def test_an_array_is_numpys_only_if_the_line_says_so(code: str, form: str) -> None:
    node = ast.parse(code, mode="eval").body
    found = form_of("aten::_local_scalar_dense", [], Expression(node, None))
    assert found.name == form


def test_numbers_of_the_device_in_a_list_are_read() -> None:
    node = ast.parse("torch.tensor([x.mean(), x.sum()])", mode="eval").body
    for operation, form in (
        ("aten::_local_scalar_dense", "list of tensors"),
        ("copy from pageable memory", "new tensor"),
    ):
        assert form_of(operation, [], Expression(node, None)).name == form
