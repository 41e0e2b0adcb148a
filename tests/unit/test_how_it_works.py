"""The pages for contributors speak of files and names that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kerasps.step.phases.update_rules import UpdateRule
from kerasps.strategy_arguments import ARGUMENTS_OF_MODE
from support.names import missing_file, missing_name, quoted, variables_in_source

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")
PAGES = sorted((ROOT / "kerasps").glob("*/README.md"))
ALL = TEXT + "".join(page.read_text(encoding="utf-8") for page in PAGES)
FILES = sorted(set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.py)`", ALL)))
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
CONTRIBUTORS = [
    *(ROOT / "docs" / f"{name}.md" for name in ("how_it_works", "where_to_add", "style")),
    *(ROOT / "CONTRIBUTING.md", ROOT / "docs" / "releasing.md", *DECISIONS, *PAGES),
]
EVERY_PAGE = [*(ROOT / "docs").rglob("*.md"), *PAGES, *ROOT.glob("*.md")]
# Names that look like ours, of other projects and of texts.
FOREIGN = {
    *("ClusterCoordinator", "DenseHashTable", "GLIBC_TUNABLES", "GetOrCreateKernelAndDevice"),
    *("LD_PRELOAD", "LossScaleOptimizer", "MALLOC_MMAP_THRESHOLD_"),
    *("MALLOC_TRIM_THRESHOLD_", "M_MMAP_THRESHOLD", "M_TRIM_THRESHOLD"),
    *("MaxNorm", "MutableHashTable", "ResourceApplyAdam"),
    *("SaveV2", "StringLookup", "TF_CONFIG"),
    *("TF_CPP_MIN_LOG_LEVEL", "TF_NUM_INTRAOP_THREADS", "TypeError"),
    *("ValueError", "VarHandleOp", "embedding_adagrad"),
    *("flat_map", "global_clipnorm", "num_channels_per_target"),
    *("reshuffle_each_iteration", "rpc_options", "test_step"),
    *("train_step", "update_server_def", "wide_and_deep"),
    *("BackupAndRestore._save_model", "keras.layers.Embedding"),
}
DOORS = [*(ROOT / "kerasps").glob("*/__init__.py"), *(ROOT / "kerasps/tools").glob("*/__init__.py")]
WINGS = sorted(str(path.parent.relative_to(ROOT / "kerasps")) for path in DOORS)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_named_is_there(name):
    assert (ROOT / "kerasps" / name).is_file() or (ROOT / name).is_file()


@pytest.mark.parametrize("wing", WINGS)
def test_every_wing_is_told_of(wing):
    assert f"| `{wing}/` |" in TEXT


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_a_page_of_a_wing_is_linked(page):
    assert f"](../kerasps/{page.parent.name}/README.md)" in TEXT


def page_id(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", CONTRIBUTORS, ids=page_id)
def test_names_in_backticks_are_in_the_source(page):
    text = page.read_text(encoding="utf-8")
    if page.parent.name == "hooks":  # Its table is compared with the code by test_compat.py.
        text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    foreign = FOREIGN | variables_in_source()
    assert [name for name in quoted(text) if missing_name(name, foreign)] == []


@pytest.mark.parametrize("page", EVERY_PAGE, ids=page_id)
def test_files_public_names_and_variables_in_backticks_are_there(page):
    text = page.read_text(encoding="utf-8")
    names = quoted(text)
    variables = set(re.findall(r"KERASPS_[A-Z_]*[A-Z]", text))
    assert variables <= variables_in_source()
    assert [name for name in names if missing_file(name)] == []
    ours = [name for name in names if name.startswith(("kerasps.", "strategy."))]
    assert [name for name in ours if missing_name(name, {"strategy.run"})] == []


def test_decisions_are_numbered_and_listed():
    index = (ROOT / "docs" / "decisions" / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[(\d{4})\]\((.+\.md)\)", index, re.MULTILINE)
    assert [name for _, name in listed] == [page.name for page in DECISIONS]
    assert [int(number) for number, _ in listed] == [*range(1, len(DECISIONS) + 1)]


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_has_its_parts(page):
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {page.stem[:4]}: ")
    # A table may be as long as what it lists.
    lines = [line for line in text.splitlines() if not line.startswith("|")]
    assert len(lines) <= 60
    assert len(text.splitlines()) >= 15
    for part in ("Context", "Choice", "What would change it"):
        assert f"\n## {part}\n" in text


def test_the_introduction_is_short():
    assert len(TEXT.splitlines()) <= 200


def test_the_table_of_an_update_rule_has_its_members():
    page = (ROOT / "docs" / "where_to_add.md").read_text(encoding="utf-8")
    table = page.partition("| member |")[2].partition("\n\n")[0]
    cells = re.findall(r"^   \| (`.*?) \|", table, re.MULTILINE)
    listed = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    members = {*vars(UpdateRule), *UpdateRule.__annotations__} - {"fences"}
    assert sorted(listed) == sorted(name for name in members if not name.startswith("_"))


def test_the_table_of_update_modes_has_their_arguments():
    page = (ROOT / "docs" / "where_to_add.md").read_text(encoding="utf-8")
    rows = re.findall(r'^\| `"(\w+)"`.*\| (.*) \|$', page, re.MULTILINE)
    found = {mode: re.findall(r"`(\w+)`", arguments) for mode, arguments in rows}
    assert found == {mode: list(arguments) for mode, arguments in ARGUMENTS_OF_MODE.items()}
