"""Checks that the mutations in `mutations.py` can be applied to the current code."""

import ast

import pytest

import mutations


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutations_replace_text_that_occurs_exactly_once_and_produce_valid_code(mutation):
    text = (mutations.ROOT / mutation.path).read_text(encoding="utf-8")
    assert text.count(mutation.original) == 1
    ast.parse(text.replace(mutation.original, mutation.replacement))
    path, _, test = mutation.tests.partition("::")
    assert f"def {test}" in (mutations.ROOT / path).read_text(encoding="utf-8")
