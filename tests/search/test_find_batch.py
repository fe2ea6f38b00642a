"""`paceline find-batch` with real trials."""


def test_an_error_that_is_not_about_memory_ends_the_search(here) -> None:
    answer = here("find-batch", "digits", "--model.name", "vit_tiny_patch16_224", "--model.options", "{depth: none}")
    assert answer.returncode == 1
    assert [line.split()[0] for line in answer.stdout.splitlines()] == ["per-rank"]  # no trial is shown as too large
    assert answer.stderr.rstrip().endswith("[invalid-model-options]")
    assert answer.stderr.count("[") == 1
